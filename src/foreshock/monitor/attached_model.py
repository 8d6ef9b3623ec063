"""A watched model: installs the interception, chooses each layer's backend, and plans measurements.

With attention="keep", a layer whose heads are all plain keeps its native attention, of which rows are sampled. A layer
with a switched head runs on foreshock's kernels, which count every row. With attention="kernels", all layers do. When a
layer changes its backend, torch.compile recompiles only the graphs that contain it.
"""

import importlib.metadata
import itertools
import math
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
from pydantic import ValidationError
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.modes import parse_mode
from foreshock.contract.wire import first_error
from foreshock.kernels.flash_attention import new_state
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.monitor.attention.finder import UnwatchedAttentionFinder, lies_in
from foreshock.monitor.attention.interception import leave_no_copies, sdpa_rebinding, watch_module
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.attention.probe import OutputSums, Sampling, new_ticks, spread, start_sampling, stop_sampling
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.config import AgentConfig, versions
from foreshock.monitor.detect.levels import KERNEL
from foreshock.monitor.detect.non_finite import FIRST_UPDATE, place_by_outputs
from foreshock.monitor.detect.readings import Readings, head_readings
from foreshock.monitor.guard import default_torch_modes, logger
from foreshock.monitor.model.discovery import Found, find_attention, is_called_attention, table_of
from foreshock.monitor.model.layers import device_of
from foreshock.monitor.model.openness import openness, rounding
from foreshock.monitor.sampling import Counted, passes

GRADIENTS_EVERY: Final = 16
"""One measured step in this many also compares rows of gradients, which takes about 50 small operations per layer."""
_NUMERICS: Final = {"auto": "auto (kernel for 16-bit operands, float32 for fp32, float64 for float64)"}
_installing: Final = threading.RLock()
"""Needed because a dropped agent detaches in its own thread, perhaps while another agent is attached."""


class AttachedModel:
    """The layers of `model` that `attach` watches, in the order of their rows in `state` and `modes`.

    found: attention modules, watched or not. before: the AttachedModel that this one replaces; layers in both continue.
    unfit: reason why no attention of the model can be watched, or "".
    """

    def __init__(
        self,
        model: nn.Module,
        settings: AgentConfig,
        found: list[Found],
        *,
        before: "AttachedModel | None" = None,
        unfit: str = "",
    ) -> None:
        self.model: Final = weakref.ref(model)
        self.unfit: Final = unfit
        self._settings = settings
        self.found: Final = found
        """The attention modules, watched or not."""
        watched = [f for f in found if f.problem is None]
        self.unwatched: Final = len(found) - len(watched)
        """Number of attention modules that were found but cannot be watched."""
        device = device_of(*(f.module for f in watched[:1]), model) if not unfit else torch.device("cpu")
        self._own = "kernel" if device.type == "cuda" and settings.numerics in ("auto", "kernel") else "reference"
        """Which of foreshock's implementations computes attention on this device, in the terms of `Started`."""
        self._keeps = settings.attention != "kernels"
        self.layers: Final = self._described(watched)
        """Layers as announced, without properties that only calls show."""
        self.heads: Final = wire.head_refs(self.layers)
        """The (layer, head) of every row of `state` and `modes`, in global numbers."""
        self.faults: Counter[str] = Counter()
        """Counter of the probe's contained errors; the agent replaces it with its own."""
        self.last_measured = self._samples = 0
        """Last step that the probe measured, and number of measured steps."""
        self._waits_since: int | None = None
        self.sampling: Final = Sampling(settings.probe_rows, settings.stride, strict=settings.strict)
        """Settings and results of the current step's measurement."""
        self._key = start_sampling(self.sampling)
        with default_torch_modes(device):
            sizes = [f.heads for f in watched]
            self.state: Final[Tensor] = new_state(max(sum(sizes), 1), device)[: sum(sizes)]
            """int64 [N, SLOT_COUNT]"""
            self.modes: Final = torch.zeros(len(self.state), dtype=torch.int32, device=device)
            """int32 [N]"""
            self.largest: Final = spread(torch.full((len(self.state),), -math.inf, device=device))
            """Largest score of each head with native attention over all rows, in steps that scan all rows; float32
            [N]"""
            parts = (torch.split(each, sizes) for each in (self.state, self.modes, self.largest))
            ticks = new_ticks(len(watched), device)
            former = {} if before is None else {layer.name: layer for layer in before.watched}
            called = {} if before is None else {name or "model": call for name, call in before.finder.called.items()}
            layers = []
            for f, layer_state, layer_modes, largest, tick in zip(watched, *parts, ticks, strict=True):
                name, last = f.name or "model", former.get(f.name or "model")
                layer = WatchedLayer(
                    name,
                    layer_state,
                    layer_modes,
                    settings.numerics,
                    strict=settings.strict,
                    sampling=self._key,
                    sample_counter=tick,
                    largest=largest,
                    backend="native" if self._keeps else "kernels",
                    layout=last.layout if last else LayoutCheck(f.owner, f.heads, f.projection or f.unmeasured, name),
                )
                if last is not None:
                    layer.go_on(last)
                elif settings.numerics == "auto" and name in called:
                    layer.rounds = called[name].rounds
                layers.append(layer)
            self.watched: Final[tuple[WatchedLayer, ...]] = tuple(layers)
            self.layouts: Final = tuple(layer.layout for layer in layers if layer.layout is not None)
            """Location of W_Q and W_K of each layer, once its calls have shown it."""
            self._note(np.zeros(len(self.modes), dtype=np.int32))
            self._of_rows = [layer for layer in self.watched for _ in range(len(layer.state))]
            self.fresh: Final = before is not None and not former.keys() >= {layer.name for layer in layers}
            """Whether some layers have not run a step yet: only the first step showed that they are attention."""
        self._outputs = self.sampling.outputs = OutputSums([layer.state for layer in self.watched])
        self._warn_of_problems()
        self._open_to = openness(model, watched)
        modules = list(zip((f.module for f in watched), self.layouts, strict=True))
        self.finder: Final[UnwatchedAttentionFinder] = UnwatchedAttentionFinder(
            model, [f.name for f in found], settings.heads, modules
        )
        """Finds attention that is not watched."""
        self._installed = self._install(modules)

    def _install(self, watched: Sequence[tuple[nn.Module, LayoutCheck]]) -> ExitStack:
        with _installing, ExitStack() as undo:  # every callback runs, even if another fails
            for one in (self._stop, self.finder.stop, leave_no_copies):
                undo.callback(one)
            for (module, check), layer in zip(watched, self.watched, strict=True):
                undo.callback(watch_module(module, layer))
                undo.callback(check.stop)
                check.start()
            if "transformers.modeling_utils" in sys.modules:
                from foreshock.monitor.attention import transformers_attention

                undo.callback(transformers_attention.watch_dispatch())
            undo.callback(sdpa_rebinding.release)
            sdpa_rebinding.acquire()
            return undo.pop_all()

    def leave(self) -> None:
        """Remove everything from the model."""
        with _installing:
            self._installed.close()

    def _described(self, watched: Sequence[Found]) -> tuple[wire.Layer, ...]:
        """Return the layers as they are sent to the service."""
        layers: dict[int, wire.Layer] = {}
        for f, number in zip(watched, self._numbers_of(watched), strict=True):
            name, first_head = f.name or "model", self._settings.first_head + f.first_head
            allowed = re.sub(r"[^\w.:/-]", "_", name, flags=re.ASCII)  # a key of nn.ModuleDict may be any text
            if number in layers:
                raise ValueError(
                    f"{layers[number].name} and {name} both have the layer number {number}; give every attention "
                    "module a number of its own: first_layer={name: number}"
                )
            try:
                layers[number] = wire.Layer(
                    layer=number,
                    name=allowed[-128:],
                    heads=tuple(range(first_head, first_head + f.heads)),
                    kv_heads=f.kv_heads or f.heads,  # older services require at least one
                    kv_heads_known=f.kv_heads > 0,
                    head_dim=f.head_dim,
                    served_by="probe" if self._keeps else self._own,
                    sampled=self._keeps,
                )
            except ValidationError as error:
                raise ValueError(f"{name} cannot be watched: {first_error(error)}") from None
        return tuple(layers.values())

    def _numbers_of(self, watched: Sequence[Found]) -> list[int]:
        """Return the layers' numbers. Layers outside the modules that `first_layer` names follow the largest number."""
        first = self._settings.first_layer
        next_in = dict(first) if isinstance(first, dict) else {"": first}
        numbers: dict[str, int] = {}
        for f in watched:
            if inside := [part for part in next_in if not part or f"{f.name}.".startswith(f"{part}.")]:
                part = max(inside, key=len)
                numbers[f.name] = next_in[part]
                next_in[part] += 1
        others = itertools.count(max(numbers.values(), default=-1) + 1)
        return [numbers[f.name] if f.name in numbers else next(others) for f in watched]

    def _warn_of_problems(self) -> None:
        for names, why in problems_of(self.found) if self.watched else ():
            logger.warning("foreshock: the attention of %s is not watched: %s", names, why)

    def report(self) -> str:
        """Return the table of found modules. It may wait for the device, to locate weights."""
        if not self.found:
            return ""
        for layout in self.layouts:
            layout.locate()
        numerics, ran = self._settings.numerics, any(layer.ran for layer in self.watched)
        layouts = [layout.describe(ran=ran) for layout in self.layouts]
        now = "native attention, sampled" if self._keeps else self._own
        measured = f"every {self.sampling.every_steps} steps {self.sampling.rows} rows of every head are measured"
        how = f"the model's own attention runs unchanged; {measured}"
        if not self._keeps:
            how = f"foreshock's kernels compute the attention; in calls that they do not support {measured}"
        return f"{table_of(self.found, layouts, now)}\nnumerics: {_NUMERICS.get(numerics, numerics)}\n{how}"

    def danger(self) -> str:
        """Return a line that says whether drift by rounding is possible in this run."""
        return rounding(*self._open_to, rounds=any(layer.rounds for layer in self.watched))[0]

    def corrected(self) -> Self | None:
        """Detach, and return a new AttachedModel that matches the first step; None if this one already does."""
        model = self.model()
        if model is None or self.sampling.captured or sdpa_rebinding.follow_imports():
            return None  # calls of a library that was imported in the first step are intercepted from now on
        if (ran := self._as_it_ran(model)) is None:
            return None
        try:
            self._described([f for f in ran if f.problem is None])
        except ValueError as error:  # for example two layers with the same number
            if self._settings.strict:
                raise
            known = {f.name for f in self.found}
            ran = [f if f.name in known else replace(f, problem=str(error)) for f in ran]
        self.leave()
        unfit = "; ".join(f"{names} cannot be watched: {why}" for names, why in problems_of(ran))
        unfit = "" if any(f.problem is None for f in ran) else unfit
        now = type(self)(model, self._settings, ran, before=self, unfit=unfit)
        now.finder.scouted()
        now.finder.broken_softmax = self.finder.broken_softmax
        return now

    def _as_it_ran(self, model: nn.Module) -> list[Found] | None:
        """Return the modules that computed attention in the first step; None if they are the same as before."""
        found, finder = self.found, self.finder
        sure = [f.name for f in found if f.certain]
        called = {n: call for n, call in finder.called.items() if not any(lies_in(n, outer) for outer in sure)}
        ran: list[Found] = []
        watched = iter(self.watched)
        for f in found:
            layer = None if f.problem is not None else next(watched)
            within = any(lies_in(name, f.name) for name in called) and f.name not in finder.direct
            if within and not f.certain:
                continue  # submodules call attention themselves
            if layer is None or f.certain or not layer.idle:
                ran.append(f)
            elif why := finder.why_unmet(f.name):
                ran.append(replace(f, problem=f"it {why}; have it call scaled_dot_product_attention"))
            elif not finder.has_read:
                ran.append(f)  # unknown: no backward was inspected
            elif is_called_attention(f.module):
                ran.append(replace(f, problem=layer.why_not_counted))
        ran += find_attention(model, {}, called)
        if [f.problem for f in ran] == [f.problem for f in found] and len(ran) == len(found):
            return None
        places = {name: place for place, (name, _) in enumerate(model.named_modules())}
        return sorted(ran, key=lambda f: places[f.name])

    # ---- step by step -----------------------------------------------------------------------------------------------

    def step_done(self, step: int) -> None:
        """Record the end of optimizer step `step`. Called before its sample is taken."""
        self._outputs.end(step)

    def plan(self, step: int, next_step: int, watch_until: int) -> None:
        """Decide after optimizer step `step` whether to measure the next one, which will probably be `next_step`."""
        if self.sampling.fault and not self.faults["probe"]:
            self.faults["probe"] = 1
        if self.sampling.due:
            self.last_measured = step
            self._samples += 1
        # Measure the last step of each sample; if step numbers skip it unexpectedly, measure after as many steps.
        every = self.sampling.every_steps
        due = passes(step, next_step, every) or next_step - self.last_measured >= every or step < watch_until
        self.sampling.due = due and not self.sampling.fault
        self.sampling.gradients = self._samples % GRADIENTS_EVERY == 0
        self._name_what_a_captured_step_hides(step)

    def why_not_in_full(self, layer: WatchedLayer) -> str | None:
        """Return why the largest score over all rows of a layer's native attention cannot be computed, or None."""
        if self.sampling.fault:
            return f"the probe is off ({self.sampling.fault})"
        if self.sampling.captured:
            return (
                "its step was captured in a CUDA graph, so QK-Clip cannot scan all rows of native attention; use "
                "attention='kernels'"
            )
        if layer.has_score_mod:
            return "a function changes its scores, which the scan of all rows does not support"
        return self.sampling.refused.get(layer.state.data_ptr())

    def _name_what_a_captured_step_hides(self, step: int) -> None:
        if not self._keeps or all(layer.sampled or layer.kernels == "ran" for layer in self.watched):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = step
        elif self.sampling.captured and step == self._waits_since + 1:
            logger.warning(
                "foreshock: a switch waits: the step was captured in a CUDA graph, which replays the captured "
                "attention. Run one step without the graph, then capture it again; the switch takes effect then"
            )

    def follow(self, modes: npt.NDArray[np.int32]) -> None:
        """Choose each layer's backend according to `modes` [N], the requested modes of all heads."""
        self._note(modes)
        switched = set(itertools.compress(self._of_rows, modes))
        for layer in self.watched:
            layer.ask("kernels" if not self._keeps or layer in switched else "native")

    def _note(self, modes: npt.NDArray[np.int32]) -> None:
        """Record the values of `modes` [N] for each layer's kernels."""
        first = 0
        for layer in self.watched:
            last = first + len(layer.modes)
            note_modes(layer.modes, modes[first:last], written=self.modes)
            first = last

    def runs_on_kernels(self, row: int) -> bool:
        """Whether foreshock's kernels compute head `row` of all heads, according to the calls that ran."""
        return not self._keeps or self._of_rows[row].kernels == "ran"

    def refusal(self, row: int, mode: int) -> str | None:
        """Return why head `row` of all heads cannot have a mode, given its layer's calls, or None."""
        return self._refusal(self._of_rows[row], mode)

    def _refusal(self, layer: WatchedLayer, mode: int) -> str | None:
        never = self.sampling.refused.get(layer.state.data_ptr()) if mode and layer.backend == "native" else None
        return layer.refusal(mode) if never is None else f"its own attention stays: {never}"

    def what_a_switch_meets(self) -> list[str]:
        """Return lines about layers that cannot have the run's mitigation, and about dropout masks after a switch."""
        mode = parse_mode(self._settings.mitigation)
        whys = [self._refusal(layer, mode) for layer in self.watched]
        lines = [
            f"mitigation {self._settings.mitigation} will be refused in {count} of {len(whys)} layers: {why}"
            for why, count in Counter(whys).items()
            if why is not None
        ]
        if drops := sum(layer.backend == "native" and layer.dropout_p > 0 for layer in self.watched):
            lines.append(
                f"{drops} of {len(whys)} layers use dropout. Their masks stay the model's own until a switch. A "
                "switched layer draws other masks, with the same probability."
            )
        return lines

    def how_computed(self, index: int) -> str:
        """Describe the present backend of layer `index`."""
        layer = self.watched[index]
        if layer.backend == "native":
            return "native attention, sampled"
        return "kernels" + (f", but native and sampled in calls where {layer.reason}" if layer.reason else "")

    def _stop(self) -> None:
        """Stop measuring."""
        stop_sampling(self._key)
        for layer in self.watched:
            layer.sample_counter = None

    # ---- for the service and the detectors --------------------------------------------------------------------------

    def announced(self) -> tuple[wire.Layer, ...]:
        """Return `layers` with their present backends, and head dims from calls if they were unknown."""
        return tuple(
            layer.model_copy(
                update={
                    "head_dim": layer.head_dim or watched.head_dim,
                    "sampled": watched.sampled,
                    "served_by": "probe" if watched.sampled else self._own,
                }
            )
            for layer, watched in zip(self.layers, self.watched, strict=True)
        )

    def started(self, *, step: int, qk_clip: wire.ClipState | None) -> wire.Started:
        """Return the `Started` event of a run that starts after `step`."""
        config = self._settings
        return wire.Started(
            step=step,
            unix_seconds=time.time(),
            world_size=config.world_size,
            layers=self.announced(),
            policy=config.policy,
            numerics=config.numerics,
            mitigation=config.mitigation,
            switch_scope=config.switch_scope,
            qk_clip=qk_clip,
            labels=config.labels,
            versions=versions(),
        )

    def is_served_as(self, layers: Sequence[wire.Layer]) -> bool:
        """Whether `layers`, a result of `announced`, still has the present backend of each layer."""
        return [layer.sampled for layer in layers] == [watched.sampled for watched in self.watched]

    def with_library(self, verdict: wire.Verdict) -> wire.Verdict:
        """Add the function, library and version that compute the attention to a new verdict about wrong rows."""
        if verdict.signal != KERNEL or verdict.layer is None or verdict.state != "raised":
            return verdict
        both = zip(self.layers, self.watched, strict=True)
        by = next((watched.computed_by for layer, watched in both if layer.layer == verdict.layer), "")
        root = by.partition(".")[0]
        try:
            version = f" ({root} {importlib.metadata.version(root)})"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            version = ""
        said = f" It is computed by {by}{version}." if by else ""
        return verdict.model_copy(update={"sentence": (verdict.sentence + said)[:500]})

    def readings(self, counted: Counted) -> Readings:
        """Convert a sample to the detectors' readings."""
        if counted.broken_step is None and (counted.parameters is None or not counted.parameters.weights):
            self.finder.broken_softmax = ""  # such rows are harmless, for example because the model replaces NaN
        return Readings(
            step=counted.step,
            since_step=counted.since_step,
            **head_readings(counted.words),
            modes=counted.modes,
            loss=counted.loss,
            grad_norm=counted.grad_norm,
            suspect_step=counted.suspect_step,
            learning_rate=counted.learning_rate,
            rounds=any(layer.rounds for layer in self.watched),
            broken_step=counted.broken_step,
            place=self._place(counted),
            softmax=self.finder.broken_softmax,
            lost_steps=max(0, counted.nonfinite_grad_norms - counted.nonfinite_losses),
            parameters=counted.parameters.sentence if counted.parameters else "",
            weights_broken=counted.parameters is not None and counted.parameters.weights,
        )

    def _place(self, counted: Counted) -> str:
        """Return where the first nonfinite step broke, according to its layers' outputs; "" if unknown.

        It waits for the device.
        """
        looked = counted.parameters
        if counted.broken_step is None and looked is not None and looked.update:
            return FIRST_UPDATE
        if counted.broken_step is None or counted.broken_loss is None:
            return ""
        # unknown in a CUDA graph, because all replays count as one step
        seen = [] if self.sampling.captured else self._outputs.broken_at(counted.broken_step)
        outputs = [(self.layers[place].layer, broken) for place, broken in seen]
        # after later steps, all gradients are broken
        every_gradient = looked is not None and looked.every_gradient and counted.step == counted.broken_step
        return place_by_outputs(outputs, loss=counted.broken_loss, every_gradient=every_gradient)


def problems_of(found: list[Found]) -> list[tuple[str, str]]:
    """Group the modules that cannot be watched by problem: (names, problem of the first one)."""
    groups: dict[str, list[Found]] = {}
    for f in found:
        if f.problem is not None:
            groups.setdefault(f.problem.replace(f'"{f.name}"', '""'), []).append(f)
    return [(", ".join(f.name or "the model" for f in alike), str(alike[0].problem)) for alike in groups.values()]
