"""Merging state words: exact for counts, in a fixed order for sums, in any order for maxima."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from foreshock.contract.slots import (
    COUNT_SLOTS,
    MAX_SLOTS,
    OLDEST_SLOT_COUNT,
    SLOT_COUNT,
    SUM_SLOTS,
    Slot,
    Words,
    fitted,
    identity_row,
    merge_words,
    slot_values,
)


@st.composite
def states(draw: st.DrawFn, heads: int = 3) -> Words:
    words = draw(hnp.arrays(np.int64, (heads, SLOT_COUNT), elements=st.integers(0, 2**52)))
    # Add 0.0, because a merge turns -0.0 into 0.0: the same number with other bits.
    floats = draw(hnp.arrays(np.float64, (heads, SLOT_COUNT), elements=st.floats(-1e6, 1e6))) + 0.0
    for slot in (*SUM_SLOTS, *MAX_SLOTS):
        words.view(np.float64)[:, slot] = floats[:, slot]
    return words


def column(words: Words, slot: Slot) -> npt.NDArray[np.float64]:
    return slot_values(words, slot)


def test_every_slot_belongs_to_one_merge_group() -> None:
    assert sorted((*COUNT_SLOTS, *SUM_SLOTS, *MAX_SLOTS)) == list(range(SLOT_COUNT))


@given(st.lists(states(), min_size=1, max_size=5))
def test_merged_sums_match_exact_arithmetic_to_1e_12(parts: list[Words]) -> None:
    merged = merge_words(parts)
    for slot in SUM_SLOTS:
        for head in range(3):
            terms = [float(column(p, slot)[head]) for p in parts]
            scale = sum(abs(t) for t in terms)
            assert abs(float(column(merged, slot)[head]) - math.fsum(terms)) <= 1e-12 * scale


def test_merge_preserves_nan() -> None:
    part = identity_row()[None].copy()
    part.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = np.nan
    part.view(np.float64)[0, Slot.SCORE_MAX] = np.nan
    merged = merge_words([identity_row()[None], part, identity_row()[None]])
    assert np.isnan(column(merged, Slot.SCORE_OFFSET_SUM)).all()
    assert np.isnan(column(merged, Slot.SCORE_MAX)).all()


@st.composite
def exact_states(draw: st.DrawFn, heads: int = 2) -> Words:
    """States whose floats are multiples of 1/8 of moderate size, so that their sums are exact in any order."""
    words = draw(hnp.arrays(np.int64, (heads, SLOT_COUNT), elements=st.integers(0, 2**40)))
    eighths = draw(hnp.arrays(np.int64, (heads, SLOT_COUNT), elements=st.integers(-(2**40), 2**40)))
    floats = [*SUM_SLOTS, *MAX_SLOTS]
    words.view(np.float64)[:, floats] = eighths[:, floats] / 8
    return words


def merged_in_python(parts: list[Words], head: int, slot: Slot) -> float:
    """One slot of one head, merged in plain Python by its group."""
    values = [float(column(part, slot)[head]) for part in parts]
    return max(values) if slot in MAX_SLOTS else sum(values)


@given(st.lists(exact_states(), min_size=1, max_size=5))
def test_every_slot_is_merged_by_its_group(parts: list[Words]) -> None:
    merged = merge_words(parts)
    for slot in Slot:
        assert [column(merged, slot)[head] for head in range(2)] == [
            merged_in_python(parts, head, slot) for head in range(2)
        ]


@given(exact_states(), exact_states(), exact_states())
def test_merge_is_associative_and_commutative_for_exact_sums(a: Words, b: Words, c: Words) -> None:
    """Merging does not change its inputs, and identity rows do not change the result."""
    copies = a.copy(), b.copy(), c.copy()
    together, empty = merge_words([a, b, c]).tolist(), np.stack([identity_row()] * 2)
    assert merge_words([merge_words([a, b]), c]).tolist() == together
    assert merge_words([a, merge_words([empty, b, c])]).tolist() == together
    assert merge_words([c, a, b, empty]).tolist() == together
    assert all((after == before).all() for after, before in zip((a, b, c), copies, strict=True))
    with pytest.raises(ValueError, match="needs at least one state"):
        merge_words([])


@given(exact_states(), exact_states(), st.integers(OLDEST_SLOT_COUNT, SLOT_COUNT))
def test_rows_with_fewer_slots_merge_as_if_the_later_slots_were_empty(first: Words, older: Words, slots: int) -> None:
    blank = older.copy()
    blank[:, slots:] = identity_row()[slots:]
    merged = merge_words([first, fitted(older[:, :slots])])
    assert merged.tolist() == merge_words([first, blank]).tolist()
    assert merged[:, slots:].tolist() == first[:, slots:].tolist()


@given(exact_states(), st.integers(0, 5))
def test_unknown_slots_of_longer_rows_are_dropped(words: Words, more: int) -> None:
    longer = np.concatenate([words, words[:, :more]], axis=1)
    assert fitted(longer).tolist() == words.tolist()
    assert fitted(longer[None]).shape == (1, 2, SLOT_COUNT)
