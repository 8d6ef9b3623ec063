"""Who serves each layer: its own attention, of which a sample is measured, or our kernels, from when on and why."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.catalog import read
from foreshock.contract.metric import ratio
from foreshock.contract.modes import parse_mode
from foreshock.contract.slots import Floats, Slot, Words, looked_at, slot_values
from foreshock.monitor.attention.probe import Sampling, new_ticks, start_sampling, stop_sampling
from foreshock.monitor.attention.proof import Proof
from foreshock.monitor.attention.watched_layer import WatchedLayer, logger
from foreshock.monitor.config import AgentConfig

_PROOF_STEPS: Final = 3
"""Optimizer steps that are measured one after the other until every layer is proven or is not."""


def sampling_errors(words: Words) -> dict[str, Floats]:
    """Standard errors of what a sample of rows says of each head, [N], NaN where it measured none.

    offset_error of the mean of lse - log n, in nats; tied_bf16_error of the share of rows with several maxima. Rows are
    drawn one by one, so s / sqrt(n) holds; they speak of the steps that were measured.
    """
    rows = slot_values(words, Slot.ROWS)
    share = read("head.tied_rows_bf16", words)
    variance = np.maximum(read("head.score_offset_rms", words) ** 2 - read("head.score_offset", words) ** 2, 0.0)
    return {
        "offset_error": np.sqrt(ratio(variance, rows)),
        "tied_bf16_error": np.sqrt(ratio(share * (1 - share), looked_at(words))),
    }


class Keeper:
    """Says which step is measured, and which layers keep their own attention.

    Under "keep", and under "auto" where nothing is to be gained (a CPU), those do whose heads are all plain. Under
    "auto" with `prove` a layer goes to our kernels at the step boundary after they were proven to compute what it
    computes; under "kernels" it is there from the start. A layer with a switched head is served by our kernels, which
    count every row; its peers stay where they are. Under torch.compile the graphs that hold a layer that moves are
    compiled once more.
    """

    def __init__(
        self, layers: Sequence[WatchedLayer], state: Tensor, settings: AgentConfig, *, prove: bool = False
    ) -> None:
        self.layers: Final = tuple(layers)
        self._every_steps = settings.probe_every_steps
        self._sampling = Sampling(settings.probe_rows, settings.probe_heads, strict=settings.strict)
        self._measured = 0
        self._steps_to_prove = _PROOF_STEPS if prove else 0
        self._modes: npt.NDArray[np.int32] = np.zeros(state.shape[0], dtype=np.int32)
        self._attention: Final = settings.attention
        self._mitigation: Final = settings.mitigation
        self.faults: Counter[str] = Counter()
        """Where a contained fault of the probe is counted; the agent puts its own counter here."""
        self.errors = ""
        """The sampling error of the last sample that measured some rows, as a line for people."""
        self._key = start_sampling(self._sampling)
        self.proofs: Final[list[Proof]] = []
        """Of each layer; empty where nothing is to be proven."""
        for layer, tick in zip(self.layers, new_ticks(len(self.layers), state.device), strict=True):
            # .data: a version of its own, as the layer's state; CUDA graphs must not count into a copy of it
            torch._dynamo.mark_static_address(tick := tick.data, guard=False)
            layer.tick, layer.sampling, layer.keeps = tick, self._key, settings.attention != "kernels"
            layer.draws = settings.attention != "auto"
            if prove:
                self.proofs.append(proof := Proof())
                self._sampling.proofs[len(self.proofs) - 1] = proof

    def plan(self, step: int, watch_until: int) -> None:
        """After optimizer step `step`: who serves the next one, and whether it is measured."""
        if self._sampling.fault and not self.faults["probe"]:
            self.faults["probe"] = 1
        if self._sampling.due:
            self._measured = step
        self._sampling.due = step + 1 - self._measured >= self._every_steps or step < watch_until
        if self._steps_to_prove:
            self._steps_to_prove -= 1
            if all(proof.done for proof in self.proofs):
                self._steps_to_prove = 0
                self._sampling.proofs.clear()
            self._sampling.due |= self._steps_to_prove > 0
            self.follow(self._modes)

    @property
    def proving(self) -> bool:
        """Whether layers may still go to our kernels by themselves soon."""
        return self._steps_to_prove > 0

    def follow(self, modes: npt.NDArray[np.int32]) -> None:
        """Let each layer be served as `modes` [N], the modes of all heads, ask for."""
        self._modes = modes
        before = [layer.keeps for layer in self.layers]
        first = 0
        for index, layer in enumerate(self.layers):
            heads = layer.state.shape[0]
            proof = self.proofs[index] if self.proofs else None
            served = self._attention == "kernels" or (proof is not None and proof.holds)
            switched = bool(modes[first : first + heads].any()) and (proof is None or proof.reason is None)
            layer.keeps = not (served or switched)
            first += heads
        if self._sampling.captured and before != [layer.keeps for layer in self.layers]:
            logger.warning(
                "foreshock: a step that was captured in a CUDA graph keeps the attention it was captured with; capture "
                "it again to let this switch take effect (torch.compile does so by itself)"
            )

    def refusal(self, row: int, mode: int) -> str | None:
        """Why the layer that holds head `row` of all cannot be given `mode`, as its calls are; None where it can."""
        index = self._layer_of(row)
        return None if index is None else self.layers[index].refusal(mode)

    def idle(self, row: int) -> str | None:
        """Why no mode would change what the layer that holds head `row` computes; None where one would."""
        index = self._layer_of(row)
        return None if index is None else self._idle(index)

    def _layer_of(self, row: int) -> int | None:
        ends = itertools.accumulate(layer.state.shape[0] for layer in self.layers)
        return next((index for index, end in enumerate(ends) if row < end), None)

    def _idle(self, index: int) -> str | None:
        proof = self.proofs[index] if self.proofs else None
        if proof is not None and proof.reason is not None:
            return f"its own attention stays: {proof.reason}; a switch would change nothing"
        return self.layers[index].idle

    def refused_mitigation(self) -> list[str]:
        """What a switch would meet, in lines: the run's own mitigation, where a layer cannot have it."""
        mode = parse_mode(self._mitigation)
        whys = [layer.refusal(mode) or self._idle(index) for index, layer in enumerate(self.layers)]
        return [
            f"mitigation {self._mitigation} will be refused in {count} of {len(whys)} layers: {why}"
            for why, count in Counter(whys).items()
            if why is not None
        ]

    def with_errors(
        self, verdicts: list[wire.Verdict], words: Words, heads: Sequence[tuple[int, int]]
    ) -> list[wire.Verdict]:
        """`verdicts` with the sampling errors of their heads in the evidence; `words` [N] are those of `heads`."""
        errors = sampling_errors(words)
        offset, tied = errors["offset_error"], errors["tied_bf16_error"]
        if not np.isnan(offset).all():
            self.errors = (
                f"\nsampling error of the last sample, at most: offset {np.nanmax(offset):.2g} nats, "
                f"share of tied rows {np.nanmax(tied):.2g}"
            )
        rows = {head: row for row, head in enumerate(heads)}
        told = []
        for verdict in verdicts:
            row = rows.get((verdict.layer, verdict.head)) if verdict.layer is not None else None  # type: ignore[arg-type]
            known = {} if row is None else {k: float(v[row]) for k, v in errors.items() if not np.isnan(v[row])}
            told.append(verdict.model_copy(update={"evidence": {**verdict.evidence, **known}}) if known else verdict)
        return told

    def describe(self) -> str:
        """Who serves the attention, in a line."""
        heads = f"{self._sampling.heads} heads in turn" if self._sampling.heads else "every head"
        measured = f"every {self._every_steps} steps {self._sampling.rows} rows of {heads} of each layer are measured"
        if self._attention == "kernels":
            return f"foreshock's kernels serve the attention; of calls that they do not serve {measured}"
        if self.proofs:
            return (
                "the first steps compare foreshock's kernels with each layer's own attention; where they agree they "
                f"serve it from then on, elsewhere {measured}"
            )
        return f"attention is kept as it is; {measured}"

    def standing(self, index: int) -> str:
        """What serves layer `index` now, in words."""
        layer = self.layers[index]
        if not layer.keeps:
            return "kernels" + (f", but kept and sampled in calls where {next(iter(layer.kept))}" if layer.kept else "")
        proof = self.proofs[index] if self.proofs else None
        if proof is None:
            return "kept, sampled"
        reason = proof.reason or next(iter(layer.kept), "no call could be compared with our kernels yet")
        return f"kept, sampled: {reason}"

    def stop(self) -> None:
        """Measure nothing any more."""
        stop_sampling(self._key)
        for layer in self.layers:
            layer.tick = None
