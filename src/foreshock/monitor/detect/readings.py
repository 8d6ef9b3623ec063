"""One merged sample as the detectors read it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats, Slot, Words, slot_values


@dataclass(slots=True, kw_only=True)  # a frozen one takes twice as long to make
class Readings:
    """Float64 arrays [N] over the heads, NaN where not recorded, and what was given of the step as a whole."""

    step: int
    since_step: int
    rows: Floats
    score_offset: Floats
    """mean of lse - log n, nats"""
    largest_score: Floats
    """largest |score|"""
    delta_bias_sum: Floats
    """over the rows that were not skipped: summed over samples each row then weighs the same"""
    nonfinite_rows: npt.NDArray[Any]
    """how many; of any type"""
    modes: npt.NDArray[np.int32]
    loss: float | None = None
    grad_norm: float | None = None
    suspect_step: int | None = None
    """the first step whose update may have broken the weights, where the single losses show it"""
    learning_rate: float | None = None
    rounds: bool = True
    """Whether attention is computed in a type that rounds: in float32 no head fails by rounding."""
    largest: tuple[float, float] | None = None
    """|offset| and |score| of any head, where no offset, score or delta bias is infinite or NaN; None if unknown"""
    words: Words | None = None
    """all that was counted, [N, SLOT_COUNT]: levels, wrong rows and places are read of it"""
    broken_step: int | None = None
    """the first step whose loss or gradient norm is not finite"""
    place: str = ""
    """where that step broke, by the outputs of its layers"""
    softmax: str = ""
    """the softmax of an attention by hand in which that step broke"""
    lost_steps: int = 0
    """steps whose gradient norm is not finite although their loss is"""
    weights_broken: bool = False
    """whether weights, or the optimizer's state, are known not to be finite"""
    parameters: str = ""
    """a sentence about gradients and weights that are not finite"""


def head_readings(words: Words) -> dict[str, Any]:
    """The fields of `Readings` that merged state words [N, SLOT_COUNT] hold; a head that counted no row reads NaN."""
    # Runs between two steps of a training: each slot is passed over once. A test compares with the catalogue.
    floats, rows = words.view(np.float64), slot_values(words, Slot.ROWS)
    offset, largest_score, bias = values = np.empty((3, len(words)))
    largest_score[:], bias[:] = floats[:, Slot.ROW_MAX_ABS], floats[:, Slot.DELTA_BIAS_SUM]
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(floats[:, Slot.SCORE_OFFSET_SUM], rows, out=offset)
        most = values.max(axis=1, initial=-math.inf).tolist()  # NaN if one is
        least = values.min(axis=1, initial=math.inf).tolist()
    finite = all(map(math.isfinite, (*most, *least)))
    if not finite:
        np.fmax(largest_score, floats[:, Slot.SCORE_MAX], out=largest_score)  # the first recordings hold it alone
        empty = rows <= 0
        offset[empty] = bias[empty] = largest_score[np.isneginf(largest_score)] = np.nan
    return {
        "rows": rows,
        "score_offset": offset,
        "largest_score": largest_score,
        "delta_bias_sum": bias,
        "nonfinite_rows": words[:, Slot.NONFINITE_ROWS],
        "largest": (max(most[0], -least[0]), most[1]) if finite else None,
        "words": words,
    }


def is_finite(values: Floats) -> bool:
    """Whether none is NaN or infinite, by their sum; a sum that overflows says no."""
    return math.isfinite(values.sum())
