"""What is read of state words, whatever they hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.counted_words import odd, states

from foreshock.contract.metrics.catalog import BY_KEY, read
from foreshock.contract.metrics.metric import ratio
from foreshock.contract.slots import Floats, Slot, Words, slot_values

COUNTED = [key for key, metric in BY_KEY.items() if metric.head is not None and metric.head.read is not None]


@settings(max_examples=40, deadline=None)
@given(words=states())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity over infinity
def test_what_is_read_shares_no_memory_with_the_words(words: Words) -> None:
    for key in COUNTED:
        assert not np.shares_memory(read(key, words), words)
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
