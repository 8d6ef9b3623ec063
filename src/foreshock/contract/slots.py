"""Which statistic sits where in a head's state, its type and its merge rule.

A head's state is one row of 8-byte words. Counts are int64; sums and maxima are float64 and share the same words (the
same memory viewed as float64), so that one copy takes every statistic of every head. What travels is mergeable (house
decision 2): counts and sums add, maxima take the larger one; a ratio or a mean is formed only where it is shown.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
"""Head states, [..., SLOT_COUNT] int64; float slots hold the bits of a float64. Other versions' are `fitted`."""

Floats = npt.NDArray[np.float64]

Merge = Literal["sum", "max"]


class Slot(IntEnum):
    """Position of a statistic in a head's state. Positions are part of the wire format: append, never reorder.

    An appended slot may be of any kind: each says how it is merged in SLOTS, and nothing goes by its position.
    """

    ROWS = 0
    TIED_ROWS_BF16 = 1
    TIED_ROWS_ONE = 2
    SHIFTED_ROWS = 3
    EMPTY_ROWS = 4
    NONFINITE_ROWS = 5
    SCORE_MAX = 6
    ROW_MAX_ABS = 7
    SCORE_OFFSET_SUM = 8
    SCORE_OFFSET_SUMSQ = 9
    DELTA_BIAS_SUM = 10
    DELTA_BIAS_ABS = 11
    DELTA_BIAS_SUMSQ = 12
    SKIPPED_ROWS = 13
    ENTROPY_ROWS = 14
    ENTROPY_SUM = 15
    NONFINITE_INPUT_ROWS = 16
    NONFINITE_OUTPUT_ROWS = 17
    CHECKED_ROWS = 18
    WRONG_ROWS = 19
    OUTPUT_ERROR_MAX = 20
    WRONG_GRADIENT_ROWS = 21
    GRADIENT_ERROR_MAX = 22


SLOT_COUNT: Final = len(Slot)
OLDEST_SLOT_COUNT: Final = 13
"""The fewest that a row ever had: those of the first recorded runs. It stays when a slot is appended."""
MOST_SLOTS: Final = 64
"""No version's rows are longer."""


class SlotInfo(NamedTuple):
    """What a slot holds. `identity` is the value that changes nothing when merged."""

    dtype: Literal["int64", "float64"]
    merge: Merge
    identity: float
    help: str


SLOTS: Final[dict[Slot, SlotInfo]] = {
    Slot.ROWS: SlotInfo("int64", "sum", 0, "Query rows with at least one visible key and only finite scores."),
    Slot.TIED_ROWS_BF16: SlotInfo(
        "int64", "sum", 0, "Rows whose scores, rounded to bf16, have more than one maximum (paper, section 3.3.2)."
    ),
    Slot.TIED_ROWS_ONE: SlotInfo(
        "int64", "sum", 0, "Rows with more than one P = exp(S - max) that rounds to 1 in the operand's dtype."
    ),
    Slot.SHIFTED_ROWS: SlotInfo("int64", "sum", 0, "Rows that paper_softmax shifted."),
    Slot.EMPTY_ROWS: SlotInfo("int64", "sum", 0, "Rows with no visible key; kept out of every other slot."),
    Slot.NONFINITE_ROWS: SlotInfo(
        "int64",
        "sum",
        0,
        "Rows with a NaN or infinite score, output or delta; counted in no other slot but its two parts.",
    ),
    Slot.SCORE_MAX: SlotInfo("float64", "max", -np.inf, "Largest scaled score."),
    Slot.ROW_MAX_ABS: SlotInfo("float64", "max", -np.inf, "Largest absolute value of a row's maximum score."),
    Slot.SCORE_OFFSET_SUM: SlotInfo("float64", "sum", 0, "Sum of lse - log n, n being the visible keys of the row."),
    Slot.SCORE_OFFSET_SUMSQ: SlotInfo("float64", "sum", 0, "Sum of squares of lse - log n."),
    Slot.DELTA_BIAS_SUM: SlotInfo("float64", "sum", 0, "Sum of delta_lp - delta_hp (paper, section 3.3.1)."),
    Slot.DELTA_BIAS_ABS: SlotInfo("float64", "sum", 0, "Sum of |delta_lp - delta_hp|."),
    Slot.DELTA_BIAS_SUMSQ: SlotInfo("float64", "sum", 0, "Sum of squares of delta_lp - delta_hp."),
    Slot.SKIPPED_ROWS: SlotInfo(
        "int64", "sum", 0, "Rows counted in ROWS whose ties, shift and delta bias an earlier version left out."
    ),
    Slot.ENTROPY_ROWS: SlotInfo("int64", "sum", 0, "Rows counted in ROWS whose entropy is known: sampled ones."),
    Slot.ENTROPY_SUM: SlotInfo("float64", "sum", 0, "Sum of the entropies of rows, lse - sum P S (nats)."),
    Slot.NONFINITE_INPUT_ROWS: SlotInfo(
        "int64", "sum", 0, "Part of NONFINITE_ROWS: attention was given a query, key or value that is not finite."
    ),
    Slot.NONFINITE_OUTPUT_ROWS: SlotInfo(
        "int64", "sum", 0, "Part of NONFINITE_ROWS: the inputs are finite and the model's attention output is not."
    ),
    Slot.CHECKED_ROWS: SlotInfo(
        "int64", "sum", 0, "Sampled rows whose output was compared with its recomputation: those that have a bound."
    ),
    Slot.WRONG_ROWS: SlotInfo(
        "int64", "sum", 0, "Part of CHECKED_ROWS: the output is farther from its recomputation than rounding explains."
    ),
    Slot.OUTPUT_ERROR_MAX: SlotInfo(
        "float64", "max", -np.inf, "Largest distance of an output from its recomputation; 1 is what rounding explains."
    ),
    Slot.WRONG_GRADIENT_ROWS: SlotInfo(
        "int64", "sum", 0, "Sampled rows whose gradient of the query is farther off than rounding explains."
    ),
    Slot.GRADIENT_ERROR_MAX: SlotInfo(
        "float64", "max", -np.inf, "Largest distance of a gradient from its recomputation; 1 is what rounding explains."
    ),
}

COUNT_SLOTS: Final = tuple(slot for slot, info in SLOTS.items() if info.dtype == "int64")
SUM_SLOTS: Final = tuple(s for s, info in SLOTS.items() if info.dtype == "float64" and info.merge == "sum")
MAX_SLOTS: Final = tuple(slot for slot, info in SLOTS.items() if info.merge == "max")


_IS_COUNT: Final = tuple(SLOTS[slot].dtype == "int64" for slot in Slot)


def identity_row() -> Words:
    """The state of a head that has seen nothing, [SLOT_COUNT]."""
    row = np.zeros(SLOT_COUNT, dtype=np.int64)
    floats = [slot for slot, info in SLOTS.items() if info.dtype == "float64"]
    row.view(np.float64)[floats] = [SLOTS[slot].identity for slot in floats]
    return row


def fitted(words: Words) -> Words:
    """Rows of any version, [..., slots], as this version reads them, [..., SLOT_COUNT].

    Slots that an older version did not have hold their identity: nothing was counted. Those of a newer version that
    are unknown here are left out.
    """
    width = words.shape[-1]
    if width >= SLOT_COUNT:
        return words[..., :SLOT_COUNT]
    fit = np.empty((*words.shape[:-1], SLOT_COUNT), dtype=np.int64)
    fit[..., :width], fit[..., width:] = words, identity_row()[width:]
    return fit


def merge_words(states: Sequence[Words]) -> Words:
    """Merge head states of equal shape [..., SLOT_COUNT] in the given order.

    Counts merge exactly; sums are added in float64 in that order, so that one order always gives the same bits. A NaN
    stays a NaN. Raises ValueError when there is nothing to merge.
    """
    if not states:
        raise ValueError("merge_words was given no states; give at least one")
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
    """Rows of every head whose ties, shift and delta bias were counted, [...]: what those are shares of."""
    return slot_values(words, Slot.ROWS) - slot_values(words, Slot.SKIPPED_ROWS)


def slot_values(words: Words, slot: Slot) -> npt.NDArray[np.float64]:
    """One statistic of every head as float64, [...]: counts converted, float slots by their bits."""
    column = words[..., slot]
    if _IS_COUNT[slot]:
        return column.astype(np.float64)  # one pass, converting as it gathers
    return column.copy().view(np.float64)
