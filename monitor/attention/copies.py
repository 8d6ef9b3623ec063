"""Copies of a watched module leave clean: unwatched, and loaded where foreshock is not installed.

copy.deepcopy, copy.copy, pickle and torch.save all ask an object for its state by `__getstate__`, and an attribute of
that name goes before the class's own.
"""

import types
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

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
    state = {name: value for name, value in state.items() if name not in (_NAME, LAYER_ATTRIBUTE)}
    for hooks in _HOOKS:
        ours = {number for number, hook in state[hooks].items() if is_ours(hook)}
        for name in (hooks, *_TRAITS_OF_HOOKS[hooks]):
            kept = state[name].copy()
            for number in ours:
                kept.pop(number, None)
            state[name] = kept
    return state


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
