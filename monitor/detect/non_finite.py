"""Numbers that are not finite: in which heads, since when, and from which checkpoint a run can still be resumed."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from foreshock.monitor.detect.readings import Readings

RUN: Final = -1
"""Index that stands for the whole run."""
NON_FINITE: Final = "nonfinite"
"""The signal of what is not finite."""


@dataclass(slots=True)
class NonFiniteTracker:
    """Since when samples hold values that are not finite; None while none does.

    The step suspected is the one whose update may have broken the weights.
    """

    overflow_step: int | None = None
    """of samples in a row whose gradients alone overflowed, the first"""
    overflow_suspect_step: int | None = None
    """the step suspected with it"""
    suspect_step: int | None = None
    """the step suspected with the first of the samples in a row that are broken"""

    def update(self, readings: Readings, overflow_steps: int) -> list[int]:
        """The heads, and the run, that are broken; after `overflow_steps` steps of overflow these too."""
        overflowed = self._only_overflowed(readings, overflow_steps)
        heads = np.isinf(readings.score_offset) | (readings.largest_score == np.inf)
        if not overflowed:
            heads |= readings.nonfinite_rows > 0
        of_run = (readings.loss, None if overflowed else readings.grad_norm)
        is_broken = any(value is not None and not math.isfinite(value) for value in of_run)
        broken = [*([RUN] if is_broken else []), *np.flatnonzero(heads).tolist()]
        if not broken:
            self.suspect_step = None
        elif self.suspect_step is None:
            since_overflow = self.overflow_suspect_step
            self.suspect_step = _suspected(readings) if since_overflow is None else since_overflow
        return broken

    def _only_overflowed(self, readings: Readings, overflow_steps: int) -> bool:
        """Whether gradients alone were not finite, and not for long: a GradScaler finds its scale by these steps, which
        it skips. After a step that was not skipped the loss would not be finite either."""
        loss, norm = readings.loss, readings.grad_norm
        in_gradients = bool((readings.nonfinite_rows > 0).any()) if norm is None else not math.isfinite(norm)
        if loss is None or not math.isfinite(loss) or not in_gradients:
            self.overflow_step = self.overflow_suspect_step = None
            return False
        if self.overflow_step is None:
            self.overflow_step, self.overflow_suspect_step = readings.step, _suspected(readings)
        return readings.step - self.overflow_step < overflow_steps


def _suspected(readings: Readings) -> int:
    """Where the single steps are not known: the last step of the sample before, which left the weights of this one."""
    return max(readings.since_step, 1) if readings.suspect_step is None else readings.suspect_step
