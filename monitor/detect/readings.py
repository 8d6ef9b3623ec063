"""One merged sample as the detectors read it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreshock.contract.catalog import read
from foreshock.contract.slots import Floats, ReadOnce, Slot, Words, slot_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Float64 arrays [N] over the heads, NaN where not recorded, and what was told of the step as a whole."""

    step: int
    since_step: int
    rows: Floats
    score_offset: Floats
    """mean of lse - log n, nats"""
    score_max: Floats
    row_max_abs: Floats
    tied_rows_bf16: Floats
    tied_rows_one: Floats
    delta_bias_sum: Floats
    """over the rows that a cadence did not skip: summed over samples each row then weighs the same"""
    nonfinite_rows: Floats
    query_norm: Floats | None = None
    modes: npt.NDArray[np.int32]
    loss: float | None = None
    grad_norm: float | None = None
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
        learning_rate: float | None = None,
        rounds: bool = True,
    ) -> "Readings":
        """Read merged state words [N, SLOT_COUNT]; a head that counted no row reads NaN.

        The norms of W_K and of W_Q W_K^T are taken for the caller's convenience; no detector reads them.
        """
        # This runs between two steps of a training: few operations, and none on slots that nobody reads.
        once = ReadOnce(words)
        rows = slot_values(once, Slot.ROWS)
        delta_bias_sum = slot_values(once, Slot.DELTA_BIAS_SUM)
        return cls(
            step=step,
            since_step=since_step,
            rows=rows,
            score_offset=read("head.score_offset", once),
            score_max=read("head.score_max", once),
            row_max_abs=read("head.row_max_abs", once),
            tied_rows_bf16=read("head.tied_rows_bf16", once),
            tied_rows_one=read("head.tied_rows_one", once),
            delta_bias_sum=delta_bias_sum if rows.all() else np.where(rows > 0, delta_bias_sum, np.nan),
            nonfinite_rows=read("head.nonfinite_rows", once),
            query_norm=query_norm,
            modes=modes,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            rounds=rounds,
        )
