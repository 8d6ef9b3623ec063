"""What the store keeps of a sample comes back to the bit, and a blob that is torn or of another boot hurts nobody."""

import math
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.slots import SLOT_COUNT
from foreshock.contract.wire import Array, Sample
from foreshock.server.store.reading import (
    SCALARS,
    head_arrays,
    pack_arrays,
    pack_scalars,
    unpack_arrays,
    unpack_scalars,
)

HEADS = 3


def of_words(words: list[int]) -> Array:
    return Array.of(np.array(words, dtype=np.int64).reshape(HEADS, SLOT_COUNT))


# Every pattern of bits is a number of some kind: NaN with a payload, -0.0, the least and the largest.
words = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADS * SLOT_COUNT, max_size=HEADS * SLOT_COUNT).map(
    of_words
)
modes = st.lists(st.integers(0, 2**31 - 1), min_size=HEADS, max_size=HEADS).map(
    lambda flags: Array.of(np.array(flags, dtype=np.int32))
)
norms = st.lists(st.integers(0, 2**32 - 1), min_size=HEADS, max_size=HEADS).map(
    lambda bits: Array.of(np.array(bits, dtype=np.uint32).view(np.float32))
)
samples = st.builds(
    Sample,
    step=st.just(7),
    since_step=st.just(6),
    unix_seconds=st.just(1.0),
    states=st.none() | words,
    modes=st.none() | modes,
    query_norm=st.none() | norms,
    risk=st.none() | norms,
    **{name: st.none() | st.just(math.nan) | st.floats(min_value=0, allow_infinity=False) for name in SCALARS},
)
ALL = ("states", "modes", "query_norm", "key_norm", "query_key_norm", "risk")


@given(sample=samples)
def test_arrays_come_back_to_the_bit_and_absent_ones_stay_absent(sample: Sample) -> None:
    found = unpack_arrays(pack_arrays(sample))
    sent = {name: array for name in ALL if (array := getattr(sample, name)) is not None}
    assert set(found) == set(sent)
    for name, array in sent.items():
        assert found[name].tobytes() == array.raw
        assert found[name].shape == array.shape
    assert set(unpack_arrays(pack_arrays(sample), frozenset({"modes", "risk"}))) == {"modes", "risk"} & set(sent)


@given(sample=samples)
def test_a_number_that_is_no_number_is_told_from_one_that_was_not_sent(sample: Sample) -> None:
    row = pack_scalars(sample)
    assert not any(isinstance(value, float) and math.isnan(value) for value in row.values()), "no NaN in a column"
    found = unpack_scalars(SimpleNamespace(**row))
    for name in SCALARS:
        sent = getattr(sample, name)
        assert found[name] == sent or (sent is not None and math.isnan(sent) and math.isnan(found[name] or 0.0))


@given(sample=samples, cut=st.integers(0, 2**16))
def test_a_blob_that_is_cut_anywhere_gives_no_array_that_was_not_sent(sample: Sample, cut: int) -> None:
    whole = pack_arrays(sample) or b""
    torn = SimpleNamespace(id=1, arrays=whole[: cut % (len(whole) + 1)])
    found = head_arrays(torn, HEADS)
    for name, values in found.items():
        assert values.tobytes() == getattr(sample, name).raw
