"""What one arm showed, kept small: offset and largest score per head and the loss, every 25 steps or so."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreshock.contract import catalog, wire
from foreshock.contract.slots import Floats, Slot, Words, merge_words, slot_values

_POINT_STEPS = 25
"""Samples are merged up to this length: round a warning the agent samples every step, which is mostly noise."""
_LAST_STEPS = 500
"""Steps whose mean loss is called final: a single step's loss is mostly the luck of its batch."""


@dataclass(slots=True)
class Record:
    """Fill it with an agent's events, in order."""

    heads: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    offsets: list[Floats] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warnings: list[wire.Verdict] = field(default_factory=list)
    """verdicts raised"""
    switches: list[wire.Switched] = field(default_factory=list)
    _waiting: list[tuple[int, Words, float]] = field(default_factory=list)
    """length, states and loss of the samples that are not a point yet"""

    def add(self, event: wire.Event) -> None:
        """Take what matters of one event."""
        if isinstance(event, wire.Started):
            self.heads = wire.head_refs(event.layers)
        elif isinstance(event, wire.Verdict) and event.state == "raised":
            self.warnings.append(event)
        elif isinstance(event, wire.Switched) and event.outcome == "applied":
            self.switches.append(event)
        elif isinstance(event, wire.Sample) and (words := event.words()) is not None:
            self._waiting.append((event.step - event.since_step, words, np.nan if event.loss is None else event.loss))
            if sum(steps for steps, _, _ in self._waiting) >= _POINT_STEPS:
                self._point(event.step)
        elif isinstance(event, wire.Finished) and self._waiting:
            self._point(event.step)

    def _point(self, step: int) -> None:
        lengths, words, losses = zip(*self._waiting, strict=True)
        merged = merge_words(words)
        self.steps.append(step)
        self.offsets.append(catalog.read("head.score_offset", merged))
        self.scores.append(slot_values(merged, Slot.ROW_MAX_ABS))
        self.losses.append(float(np.average(losses, weights=np.maximum(lengths, 1))))
        self._waiting.clear()

    @property
    def final_loss(self) -> float:
        """Mean loss of the last 500 steps; NaN without any."""
        pairs = zip(self.steps, self.losses, strict=True)
        last = [loss for step, loss in pairs if step > self.steps[-1] - _LAST_STEPS]
        return float(np.mean(last)) if last else float("nan")

    @property
    def largest_score(self) -> float:
        """The largest |row maximum| of any head and sample."""
        return float(np.max(self.scores)) if self.scores else float("nan")

    def summary(self) -> dict[str, Any]:
        """For a report; offsets are in the order of `heads`."""
        return {
            "steps": self.steps[-1] if self.steps else 0,
            "final_loss": self.final_loss,
            "largest_score": self.largest_score,
            "warnings": len(self.warnings),
            "heads": [list(head) for head in self.heads],
            "offset_by_step": {
                str(step): [round(float(value), 4) for value in values]
                for step, values in zip(self.steps, self.offsets, strict=True)
            },
        }
