"""Selects what computes each layer: its own attention, of which a sample is measured, or our kernels, and why."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
from torch import Tensor

from foreshock.contract.modes import parse_mode
from foreshock.monitor.attention.probe import OutputSums, Sampling, new_ticks, start_sampling, stop_sampling
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import logger
from foreshock.monitor.sampling.collector import passes

GRADIENTS_EVERY: Final = 16
"""One measured step in so many compares rows of gradients: some 50 small operations a layer."""


class BackendSelector:
    """Selects what computes each layer, its own attention or our kernels, and plans which steps are measured.

    Under "keep" a layer whose heads are all plain keeps its own, under "kernels" none does. A layer with a switched
    head is computed by our kernels, which count every row; its peers stay where they are. torch.compile compiles the
    graphs that hold a layer that moves once more.
    """

    def __init__(self, layers: Sequence[WatchedLayer], state: Tensor, settings: AgentConfig) -> None:
        self.layers: Final = tuple(layers)
        self._every_steps = settings.sample_every_steps
        self.sampling: Final = Sampling(settings.probe_rows, settings.sample_every_steps, strict=settings.strict)
        """What is measured of the running step, and what became of it."""
        self._measured = self._samples = 0
        self._kernels: Final = settings.attention == "kernels"
        self._mitigation: Final = settings.mitigation
        self._waits_since: int | None = None
        self._leave_out: Callable[[], Callable[[], None]] | None = None
        self._masks_back: Callable[[], None] | None = None
        self.faults: Counter[str] = Counter()
        """Where a contained fault of the probe is counted; the agent puts its own counter here."""
        self._outputs = self.sampling.outputs = OutputSums([layer.state for layer in self.layers])
        self._key = start_sampling(self.sampling)
        self.largest: Final = torch.full((len(state),), -math.inf, device=state.device)
        """Of each head in a step that is computed in full: the largest score of all rows of a native attention."""
        of_layers = torch.split(self.largest, [len(layer.state) for layer in self.layers])
        for layer, tick, largest in zip(self.layers, new_ticks(len(self.layers), state.device), of_layers, strict=True):
            # .data: a version of its own, as the layer's state; CUDA graphs must not count into a copy of it
            layer.sample_counter, layer.largest = tick.data, largest.data
            for buffer in (layer.sample_counter, layer.largest):
                torch._dynamo.mark_static_address(buffer, guard=False)
            layer.sampling, layer.backend = self._key, "kernels" if self._kernels else "native"

    def step_done(self, step: int) -> None:
        """Optimizer step `step` has ended. Called before its sample is read."""
        self._outputs.end(step)

    def plan(self, step: int, next_step: int, watch_until: int) -> None:
        """After optimizer step `step`: whether the next one is measured, which will probably be `next_step`."""
        if self.sampling.fault and not self.faults["probe"]:
            self.faults["probe"] = 1
        if self.sampling.due:
            self._measured = step
            self._samples += 1
        # The step that a sample ends with; where numbers jump over it unforeseen, the next one after as many steps.
        due = passes(step, next_step, self._every_steps) or next_step - self._measured >= self._every_steps
        due = due or step < watch_until
        self.sampling.due = due and not self.sampling.fault
        self.sampling.gradients = self._samples % GRADIENTS_EVERY == 0
        self._name_what_a_captured_step_hides(step)

    def measured_since(self, step: int) -> bool:
        """Whether the probe measured a step after `step`."""
        return self._measured > step

    def outputs_at(self, step: int) -> list[tuple[int, bool]]:
        """Layers whose native attention's output was seen in `step`, and whether it broke. It waits for the device.

        Empty if it is not known, as in a CUDA graph, whose replays all count for one step.
        """
        return [] if self.sampling.captured else self._outputs.broken_at(step)

    def why_not_in_full(self, layer: WatchedLayer) -> str | None:
        """Why the largest score of all rows of a layer's own attention cannot be had; None where it can."""
        if self.sampling.fault:
            return f"the probe is off ({self.sampling.fault})"
        if self.sampling.captured:
            return (
                "its step was captured in a CUDA graph, so QK-Clip cannot scan all rows of native attention; use "
                "attention='kernels'"
            )
        if layer.has_score_mod:
            return "a function or ALiBi slopes change its scores, which the pass over all rows of it does not know"
        return self.sampling.refused.get(layer.state.data_ptr())

    def _name_what_a_captured_step_hides(self, step: int) -> None:
        if self._kernels or all(layer.sampled or layer.ran_on_kernels for layer in self.layers):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = step
        elif self.sampling.captured and step == self._waits_since + 1:
            logger.warning(
                "foreshock: a switch waits: the step was captured in a CUDA graph, which keeps the attention that it "
                "was captured with. Capture it again, after a step that runs uncaptured; the switch takes effect then"
            )

    def follow(self, modes: npt.NDArray[np.int32]) -> None:
        """Let each layer be computed by what `modes` [N], those that are wanted of all heads, ask for."""
        first = 0
        for layer in self.layers:
            heads = layer.state.shape[0]
            layer.ask("kernels" if self._kernels or modes[first : first + heads].any() else "native")
            first += heads
        self._leave_masks_out()

    def masks_can_be_left_out(
        self, layers: Sequence[WatchedLayer], leave_out: Callable[[], Callable[[], None]]
    ) -> None:
        """While our kernels compute a layer, call `leave_out`: the compiled code of `layers` then passes no mask that
        says the same as is_causal. It returns the undoing."""
        if not layers:
            return
        self._leave_out = leave_out
        for layer in layers:
            layer.may_lose_masks = True
        self._leave_masks_out()

    def _leave_masks_out(self) -> None:
        serving = any(layer.backend == "kernels" for layer in self.layers)
        if serving and self._leave_out is not None and self._masks_back is None:
            self._masks_back = self._leave_out()
        elif not serving:
            self._put_masks_back()

    def _put_masks_back(self) -> None:
        back, self._masks_back = self._masks_back, None
        if back is not None:
            back()

    def runs_on_kernels(self, row: int) -> bool:
        """Whether our kernels compute head `row` of all, as far as what ran shows."""
        layer = self._layer_of(row)
        return self._kernels or layer is None or layer.ran_on_kernels

    def refusal(self, row: int, mode: int) -> str | None:
        """Why head `row` of all cannot be given a mode, as its layer's calls are; None where it can."""
        layer = self._layer_of(row)
        return None if layer is None else self._refusal(layer, mode)

    def _layer_of(self, row: int) -> WatchedLayer | None:
        ends = itertools.accumulate(layer.state.shape[0] for layer in self.layers)
        return next((layer for layer, end in zip(self.layers, ends, strict=True) if row < end), None)

    def _refusal(self, layer: WatchedLayer, mode: int) -> str | None:
        never = self.sampling.refused.get(layer.state.data_ptr()) if mode and layer.backend == "native" else None
        return layer.refusal(mode) if never is None else f"its own attention stays: {never}"

    def what_a_switch_meets(self) -> list[str]:
        """Lines: the run's own mitigation where a layer cannot have it, and dropout that a switch draws anew."""
        mode = parse_mode(self._mitigation)
        whys = [self._refusal(layer, mode) for layer in self.layers]
        lines = [
            f"mitigation {self._mitigation} will be refused in {count} of {len(whys)} layers: {why}"
            for why, count in Counter(whys).items()
            if why is not None
        ]
        if drops := sum(layer.backend == "native" and layer.dropout_p > 0 for layer in self.layers):
            lines.append(
                f"{drops} of {len(whys)} layers use dropout. Their masks stay the model's own until a switch. A "
                "switched layer draws other masks, with the same probability."
            )
        return lines

    def describe(self) -> str:
        """What computes the attention, in a line."""
        measured = f"every {self._every_steps} steps {self.sampling.rows} rows of every head are measured"
        if self._kernels:
            return f"foreshock's kernels compute the attention; in calls that they do not support {measured}"
        return f"the model's own attention runs unchanged; {measured}"

    def how_computed(self, index: int) -> str:
        """What computes layer `index` now, in words."""
        layer = self.layers[index]
        if layer.backend == "native":
            return "native attention, sampled"
        return "kernels" + (f", but native and sampled in calls where {layer.reason}" if layer.reason else "")

    def stop(self) -> None:
        """Measure nothing any more."""
        self._put_masks_back()
        stop_sampling(self._key)
        for layer in self.layers:
            layer.sample_counter = None
