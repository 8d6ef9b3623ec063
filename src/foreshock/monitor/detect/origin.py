"""Where a number that is not finite was born, from the rows of every head in one sample.

Layers are numbered as the forward runs through them. A forward that breaks reaches the attention of every later layer;
then the loss is not finite, and no gradient is. A backward that breaks reaches the attention of every earlier layer
alone. So the first layer whose input or output is broken shows the place, and without one the last layer whose
gradient is.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.contract.wire import HeadRef

_NAMED: Final = 3
"""Heads that a place names one by one."""


def origin(heads: Sequence[HeadRef], broken: Floats, by_input: Floats, by_output: Floats) -> str:
    """The place, as the end of a sentence; empty if every row is finite.

    heads: (layer, head) of each row. broken: how many rows of each head are not finite, [N]. by_input, by_output: how
    many of these have an input, or a finite input and an output, that is not finite.
    """
    layers = np.array([layer for layer, _ in heads])
    if (forward := by_input + by_output > 0).any():
        first = int(layers[forward].min())
        own = layers == first
        if not (by_input[own] > 0).any():
            named = _named(heads, own & forward)
            return f"first in the forward, in the attention output of {named}; its inputs are finite"
        into = f"the inputs of {f'layer {first}' if forward[own].all() else _named(heads, own & forward)}"
        if (before := layers[layers < first]).size:
            return f"first in the forward, between the attention of layer {before.max()} and {into}"
        return f"in the forward, at or before {into}: the weights, or the batch"
    if not (broken > 0).any():
        return ""
    last = int(layers[broken > 0].max())
    if (after := layers[layers > last]).size:
        return f"first in the backward, between layer {last} and layer {after.min()}"
    return f"first in the backward, after the attention of layer {last}: in the loss, the output head or the last block"


def _named(heads: Sequence[HeadRef], own: npt.NDArray[np.bool_]) -> str:
    rows = np.flatnonzero(own).tolist()
    names = ", ".join(f"layer {heads[row][0]} head {heads[row][1]}" for row in rows[:_NAMED])
    return names + (f" and {len(rows) - _NAMED} more heads of it" if len(rows) > _NAMED else "")
