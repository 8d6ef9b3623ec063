"""When a run that still trains is harmed and explodes, by what is known then: its own past, and no control.

`foreshock.lab.scoring.harm` judges afterwards, beside the control; a branch has to be made while the run goes on.
"""

from typing import Final, Literal

import numpy as np

from foreshock.contract.slots import Floats

Milestone = Literal["warning", "harm", "explosion"]

HARMED_LOSS: Final = 1.025
"""Of a block of steps, times the lowest of any earlier block."""
HARMED_GRAD_NORM: Final = 2.0
"""Times the median of the earlier blocks."""
EXPLODED_LOSS: Final = 1.1
EXPLODED_SCORE: Final = 1e4
BLOCKS_IN_A_ROW: Final = 3


class Milestones:
    """Told of every block of steps, in order, says what a run has passed.

    Harmed: three blocks in a row whose mean loss lies 2.5 % above the lowest earlier one or whose mean gradient norm is
    twice the median of the earlier ones. Exploded: a block whose loss lies 10 % above it or is no number, or a |score|
    of 10,000.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._beyond = 0
        self.passed: dict[Milestone, int] = {}
        """The step at which each was known."""

    def block(self, step: int, losses: Floats, grad_norms: Floats, largest_score: float, *, judge: bool) -> None:
        """A block of steps that ends at `step`; `judge` False only adds it to the past."""
        loss, grad_norm = float(np.mean(losses)), float(np.mean(grad_norms))
        if judge and self._losses:
            lowest = min(self._losses)
            high = not loss <= HARMED_LOSS * lowest  # what is no number is high
            steep = not grad_norm <= HARMED_GRAD_NORM * float(np.median(self._grad_norms))
            self._beyond = self._beyond + 1 if high or steep else 0
            if self._beyond == BLOCKS_IN_A_ROW:
                self.passed.setdefault("harm", step)
            if not loss <= EXPLODED_LOSS * lowest or largest_score >= EXPLODED_SCORE:
                self.passed.setdefault("explosion", step)
        if np.isfinite(loss) and np.isfinite(grad_norm):
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)
