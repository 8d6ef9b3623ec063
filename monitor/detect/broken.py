"""Numbers that are not finite: in which heads, since when, and from which checkpoint a run can still be resumed."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import Readings

RUN: Final = -1
"""Index that stands for the whole run."""
BROKEN: Final = "nonfinite"
"""The signal of what is not finite."""


class Broken:
    """What a run's samples hold that is not finite, in the order of their steps."""

    def __init__(self, overflow_steps: int) -> None:
        self._overflow_steps = overflow_steps
        self.since: Floats = np.full(3, np.nan)
        """of samples in a row whose gradients alone overflowed, the step of the first and the step suspected with it;
        of samples in a row that are broken, the step suspected with the first: its update may have broken weights"""

    def update(self, readings: Readings) -> Sequence[int]:
        """The heads, and the run, that are broken."""
        overflowed = self._only_overflowed(readings)
        heads = np.isinf(readings.score_offset) | (readings.largest_score == np.inf)
        if not overflowed:
            heads |= readings.nonfinite_rows > 0
        of_run = (readings.loss, None if overflowed else readings.grad_norm)
        is_broken = any(value is not None and not math.isfinite(value) for value in of_run)
        broken = [*([RUN] if is_broken else []), *np.flatnonzero(heads).tolist()]
        if not broken:
            self.since[2] = math.nan
        elif math.isnan(self.since[2]):
            self.since[2] = _suspected(readings) if math.isnan(self.since[1]) else self.since[1]
        return broken

    def _only_overflowed(self, readings: Readings) -> bool:
        """Whether gradients alone were not finite, and not for long: a GradScaler finds its scale by such steps, which
        it skips. After a step that was not skipped the loss would not be finite either."""
        loss, norm = readings.loss, readings.grad_norm
        in_gradients = bool((readings.nonfinite_rows > 0).any()) if norm is None else not math.isfinite(norm)
        if loss is None or not math.isfinite(loss) or not in_gradients:
            self.since[:2] = math.nan
            return False
        if math.isnan(self.since[0]):
            self.since[:2] = readings.step, _suspected(readings)
        return bool(readings.step - self.since[0] < self._overflow_steps)


def _suspected(readings: Readings) -> int:
    """Where the single steps are not known: the last step of the sample before, which left the weights of this one."""
    return max(readings.since_step, 1) if readings.suspect_step is None else readings.suspect_step
