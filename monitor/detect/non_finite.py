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

    The step suspected is the one whose update may have broken the weights. Where the single steps are not known, it is
    the last one of the sample before, which left the weights of this one.
    """

    overflow_step: int | None = None
    """of samples in a row whose gradients alone overflowed, the first"""
    overflow_suspect_step: int | None = None
    """the step suspected with it"""
    suspect_step: int | None = None
    """the step suspected with the first of the samples in a row that are broken"""

    def update(self, readings: Readings, overflow_steps: int) -> list[int]:
        """The heads, and the run, that are broken; after `overflow_steps` steps of overflow these too."""
        suspected = max(readings.since_step, 1) if readings.suspect_step is None else readings.suspect_step
        loss, norm, in_rows = readings.loss, readings.grad_norm, readings.nonfinite_rows > 0
        heads, of_run = np.isinf(readings.score_offset) | (readings.largest_score == np.inf), [loss]
        # A GradScaler finds its scale by steps whose gradients overflow, and skips them. After a step that was not
        # skipped the loss would not be finite either.
        overflowed = loss is not None and math.isfinite(loss)
        overflowed = overflowed and (bool(in_rows.any()) if norm is None else not math.isfinite(norm))
        if not overflowed:
            self.overflow_step = self.overflow_suspect_step = None
        elif self.overflow_step is None:
            self.overflow_step, self.overflow_suspect_step = readings.step, suspected
        if self.overflow_step is None or readings.step - self.overflow_step >= overflow_steps:
            heads |= in_rows
            of_run.append(norm)
        is_broken = any(value is not None and not math.isfinite(value) for value in of_run)
        broken = [*([RUN] if is_broken else []), *np.flatnonzero(heads).tolist()]
        if not broken:
            self.suspect_step = None
        elif self.suspect_step is None:
            self.suspect_step = suspected if self.overflow_suspect_step is None else self.overflow_suspect_step
        return broken
