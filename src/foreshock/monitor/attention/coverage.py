"""A report of what is, not what was promised: what computes each layer, which layers count, which stopped counting.

`UnwatchedAttentionFinder` shows who calls attention in the first step, what a backward runs in fact, and modules that
are added after attach. A backward shows it in the first steps, and again after modules changed; neither costs a later
step anything.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet, ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words
from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.interception import sdpa_rebinding
from foreshock.monitor.attention.layout_check import LayoutCheck, table_of_norms
from foreshock.monitor.attention.watched_layer import NOT_RUN, WatchedLayer, numerics_for, outside
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import logger, say
from foreshock.monitor.model.discovery import Called, find_attention, listed
from foreshock.monitor.model.executed import attention_in, broken_rows

_LOOKS: Final = 2
"""Backwards through the model that are read; the first may be of a part of it."""
_TRIES: Final = 8
"""Backwards at most that are asked whether they run through the model."""


class UnwatchedAttentionFinder:
    """Finds the attention of `model` that nobody watches. known: names of the attention modules that attach found;
    given_heads: as attach was given them; layouts: of each watched module, the check to inform when it is gone.
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
        """Modules that called attention in the first step and are not watched, by name; what their calls showed."""
        self.broken_softmax = ""
        """Where the first backwards showed that rows of an attention by hand became NaN; the end of a sentence."""
        self.direct: set[str] = set()
        """Watched modules that called attention themselves in the first step, and not a module within them."""
        outside.scouts.add(self)
        self._registration: Final = register_module_module_registration_hook(self._registered)
        self._begin()

    def _begin(self) -> None:
        """Look at the next backwards."""
        self._looks, self._tries = _LOOKS, _TRIES
        _looking.add(self)
        if torch.autograd.backward is _original:
            torch.autograd.backward = _backward

    def note_call(self, module: nn.Module, query: Tensor, key: Tensor) -> bool:
        """A module calls attention; whether it is of the model and not watched, and can be watched from now on."""
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
        """How the module of this name computes attention that is not met, as a backward showed; None where none did."""
        return next(
            (why for other, why in self._executed.items() if lies_in(other, name) or lies_in(name, other)), None
        )

    @property
    def has_read(self) -> bool:
        """Whether a backward through the model was read."""
        return self._looks < _LOOKS

    def scouted(self) -> None:
        """The first step is done: attention that is called from now on is no longer noted by its module."""
        outside.scouts.discard(self)

    def take_findings(self) -> dict[str, str]:
        """Attention found since it was asked last that is not watched: by name of its module, and why. Free where
        nothing happened."""
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
        """Look no more."""
        self.scouted()
        self._registration.remove()
        self._done()

    def _added(self) -> dict[str, str]:
        """Attention modules that were not there before."""
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
            if id(each.module) not in before
        }

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._changed |= id(parent) in self._modules and child is not None and id(child) not in self._modules

    def inspect_graph(self, roots: Sequence[Tensor]) -> None:
        """Take note of what a backward from `roots` is about to run."""
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
    """Whether a module is another one or a part of it, by their names."""
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


_SILENT_SAMPLES: Final = 3
_STOPPED: Final = 4
"""A layer has stopped for good when it has been silent this many times as long as one is silent before it is named."""


def pause_steps(config: AgentConfig) -> int:
    """For how many steps no layer may count before that is a sign that another model trains."""
    return _SILENT_SAMPLES * config.sample_every_steps


class CoverageReport:
    """How the layers of one agent stand, sample by sample. `unwatched` counts attention modules that have no layer;
    `pause` is for how many steps none may count without a warning; `shows`: whether tables are printed."""

    def __init__(
        self,
        layers: Sequence[wire.Layer],
        selector: BackendSelector,
        unwatched: int = 0,
        pause: int | None = None,
        layouts: Sequence[LayoutCheck] = (),
        *,
        shows: bool = False,
    ) -> None:
        self._layouts: Final = layouts
        self._shows: Final = shows
        self._pause: Final = pause
        self._last_counted, self._silent_samples, self._warned_of_silence = 0, 0, False
        self._layers: Final = tuple(layers)
        self._selector: Final = selector
        self._unwatched = unwatched
        self._found: dict[str, str] = {}
        """Attention that was found after attach and has no layer, and why."""
        self._last: npt.NDArray[np.int64] = np.full(len(self._layers), -1)
        """The step of the last sample in which each layer counted; -1 before the first."""
        self._missed: npt.NDArray[np.int64] = np.zeros(len(self._layers), dtype=np.int64)
        """Samples since then in which a layer like it counted."""
        self._first: Final = np.cumsum([0, *(len(layer.heads) for layer in self._layers)])[:-1]
        """Row of each layer's first head; a layer has one at least."""
        self._silent: set[int] = set()
        """Layers that were named and did not count since."""
        self._returns = 0
        """Samples in which one of them came back."""
        self._looked = False
        self._outside_before: Final = outside.trained
        self._samples, self._wait, self._next_table = 0, 1, 0
        self._shown: list[str] = []
        self._empty_rows = ""
        """A line about rows that see no key in the first sample."""

    def add_unwatched(self, found: Mapping[str, str]) -> None:
        """Attention was found that has no layer: by name of its module, and why."""
        for why, alike in itertools.groupby(sorted(found, key=found.__getitem__), found.__getitem__):
            logger.warning("foreshock: the attention of %s is not watched: %s", ", ".join(alike), why)
        self._unwatched += len(found)
        self._found |= found

    @property
    def table_is_stale(self) -> bool:
        """Whether the layers stand otherwise than the last table shows."""
        return self._looked and self._shown != self._states()

    def record(self, words: Words, since_step: int, step: int) -> bool:
        """Record a sample's counts [N], and return whether the table is due: the first one, and one after a
        change, which waits for twice as many samples each time."""
        counted = self._hits(words)
        self._samples += 1
        self._silent_samples = 0 if counted.any() else self._silent_samples + 1
        if self._silent_samples:
            self._warn_of_silence(step)
        else:
            self._last_counted, self._warned_of_silence = step, False
        for number in np.flatnonzero(self._last < 0):
            layer = self._watched(number)
            layer.silent = not counted[number] and bool(layer.ran or counted.any())
        self._last[counted] = step
        if counted.all() and not self._silent and not self._missed.any() and self._looked and not self.table_is_stale:
            return False  # as nearly always: every layer counts, and the table shows it
        first, self._looked = not self._looked, True
        if first:
            self._note_empty_rows(words)
            self._warn(np.flatnonzero(~counted), step, since_step)
            if (calls := outside.trained - self._outside_before) > 0:
                logger.warning(
                    "foreshock: scaled_dot_product_attention was called %d times outside every watched module; those "
                    "calls are not watched",
                    calls,
                )
        else:
            self._warn_of_those_that_stopped(counted, since_step, step)
        return self._table_is_due(first)

    def _table_is_due(self, first: bool) -> bool:
        if not first:
            if not self.table_is_stale or self._samples < self._next_table:
                return False
            self._wait *= 2
        self._shown, self._next_table = self._states(), self._samples + self._wait
        return True

    def _states(self) -> list[str]:
        """How each layer stands, in a word; and what else was found."""
        stopped = self._missed >= _STOPPED * self._patience
        states = np.where(self._last < 0, "never", np.where(stopped, "stopped", "counts")).astype(object)
        states[[layer.name in self._found for layer in self._layers]] = "replaced"
        return [*states.tolist(), *self._found]

    @property
    def _patience(self) -> int:
        """Samples that a layer may miss before it is named: more each time one came back, as where layers are dropped
        at random."""
        return 1 << max(self._returns - 1, 0)

    def _hits(self, words: Words) -> npt.NDArray[np.bool_]:
        rows = words[:, Slot.ROWS] | words[:, Slot.EMPTY_ROWS] | words[:, Slot.NONFINITE_ROWS]
        return np.logical_or.reduceat(rows != 0, self._first)

    def _note_empty_rows(self, words: Words) -> None:
        """Rows without a visible key are harmless in most kernels, and the usual cause where NaN follows."""
        words = words[self._first]
        empty = words[:, Slot.EMPTY_ROWS]
        every = empty + words[:, Slot.ROWS] + words[:, Slot.NONFINITE_ROWS]
        if not empty.any():
            return
        worst = int(np.argmax(empty / np.maximum(every, 1)))
        names = [layer.name for layer, count in zip(self._layers, empty, strict=True) if count]
        self._empty_rows = (
            f"{empty[worst]} of {every[worst]} measured rows of a head see no key ({listed(names)}): the mask hides "
            "every key, as left padding under a causal mask does; if NaN appears, suspect these rows first"
        )

    def _warn_of_silence(self, step: int) -> None:
        """Warn that no layer counts any more, once, when that has lasted; never where few steps make a sample each."""
        long = self._pause is not None and step - self._last_counted >= self._pause
        if (self._last >= 0).any() and long and self._silent_samples >= _SILENT_SAMPLES and not self._warned_of_silence:
            self._warned_of_silence = True
            logger.warning(
                "foreshock: no attention was recorded since step %d. Either a different model is being trained, or no "
                "backward pass reaches the monitored one. Attach to the model that you train",
                self._last_counted,
            )

    def warn_if_unstepped(self, words: Words) -> None:
        """Warn, as the agent closes without a step, that the model trained: its training never called agent.step."""
        if self._hits(words).any():
            logger.warning(
                "foreshock: the model was trained, but agent.step(loss) was never called: nothing was judged, sent or "
                "warned about; call it after every optimizer.step()"
            )

    def _warn_of_those_that_stopped(self, counted: npt.NDArray[np.bool_], since_step: int, step: int) -> None:
        layers = [self._watched(number) for number in range(len(self._layers))]
        sampled = np.array([layer.sampled for layer in layers])
        for alike in (sampled, ~sampled):
            if not counted[alike].any() or (alike is sampled and not self._selector.measured_since(since_step)):
                continue  # none of them: nothing was measured in this sample, or there was no backward; or those that
                # counted did so while our kernels computed them, before they were switched back
            self._missed[alike & ~counted] += 1
            self._missed[counted] = 0
            long = np.flatnonzero(alike & (self._missed >= self._patience) & (self._last >= 0)).tolist()
            named = [number for number in long if number not in self._silent]
            since = since_step if self._patience == 1 else int(self._last[named].min(initial=since_step))
            self._warn(named, step, since)
        back = self._silent.intersection(np.flatnonzero(counted).tolist())
        self._silent -= back
        self._returns += bool(back)

    def _warn(self, numbers: Any, step: int, since_step: int) -> None:
        """Name the layers that counted nothing, those of one reason together."""
        groups: dict[str, list[str]] = {}
        for number in numbers:
            layer, watched = self._layers[number], self._watched(number)
            self._silent.add(int(number))
            counted = self._last[number] >= 0  # then what it met before shows nothing of now
            why = "; ".join(watched.unmeasured) or NOT_RUN if counted else watched.why_not_counted
            groups.setdefault(why, []).append(f"layer {layer.layer} ({layer.name})")
        steps = f"step {step}" if step - since_step <= 1 else f"steps {since_step + 1} to {step}"
        for why, names in groups.items():
            logger.warning("foreshock: %s counted nothing in %s: %s", ", ".join(names), steps, why)

    def _watched(self, number: int) -> WatchedLayer:
        return self._selector.layers[number]

    def show(self, step: int) -> None:
        """Print the table, where this process prints any."""
        if self._shows and (table := self.table(norms=True)):
            say(f"foreshock, from step {step} on:\n{table}")

    def table(self, *, norms: bool = False) -> str:
        """A line for each group of layers that stand alike, and how many are watched in all; norms: then those whose
        weights lie elsewhere than `attach` printed."""
        names = [layer.name for layer in self._layers]
        of_norms = table_of_norms(names, self._layouts) if norms and self._layouts else ""
        return "\n".join(filter(None, (self._of_layers(), of_norms)))

    def _of_layers(self) -> str:
        if not self._looked:
            return ""
        groups: dict[str, list[str]] = {}
        states = self._states()
        for number, layer in enumerate(self._layers):
            how = self._selector.how_computed(number)
            if states[number] == "replaced":
                continue
            if states[number] == "never":
                how = f"native attention, not measured: {self._watched(number).why_not_counted}"
            elif states[number] == "stopped":
                how = f"{how}; it counted nothing since step {self._last[number]}"
            groups.setdefault(how, []).append(layer.name)
        for name, why in self._found.items():
            groups.setdefault(f"not monitored: {why}", []).append(name or "the model")
        lines = [f"{len(names)} x {how} ({listed(names)})" for how, names in groups.items()]
        every = len(self._layers) - states.count("replaced") + self._unwatched
        if not every:
            return ""
        lines += self._selector.what_a_switch_meets()
        lines += [self._empty_rows] if self._empty_rows else []
        return "\n".join([*lines, f"watched {states.count('counts')} of {every} attention layers"])
