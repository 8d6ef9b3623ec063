"""One merged sample as the detectors read it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreshock.contract.metric import ratio
from foreshock.contract.slots import Floats, Slot, Words, slot_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Float64 arrays [N] over the heads, NaN where not recorded, and what was told of the step as a whole."""

    step: int
    since_step: int
    rows: Floats
    score_offset: Floats
    """mean of lse - log n, nats"""
    largest_score: Floats
    """largest |score|"""
    tied_rows: Floats
    """share of rows with several maxima, by the count that finds more of them"""
    delta_bias_sum: Floats
    """over the rows that a cadence did not skip: summed over samples each row then weighs the same"""
    nonfinite_rows: Floats
    query_norm: Floats | None = None
    modes: npt.NDArray[np.int32]
    loss: float | None = None
    grad_norm: float | None = None
    suspect_step: int | None = None
    """the first step whose update may have broken the weights, where the single losses show it"""
    learning_rate: float | None = None
    rounds: bool = True
    """Whether attention is computed in a type that rounds: in float32 no head fails by rounding."""

    @classmethod
    def from_words(
        cls,
        *,
        step: int,
        since_step: int,
        words: Words,
        modes: npt.NDArray[np.int32],
        query_norm: Floats | None = None,
        key_norm: Floats | None = None,
        query_key_norm: Floats | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        suspect_step: int | None = None,
        learning_rate: float | None = None,
        rounds: bool = True,
    ) -> "Readings":
        """Read merged state words [N, SLOT_COUNT]; a head that counted no row reads NaN.

        The norms of W_K and of W_Q W_K^T are taken for the caller's convenience; no detector reads them.
        """
        # This runs between two steps of a training. Half of its price is gathering slots from rows, so each is passed
        # over once: what joins two slots joins them while it gathers. A test compares it with the catalogue.
        floats = words.view(np.float64)
        rows = slot_values(words, Slot.ROWS)
        tied = np.maximum(words[:, Slot.TIED_ROWS_BF16], words[:, Slot.TIED_ROWS_ONE])
        score = np.fmax(floats[:, Slot.ROW_MAX_ABS], floats[:, Slot.SCORE_MAX])
        if not score.min(initial=np.inf) > -np.inf:
            score = np.where(score > -np.inf, score, np.nan)
        delta_bias_sum = slot_values(words, Slot.DELTA_BIAS_SUM)
        if not rows.min(initial=np.inf) > 0:
            delta_bias_sum = np.where(rows > 0, delta_bias_sum, np.nan)
        return cls(
            step=step,
            since_step=since_step,
            rows=rows,
            score_offset=ratio(floats[:, Slot.SCORE_OFFSET_SUM], rows),
            largest_score=score,
            tied_rows=ratio(tied, rows - slot_values(words, Slot.SKIPPED_ROWS)),
            delta_bias_sum=delta_bias_sum,
            nonfinite_rows=slot_values(words, Slot.NONFINITE_ROWS),
            query_norm=query_norm,
            modes=modes,
            loss=loss,
            grad_norm=grad_norm,
            suspect_step=suspect_step,
            learning_rate=learning_rate,
            rounds=rounds,
        )
