"""What is read of state words fast is what is read of them plainly, whatever they hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.contract.catalog import BY_KEY, read
from foreshock.contract.metric import ratio
from foreshock.contract.slots import SLOT_COUNT, SLOTS, Floats, ReadOnce, Slot, Words, slot_values

COUNTED = [key for key, metric in BY_KEY.items() if metric.head is not None and metric.head.read is not None]
odd = st.sampled_from([0.0, -0.0, 1.0, -np.inf, np.inf, np.nan, 1e-300, 512.0])


@st.composite
def states(draw: st.DrawFn) -> Words:
    words = np.zeros((draw(st.integers(0, 5)), SLOT_COUNT), dtype=np.int64)
    for head in words:
        for slot in set(Slot):
            known = SLOTS[slot].dtype == "int64"
            drawn = draw(st.integers(0, 3)) if known else draw(odd)
            head[slot] = drawn if known else np.float64(drawn).view(np.int64)
    return words


@settings(max_examples=40, deadline=None)
@given(words=states())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity over infinity
def test_each_metric_is_the_same_however_it_is_read_and_shares_no_memory_with_the_words(words: Words) -> None:
    once = ReadOnce(words)
    for key in COUNTED * 2:
        plain = read(key, words)
        assert read(key, once).tobytes() == plain.tobytes()
        assert not np.shares_memory(plain, words)
    for slot in set(Slot):
        assert not np.shares_memory(slot_values(words, slot), words)


@given(part=st.lists(odd, min_size=6, max_size=6), whole=st.lists(odd, min_size=6, max_size=6))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_ratio_is_unknown_where_nothing_was_counted_and_the_quotient_elsewhere(
    part: list[float], whole: list[float]
) -> None:
    def told(parts: Floats, wholes: Floats) -> list[float]:
        return [p / w if w != 0 else np.nan for p, w in zip(parts, wholes, strict=True)]

    for wholes in (np.array(whole), np.abs(np.nan_to_num(np.array(whole))) + 1.0):
        np.testing.assert_array_equal(ratio(np.array(part), wholes), told(np.array(part), wholes))
