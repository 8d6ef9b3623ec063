"""One merged sample as the detectors read it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats, Slot, Words, slot_values


@dataclass(slots=True, kw_only=True)  # constructing a frozen one takes twice as long
class Readings:
    """Float64 arrays [N] over the heads, NaN if not recorded, and values of the step as a whole."""

    step: int
    since_step: int
    rows: Floats
    score_offset: Floats
    """mean of lse - log n, nats"""
    largest_score: Floats
    """largest |score|"""
    delta_bias_sum: Floats
    """sum over the rows that were not skipped, so that each row has the same weight in a sum over samples"""
    nonfinite_rows: npt.NDArray[Any]
    """number of nonfinite rows, in any dtype"""
    modes: npt.NDArray[np.int32]
    loss: float | None = None
    grad_norm: float | None = None
    suspect_step: int | None = None
    """the first step whose update may have broken the weights, if the losses of single steps show it"""
    learning_rate: float | None = None
    rounds: bool = True
    """whether attention is computed in a dtype that rounds; in float32, rounding does not make heads fail"""
    largest: tuple[float, float] | None = None
    """largest |offset| and |score| of all heads; None if unknown, or if any offset, score or delta bias is nonfinite"""
    words: Words | None = None
    """all counts, [N, SLOT_COUNT], from which levels, wrong rows and places are computed"""
    broken_step: int | None = None
    """the first step whose loss or gradient norm is nonfinite"""
    place: str = ""
    """where that step broke, according to the outputs of its layers"""
    softmax: str = ""
    """the softmax of handwritten attention in which that step broke"""
    lost_steps: int = 0
    """number of steps with a nonfinite gradient norm but a finite loss"""
    weights_broken: bool = False
    """whether weights, or the optimizer's state, are known to be nonfinite"""
    parameters: str = ""
    """a sentence about nonfinite gradients and weights"""


def head_readings(words: Words) -> dict[str, Any]:
    """Return the fields of `Readings` from merged state words [N, SLOT_COUNT]; NaN for heads without counted rows."""
    # Runs between two training steps, so it reads each slot only once. A test compares it with the catalogue.
    floats, rows = words.view(np.float64), slot_values(words, Slot.ROWS)
    offset, largest_score, bias = values = np.empty((3, len(words)))
    largest_score[:], bias[:] = floats[:, Slot.ROW_MAX_ABS], floats[:, Slot.DELTA_BIAS_SUM]
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(floats[:, Slot.SCORE_OFFSET_SUM], rows, out=offset)
        most = values.max(axis=1, initial=-math.inf).tolist()  # NaN if any value is NaN
        least = values.min(axis=1, initial=math.inf).tolist()
    finite = all(map(math.isfinite, (*most, *least)))
    if not finite:
        np.fmax(largest_score, floats[:, Slot.SCORE_MAX], out=largest_score)  # the oldest recordings lack the other
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
    """Whether all values are finite, judged by their sum; False also if the sum overflows."""
    return math.isfinite(values.sum())
