"""One merged sample as the detectors read it."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

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
    whole: bool = field(init=False)
    """Whether every head counted rows, and what every sample tells of scores is finite: then nothing is masked."""

    def __post_init__(self) -> None:
        told = (self.score_offset, self.largest_score, self.tied_rows)
        counted = not len(self.rows) or bool(self.rows[self.rows.argmin()] > 0)
        object.__setattr__(self, "whole", counted and all(map(is_finite, told)))

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
        with np.errstate(divide="ignore", invalid="ignore"):
            offset = floats[:, Slot.SCORE_OFFSET_SUM] / rows
            tied_rows = tied / (rows - slot_values(words, Slot.SKIPPED_ROWS))
        seen = cls(
            step=step,
            since_step=since_step,
            rows=rows,
            score_offset=offset,
            largest_score=np.fmax(floats[:, Slot.ROW_MAX_ABS], floats[:, Slot.SCORE_MAX]),
            tied_rows=tied_rows,
            delta_bias_sum=floats[:, Slot.DELTA_BIAS_SUM].copy(),
            nonfinite_rows=slot_values(words, Slot.NONFINITE_ROWS),
            query_norm=query_norm,
            modes=modes,
            loss=loss,
            grad_norm=grad_norm,
            suspect_step=suspect_step,
            learning_rate=learning_rate,
            rounds=rounds,
        )
        return seen if seen.whole else seen._masked()

    def _masked(self) -> "Readings":
        """NaN where nothing was counted."""
        return replace(
            self,
            score_offset=np.where(self.rows > 0, self.score_offset, np.nan),
            largest_score=np.where(self.largest_score > -np.inf, self.largest_score, np.nan),
            tied_rows=np.where(np.isfinite(self.tied_rows), self.tied_rows, np.nan),
            delta_bias_sum=np.where(self.rows > 0, self.delta_bias_sum, np.nan),
        )


def largest(values: Floats) -> float:
    """NaN where one is, 0 where there is none: for a few thousand values, `max` takes twice as long as finding it."""
    flat = values.ravel()
    return float(flat[flat.argmax()]) if len(flat) else 0.0


def is_finite(values: Floats) -> bool:
    """Whether none is NaN or infinite, at the price of one pass; values whose squares overflow may be called so."""
    flat = values.ravel()
    return math.isfinite(flat.dot(flat))
