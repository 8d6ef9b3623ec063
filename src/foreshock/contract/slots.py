"""The position, type and merge rule of each statistic in a head's state.

A head's state is one row of 8-byte words. Counts are int64; sums and maxima are float64 in the same array (the same
memory viewed as float64), so that one copy transfers every statistic of every head. All statistics are mergeable
(docs/design.md, decision 2): counts and sums add, maxima take the larger one; ratios and means are computed only for
display.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
"""Head states, [..., SLOT_COUNT] int64; float slots contain the bits of a float64. `fitted` converts other versions."""

Floats = npt.NDArray[np.float64]


class Slot(IntEnum):
    """Position of a statistic in a head's state. Positions are part of the wire format: append, never reorder.

    SUM_SLOTS and MAX_SLOTS list the float64 sums and maxima, which may be at any position; all others are counts.
    """

    ROWS = 0
    """Query rows with at least one visible key and only finite scores."""
    TIED_ROWS_BF16 = 1
    """Rows whose scores, rounded to bf16, have more than one maximum (paper, section 3.3.2)."""
    TIED_ROWS_ONE = 2
    """Rows with more than one P = exp(S - max) that rounds to 1 in the operand's dtype."""
    SHIFTED_ROWS = 3
    """Rows that paper_softmax shifted."""
    EMPTY_ROWS = 4
    """Rows without a visible key; not counted in any other slot."""
    NONFINITE_ROWS = 5
    """Rows with a NaN or infinite score, output or delta; otherwise counted only in NONFINITE_INPUT/OUTPUT_ROWS."""
    SCORE_MAX = 6
    """Largest scaled score."""
    ROW_MAX_ABS = 7
    """Largest absolute value of a row's maximum score."""
    SCORE_OFFSET_SUM = 8
    """Sum of lse - log n, n being the visible keys of the row."""
    SCORE_OFFSET_SUMSQ = 9
    """Sum of squares of lse - log n."""
    DELTA_BIAS_SUM = 10
    """Sum of delta_lp - delta_hp (paper, section 3.3.1)."""
    DELTA_BIAS_ABS = 11
    """Sum of |delta_lp - delta_hp|."""
    DELTA_BIAS_SUMSQ = 12
    """Sum of squares of delta_lp - delta_hp."""
    SKIPPED_ROWS = 13
    """Rows counted in ROWS for which an earlier version did not measure ties, shift and delta bias."""
    ENTROPY_ROWS = 14
    """Rows counted in ROWS whose entropy was measured, which are the sampled rows."""
    ENTROPY_SUM = 15
    """Sum of the entropies of rows, lse - sum P S (nats)."""
    NONFINITE_INPUT_ROWS = 16
    """Part of NONFINITE_ROWS: attention was given a query, key or value that is not finite."""
    NONFINITE_OUTPUT_ROWS = 17
    """Part of NONFINITE_ROWS: the inputs are finite and the model's attention output is not."""
    CHECKED_ROWS = 18
    """Sampled rows whose output was compared with its recomputation, which needs a bound of the rounding error."""
    WRONG_ROWS = 19
    """Part of CHECKED_ROWS: the output is farther from its recomputation than rounding explains."""
    OUTPUT_ERROR_MAX = 20
    """Largest distance of an output from its recomputation; rounding explains at most 1."""
    WRONG_GRADIENT_ROWS = 21
    """Sampled rows of gradients, and of the log-sum-exp, that are farther off than rounding explains."""
    GRADIENT_ERROR_MAX = 22
    """Largest distance of a gradient from its recomputation; rounding explains at most 1."""
    MOST_ENTROPY_SUM = 23
    """Sum of log n over ENTROPY_ROWS: the most entropy that these rows can have (nats)."""


SLOT_COUNT: Final = len(Slot)
OLDEST_SLOT_COUNT: Final = 13
"""The length of rows in the first recorded runs, the shortest ever. Do not change it when you append a slot."""
MOST_SLOTS: Final = 64
"""The maximum length of rows of any version."""


SUM_SLOTS: Final = (
    Slot.SCORE_OFFSET_SUM,
    Slot.SCORE_OFFSET_SUMSQ,
    Slot.DELTA_BIAS_SUM,
    Slot.DELTA_BIAS_ABS,
    Slot.DELTA_BIAS_SUMSQ,
    Slot.ENTROPY_SUM,
    Slot.MOST_ENTROPY_SUM,
)
MAX_SLOTS: Final = (Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.OUTPUT_ERROR_MAX, Slot.GRADIENT_ERROR_MAX)
COUNT_SLOTS: Final = tuple(slot for slot in Slot if slot not in {*SUM_SLOTS, *MAX_SLOTS})
RARE: Final = {"entropy": (Slot.ENTROPY_ROWS, Slot.ENTROPY_SUM), "gradient_error": (Slot.GRADIENT_ERROR_MAX,)}
"""Statistics that some samples lack although rows were counted, by name. The first slot shows whether the statistic was
measured; if not, the last measured value is shown."""
_IS_COUNT: Final = tuple(slot in COUNT_SLOTS for slot in Slot)


def identity_row() -> Words:
    """Return the state of a head without any counted row, [SLOT_COUNT]."""
    row = np.zeros(SLOT_COUNT, dtype=np.int64)
    row.view(np.float64)[list(MAX_SLOTS)] = -np.inf
    return row


def fitted(words: Words) -> Words:
    """Convert rows of any version, [..., slots], to this version's, [..., SLOT_COUNT].

    Slots that an older version lacks get the identity of their merge rule; unknown slots of a newer one are dropped.
    """
    width = words.shape[-1]
    if width >= SLOT_COUNT:
        return words[..., :SLOT_COUNT]
    fit = np.empty((*words.shape[:-1], SLOT_COUNT), dtype=np.int64)
    fit[..., :width], fit[..., width:] = words, identity_row()[width:]
    return fit


def merge_words(states: Sequence[Words]) -> Words:
    """Merge head states of equal shape [..., SLOT_COUNT] in the given order.

    Counts merge exactly; sums are added in float64 in that order, so that the same order always gives the same bits. A
    NaN stays a NaN. Raises ValueError if `states` is empty.
    """
    if not states:
        raise ValueError("merge_words needs at least one state; states is empty")
    merged = states[0].copy()
    floats = merged.view(np.float64)
    counts, sums, maxima = list(COUNT_SLOTS), list(SUM_SLOTS), list(MAX_SLOTS)
    for state in states[1:]:
        other = np.ascontiguousarray(state).view(np.float64)
        merged[..., counts] += state[..., counts]
        floats[..., sums] += other[..., sums]
        floats[..., maxima] = np.maximum(floats[..., maxima], other[..., maxima])
    return merged


def looked_at(words: Words) -> Floats:
    """Return the number of rows of each head, [...], for which ties, shift and delta bias were measured."""
    return slot_values(words, Slot.ROWS) - slot_values(words, Slot.SKIPPED_ROWS)


def slot_values(words: Words, slot: Slot) -> npt.NDArray[np.float64]:
    """Return one statistic of every head as float64, [...]: counts converted, float slots by their bits."""
    column = words[..., slot]
    if _IS_COUNT[slot]:
        return column.astype(np.float64)  # copies and converts in one pass
    return column.copy().view(np.float64)
