"""Merging is the law of what travels: exact for counts, fixed-order for sums, order-free for maxima."""

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
    # Added to 0.0, the sum of nothing: -0.0 would become 0.0 when merged, which is the same number in other bits.
    floats = draw(hnp.arrays(np.float64, (heads, SLOT_COUNT), elements=st.floats(-1e6, 1e6))) + 0.0
    for slot in (*SUM_SLOTS, *MAX_SLOTS):
        words.view(np.float64)[:, slot] = floats[:, slot]
    return words


def column(words: Words, slot: Slot) -> npt.NDArray[np.float64]:
    return slot_values(words, slot)


def test_every_slot_belongs_to_one_merge_group() -> None:
    assert sorted((*COUNT_SLOTS, *SUM_SLOTS, *MAX_SLOTS)) == list(range(SLOT_COUNT))


@given(st.lists(states(), min_size=1, max_size=5))
def test_sums_agree_with_exact_arithmetic_to_1e_12(parts: list[Words]) -> None:
    merged = merge_words(parts)
    for slot in SUM_SLOTS:
        for head in range(3):
            terms = [float(column(p, slot)[head]) for p in parts]
            scale = sum(abs(t) for t in terms)
            assert abs(float(column(merged, slot)[head]) - math.fsum(terms)) <= 1e-12 * scale


def test_a_nan_stays_a_nan() -> None:
    part = identity_row()[None].copy()
    part.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = np.nan
    part.view(np.float64)[0, Slot.SCORE_MAX] = np.nan
    merged = merge_words([identity_row()[None], part, identity_row()[None]])
    assert np.isnan(column(merged, Slot.SCORE_OFFSET_SUM)).all()
    assert np.isnan(column(merged, Slot.SCORE_MAX)).all()


@st.composite
def exact_states(draw: st.DrawFn, heads: int = 2) -> Words:
    """States whose floats are multiples of 1/8 of moderate size: their sums are exact, whatever the order."""
    words = draw(hnp.arrays(np.int64, (heads, SLOT_COUNT), elements=st.integers(0, 2**40)))
    eighths = draw(hnp.arrays(np.int64, (heads, SLOT_COUNT), elements=st.integers(-(2**40), 2**40)))
    floats = [*SUM_SLOTS, *MAX_SLOTS]
    words.view(np.float64)[:, floats] = eighths[:, floats] / 8
    return words


def by_hand(parts: list[Words], head: int, slot: Slot) -> float:
    """One slot of one head, merged in plain Python by its group."""
    values = [float(column(part, slot)[head]) for part in parts]
    return max(values) if slot in MAX_SLOTS else sum(values)


@given(st.lists(exact_states(), min_size=1, max_size=5))
def test_every_slot_is_merged_as_it_says_and_by_itself(parts: list[Words]) -> None:
    merged = merge_words(parts)
    for slot in Slot:
        assert [column(merged, slot)[head] for head in range(2)] == [by_hand(parts, head, slot) for head in range(2)]


@given(exact_states(), exact_states(), exact_states())
def test_merging_is_associative_and_commutative_to_the_bit_where_sums_are_exact(a: Words, b: Words, c: Words) -> None:
    """It leaves what it is given as it was, and who counted nothing changes nothing."""
    given_ = a.copy(), b.copy(), c.copy()
    together, nothing = merge_words([a, b, c]).tolist(), np.stack([identity_row()] * 2)
    assert merge_words([merge_words([a, b]), c]).tolist() == together
    assert merge_words([a, merge_words([nothing, b, c])]).tolist() == together
    assert merge_words([c, a, b, nothing]).tolist() == together
    assert all((now == before).all() for now, before in zip((a, b, c), given_, strict=True))
    with pytest.raises(ValueError, match="needs at least one state"):
        merge_words([])


@given(exact_states(), exact_states(), st.integers(OLDEST_SLOT_COUNT, SLOT_COUNT))
def test_rows_of_an_older_version_are_merged_as_if_they_had_counted_nothing_in_later_slots(
    mine: Words, theirs: Words, slots: int
) -> None:
    blank = theirs.copy()
    blank[:, slots:] = identity_row()[slots:]
    merged = merge_words([mine, fitted(theirs[:, :slots])])
    assert merged.tolist() == merge_words([mine, blank]).tolist()
    assert merged[:, slots:].tolist() == mine[:, slots:].tolist()


@given(exact_states(), st.integers(0, 5))
def test_of_rows_of_a_newer_version_the_known_slots_are_read(words: Words, more: int) -> None:
    longer = np.concatenate([words, words[:, :more]], axis=1)
    assert fitted(longer).tolist() == words.tolist()
    assert fitted(longer[None]).shape == (1, 2, SLOT_COUNT)
