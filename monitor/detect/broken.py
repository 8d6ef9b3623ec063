"""Numbers that are not finite: in which heads, since when, and from which checkpoint a run can still be resumed."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import Readings, largest

RUN: Final = -1
"""Index that stands for the whole run."""
SIGNAL: Final = "nonfinite"
SUSPECT: Final = "suspect_step"
"""In the evidence: the first step whose update may have broken the weights."""


class Broken:
    """What a run's samples hold that is not finite, in the order of their steps."""

    def __init__(self, overflow_steps: int) -> None:
        self._overflow_steps = overflow_steps
        self._since: Floats = np.full(3, np.nan)
        """of samples in a row whose gradients alone overflowed, the step of the first and the step suspected with it;
        of samples in a row that are broken, the step suspected with the first"""

    def update(self, readings: Readings, whole: bool, most: int) -> dict[int, str]:
        """The heads, `most` of them, and the run that are told as broken, with the name of the signal.

        whole: every signal was recorded, and is finite, in every head.
        """
        overflowed = self._only_overflowed(readings)
        tripped: dict[int, str] = {}
        if not whole or (not overflowed and not largest(readings.nonfinite_rows) <= 0):
            broken = np.zeros(len(readings.rows), dtype=bool) if overflowed else readings.nonfinite_rows > 0
            if not whole:  # the largest of no rows is -inf
                broken |= np.isinf(readings.score_offset) | (readings.largest_score == np.inf)
            tripped = {int(index): SIGNAL for index in np.flatnonzero(broken)[:most]}
        for value in (readings.loss, None if overflowed else readings.grad_norm):
            if value is not None and not math.isfinite(value):
                tripped[RUN] = SIGNAL
        if not tripped:
            self._since[2] = math.nan
        elif math.isnan(self._since[2]):
            self._since[2] = _suspected(readings) if math.isnan(self._since[1]) else self._since[1]
        return tripped

    def evidence(self, standing: wire.Verdict | None) -> dict[str, float]:
        """Which step is suspected; by what was told before, where this sample is whole."""
        if not math.isnan(self._since[2]):
            return {SUSPECT: float(self._since[2])}
        before = {} if standing is None else standing.evidence
        return {SUSPECT: before[SUSPECT]} if SUSPECT in before else {}

    def _only_overflowed(self, readings: Readings) -> bool:
        """Whether gradients alone were not finite, and not for long: a GradScaler finds its scale by such steps, which
        it skips. After a step that was not skipped the loss would not be finite either."""
        loss, norm = readings.loss, readings.grad_norm
        in_gradients = loss is not None and math.isfinite(loss)
        if in_gradients:
            in_gradients = not math.isfinite(norm) if norm is not None else bool((readings.nonfinite_rows > 0).any())
        if not in_gradients:
            self._since[:2] = math.nan
            return False
        if math.isnan(self._since[0]):
            self._since[:2] = readings.step, _suspected(readings)
        return bool(readings.step - self._since[0] < self._overflow_steps)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return wire.Array.of(self._since).model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to the saved state of the detectors; an older version told the step of an overflow alone."""
        if "broken" in state:
            self._since[:] = wire.Array.model_validate(state["broken"]).numpy()
        elif "_overflow" in state:
            self._since[:2] = wire.Array.model_validate(state["_overflow"]).numpy()[0]


def _suspected(readings: Readings) -> int:
    """Where the single steps are not known: the last step of the sample before, which left the weights of this one."""
    return max(readings.since_step, 1) if readings.suspect_step is None else readings.suspect_step
