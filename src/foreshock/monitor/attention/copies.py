"""Copies of a watched module leave clean: unwatched, and loaded where foreshock is not installed.

copy.deepcopy, copy.copy, pickle and torch.save all ask an object for its state by `__getstate__`, and an attribute of
that name goes before the class's own. Who copies a module's `__dict__` past it takes hooks and layer along: they do
nothing in a copy, and are taken out when it is attached itself or when the agent leaves.
"""

import gc
import types
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer

LAYOUT_ATTRIBUTE: Final = "_foreshock_layout"
"""Of a projection: the proof of where its heads lie (layout_proof.py)."""
_NAME: Final = "__getstate__"
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_TRAITS_OF_HOOKS: Final = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def _state_without_us(module: nn.Module) -> Any:
    state = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    return _stripped(dict(state))


def _stripped(state: dict[str, Any]) -> dict[str, Any]:
    """`state`, a module's attributes, without ours; its dictionaries of hooks may be shared and stay as they are."""
    for name in (_NAME, LAYER_ATTRIBUTE, LAYOUT_ATTRIBUTE):
        state.pop(name, None)
    for hooks in _HOOKS:
        ours = {number for number, hook in state[hooks].items() if is_ours(hook)}
        for name in (hooks, *_TRAITS_OF_HOOKS[hooks]):
            kept = state[name].copy()
            for number in ours:
                kept.pop(number, None)
            state[name] = kept
    return state


def is_watched(module: nn.Module) -> bool:
    """Whether an agent watches this very module; what a copy of another one holds is taken out of it."""
    if LAYER_ATTRIBUTE not in vars(module):
        return False
    layer = vars(module)[LAYER_ATTRIBUTE]
    if isinstance(layer, WatchedLayer) and layer.home() is module:
        return True
    _stripped(vars(module))
    return False


def clean_copies(hook: Callable[..., Any]) -> None:
    """Take ours out of every module that holds `hook`, which each watched module has, and is not watched itself."""
    # of its own module: whoever refers to that is found by a second walk of the heap alone
    own = getattr(hook, "__globals__", None)
    dicts = [each for each in gc.get_referrers(hook) if isinstance(each, dict) and each is not own]
    held = [each for each in dicts if hook in each.values()]
    for owner in gc.get_referrers(*held) if held else ():
        # the attributes of an object are a dictionary of their own, or, in newer versions of Python, part of it
        space = vars(owner) if issubclass(type(owner), nn.Module) else owner
        if isinstance(space, dict) and any(space.get(name) in held for name in _HOOKS):
            layer = space.get(LAYER_ATTRIBUTE)
            home = layer.home() if isinstance(layer, WatchedLayer) else None
            if home is None or vars(home) is not space:
                _stripped(space)


def is_ours(hook: object) -> bool:
    """Whether a hook of a module was put there by the agent."""
    return str(getattr(hook, "__module__", "")).startswith("foreshock.monitor.")


def leave_no_trace_in_copies(module: nn.Module) -> Callable[[], None]:
    """Let copies and pickles of `module` carry no hook and no layer of ours; returns the undoing, to be called when
    they have been taken out."""
    vars(module)[_NAME] = types.MethodType(_state_without_us, module)

    def undo() -> None:
        hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
        if LAYER_ATTRIBUTE not in vars(module) and not any(is_ours(hook) for hook in hooks):
            vars(module).pop(_NAME, None)

    return undo
