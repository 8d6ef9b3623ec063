"""What one run showed, kept small: the largest score of each head and the loss, every 25 steps or so."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, merge_words, slot_values

_POINT_STEPS = 25
"""Samples are merged up to this length: round a warning the agent samples every step, which is mostly noise."""
_LAST_STEPS = 500
"""Steps whose mean loss is called final: a single step's loss is mostly the luck of its batch."""


@dataclass(slots=True)
class Record:
    """Fill it with an agent's events, in order."""

    steps: list[int] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warnings: list[wire.Verdict] = field(default_factory=list)
    """verdicts raised"""
    switches: list[wire.Switched] = field(default_factory=list)
    _waiting: list[tuple[int, Words, float]] = field(default_factory=list)
    """length, states and loss of the samples that are not a point yet"""

    def add(self, event: wire.Event) -> None:
        """Take what matters of one event."""
        if isinstance(event, wire.Verdict) and event.state == "raised":
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
        self.steps.append(step)
        self.scores.append(slot_values(merge_words(words), Slot.ROW_MAX_ABS))
        self.losses.append(float(np.average(losses, weights=np.maximum(lengths, 1))))
        self._waiting.clear()

    def summary(self) -> dict[str, Any]:
        """For a report: `final_loss` is the mean of the last 500 steps, `largest_score` that of any head and sample."""
        last = [loss for step, loss in zip(self.steps, self.losses, strict=True) if step > self.steps[-1] - _LAST_STEPS]
        return {
            "steps": self.steps[-1] if self.steps else 0,
            "final_loss": float(np.mean(last)) if last else float("nan"),
            "largest_score": float(np.max(self.scores)) if self.scores else float("nan"),
            "warnings": len(self.warnings),
        }
