"""Hypothesis strategies for state words."""

import numpy as np
from hypothesis import strategies as st

from foreshock.contract.slots import COUNT_SLOTS, SLOT_COUNT, Slot, Words

edge_values = st.sampled_from([0.0, -0.0, 1.0, -np.inf, np.inf, np.nan, 1e-300, 512.0])


@st.composite
def states(draw: st.DrawFn) -> Words:
    words = np.zeros((draw(st.integers(0, 5)), SLOT_COUNT), dtype=np.int64)
    for head in words:
        for slot in set(Slot):
            known = slot in COUNT_SLOTS
            drawn = draw(st.integers(0, 3)) if known else draw(edge_values)
            head[slot] = drawn if known else np.float64(drawn).view(np.int64)
    return words
