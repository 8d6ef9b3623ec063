"""Merging is the law of what travels: exact for counts, fixed-order for sums, order-free for maxima."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from foreshock.contract.slots import (
    COUNT_SLOTS,
    MAX_SLOTS,
    SLOT_COUNT,
    SLOTS,
    SUM_SLOTS,
    Slot,
    Words,
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


def test_every_slot_has_a_description_and_belongs_to_one_merge_group() -> None:
    assert set(SLOTS) == set(Slot)
    assert sorted((*COUNT_SLOTS, *SUM_SLOTS, *MAX_SLOTS)) == list(range(SLOT_COUNT))
    assert all(info.help.endswith(".") for info in SLOTS.values())


@given(st.lists(states(), min_size=1, max_size=5))
def test_merged_counts_are_exact_and_maxima_are_the_largest(parts: list[Words]) -> None:
    merged = merge_words(parts)
    for slot in COUNT_SLOTS:
        assert merged[:, slot].tolist() == [sum(int(p[h, slot]) for p in parts) for h in range(3)]
    for slot in MAX_SLOTS:
        assert column(merged, slot).tolist() == [max(float(column(p, slot)[h]) for p in parts) for h in range(3)]


@given(st.lists(states(), min_size=1, max_size=5))
def test_sums_agree_with_exact_arithmetic_to_1e_12(parts: list[Words]) -> None:
    import math

    merged = merge_words(parts)
    for slot in SUM_SLOTS:
        for head in range(3):
            terms = [float(column(p, slot)[head]) for p in parts]
            scale = sum(abs(t) for t in terms)
            assert abs(float(column(merged, slot)[head]) - math.fsum(terms)) <= 1e-12 * scale


@given(states())
def test_the_identity_changes_nothing_on_either_side(part: Words) -> None:
    nothing = np.stack([identity_row()] * 3)
    assert merge_words([nothing, part]).tolist() == part.tolist()
    assert merge_words([part, nothing]).tolist() == part.tolist()


@given(states(), states())
def test_merging_leaves_its_inputs_alone(a: Words, b: Words) -> None:
    before = a.copy(), b.copy()
    merge_words([a, b])
    assert (a == before[0]).all()
    assert (b == before[1]).all()


def test_a_nan_stays_a_nan() -> None:
    part = identity_row()[None].copy()
    part.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = np.nan
    part.view(np.float64)[0, Slot.SCORE_MAX] = np.nan
    merged = merge_words([identity_row()[None], part, identity_row()[None]])
    assert np.isnan(column(merged, Slot.SCORE_OFFSET_SUM)).all()
    assert np.isnan(column(merged, Slot.SCORE_MAX)).all()


def test_merging_nothing_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        merge_words([])
