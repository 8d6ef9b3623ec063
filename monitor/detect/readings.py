"""One merged sample as the detectors read it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Slot, Words

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Float64 arrays [N] over the heads, NaN where not recorded, and what was told of the step as a whole."""

    step: int
    since_step: int
    rows: Floats
    offset: Floats
    """mean of lse - log n, nats"""
    score_max: Floats
    row_max_abs: Floats
    tied_bf16: Floats
    tied_one: Floats
    delta_sum: Floats
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
        counts = words.T
        floats = words.view(np.float64).T
        rows = counts[Slot.ROWS].astype(np.float64)
        seen = rows
        if not rows.all():
            seen = np.where(rows > 0, rows, np.nan)
        missing = seen * 0.0 if seen is not rows else 0.0
        return cls(
            step=step,
            since_step=since_step,
            rows=rows,
            offset=floats[Slot.OFFSET_SUM] / seen,
            score_max=floats[Slot.SCORE_MAX] + missing,
            row_max_abs=floats[Slot.ROW_MAX_ABS] + missing,
            tied_bf16=counts[Slot.ROWS_TIED_BF16] / seen,
            tied_one=counts[Slot.ROWS_TIED_ONE] / seen,
            delta_sum=floats[Slot.DELTA_BIAS_SUM] + missing,
            nonfinite_rows=counts[Slot.ROWS_NONFINITE].astype(np.float64),
            query_norm=query_norm,
            modes=modes,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            rounds=rounds,
        )
