"""Find attention that is not watched: by calls in the first step, by autograd graphs, and by modules added later.

Graphs are read in the backwards of the first steps, and again after modules changed. Other steps are not slowed down.
"""

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from foreshock.monitor.attention.interception import sdpa_rebinding
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.attention.watched_layer import numerics_for, outside
from foreshock.monitor.guard import logger
from foreshock.monitor.model.discovery import Called, find_attention
from foreshock.monitor.model.executed import attention_in, broken_rows

_LOOKS: Final = 2
"""The number of backwards through the model that are read; the first may run through only a part of it."""
_TRIES: Final = 8
"""The maximum number of backwards that are checked for running through the model."""


class UnwatchedAttentionFinder:
    """Finds the attention of `model` that is not watched. known: names of the attention modules that attach found.
    given_heads: the argument of attach. layouts: each watched module and its check, which is informed when the module
    is removed.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Sequence[str],
        given_heads: dict[str, int],
        layouts: Sequence[tuple[nn.Module, LayoutCheck]] = (),
    ) -> None:
        self._model: Final = ref(model)
        self._known = {name: model.get_submodule(name) for name in known}
        self._given_heads: Final = given_heads
        self._layouts: Final = layouts
        self._modules = {id(module) for module in model.modules()}
        self._executed: dict[str, str] = {}
        self._changed = False
        self.called: dict[str, Called] = {}
        """The sizes that calls showed, by name of each module that called attention in the first step without being
        watched."""
        self.broken_softmax = ""
        """The place where rows of handwritten attention became NaN in the first backwards; the end of a sentence."""
        self.direct: set[str] = set()
        """Watched modules that called attention directly in the first step, not through a child module."""
        outside.scouts.add(self)
        self._registration: Final = register_module_module_registration_hook(self._registered)
        self._begin()

    def _begin(self) -> None:
        """Start reading the next backwards."""
        self._looks, self._tries = _LOOKS, _TRIES
        _looking.add(self)
        if torch.autograd.backward is _original:
            torch.autograd.backward = _backward

    def note_call(self, module: nn.Module, query: Tensor, key: Tensor) -> bool:
        """Receive a call of attention by a module; return whether the module belongs to the model, is not watched yet
        and can be watched from now on."""
        if query.is_nested or id(module) not in self._modules or (model := self._model()) is None:
            return False
        name = next((name for name, each in model.named_modules() if each is module), None)
        if name is None:
            return False
        if self._known.get(name) is module:
            self.direct.add(name)
            return False
        if next(module.parameters(), None) is None and any(lies_in(name, other) for other in self._known):
            return False  # an inner module that only calls the kernel
        heads, kv_heads = (x.shape[-3] if x.dim() > 3 else 1 for x in (query, key))
        rounds = numerics_for(query, "auto") == "kernel"
        self.called[name] = Called(heads, kv_heads, query.shape[-1], rounds)
        return True

    def why_unmet(self, name: str) -> str | None:
        """Return how the module of this name computes attention that is not intercepted; None if backwards do not show
        any."""
        return next(
            (why for other, why in self._executed.items() if lies_in(other, name) or lies_in(name, other)), None
        )

    @property
    def has_read(self) -> bool:
        """Whether a backward through the model was read."""
        return self._looks < _LOOKS

    def scouted(self) -> None:
        """Stop recording calls of attention, after the first step."""
        outside.scouts.discard(self)

    def take_findings(self) -> dict[str, str]:
        """Return the reasons why attention that was found since the last call is not watched, by name of its module.
        Costs nothing if nothing changed."""
        sdpa_rebinding.follow_imports()
        if not self._changed and not self._executed:
            return {}
        found = {
            name: f"it {why}"
            for name, why in self._executed.items()
            if not any(lies_in(name, other) or lies_in(other, name) for other in self._known)
        }
        self._executed.clear()
        if self._changed:
            self._changed = False
            found |= self._added()
        if found and (model := self._model()) is not None:
            self._known |= {name: model.get_submodule(name) for name in found}
        return found

    def stop(self) -> None:
        """Stop searching."""
        self.scouted()
        self._registration.remove()
        self._done()

    def _added(self) -> dict[str, str]:
        """Return why attention modules that were added since the last search are not watched, by name."""
        if (model := self._model()) is None:
            return {}
        now = dict(model.named_modules(remove_duplicate=False))
        before, self._modules = self._modules, {id(module) for module in now.values()}
        self._known = {name: module for name, module in self._known.items() if now.get(name) is module}
        for module, layout in self._layouts:
            layout.gone = id(module) not in self._modules
        self._begin()
        again = "it was added after attach; close the agent and attach again to watch it"
        return {
            each.name: again if each.problem is None else each.problem
            for each in find_attention(model, self._given_heads)
            if id(each.module) not in before and all(each.module is not watched for watched, _ in self._layouts)
        }

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._changed |= id(parent) in self._modules and child is not None and id(child) not in self._modules

    def inspect_graph(self, roots: Sequence[Tensor]) -> None:
        """Record the attention that a backward from `roots` is about to run without being intercepted."""
        model = self._model()
        executed = attention_in(roots, model) if model is not None else None
        self._tries -= 1
        if executed is not None:
            self._looks -= 1
            for name, found in executed.items():
                rows, here = broken_rows(found)
                self._executed[name] = f"{found.how}, and {rows}" if rows else found.how
                if here and not self.broken_softmax:
                    where = name or "the model"
                    self.broken_softmax = f"first in the forward, in the softmax of {where}, where {rows}"
        if not self._looks or not self._tries:
            self._done()

    def _done(self) -> None:
        _looking.discard(self)
        if not _looking and torch.autograd.backward is _backward:
            torch.autograd.backward = _original


def lies_in(name: str, outer: str) -> bool:
    """Whether the module `name` is the module `outer` or a part of it, by their names."""
    return not outer or name == outer or name.startswith(f"{outer}.")


_looking: Final[WeakSet[UnwatchedAttentionFinder]] = WeakSet()
_original: Final[Any] = torch.autograd.backward


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        roots = [each for each in (tensors if isinstance(tensors, Sequence) else [tensors]) if isinstance(each, Tensor)]
        for each in list(_looking):
            try:
                each.inspect_graph(roots)
            except Exception as error:  # training continues
                logger.debug("foreshock: a backward could not be read: %r", error)
                each.stop()
    return _original(tensors, *args, **kwargs)  # type: ignore[no-any-return]
