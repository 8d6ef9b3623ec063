"""Where a NaN was born: the place that the rows of one sample show, for every place where a model can break."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.monitor.detect.non_finite import NonFiniteTracker, Origin, place_of

LAYERS, HEADS = 4, 3
REFS = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


def rows(*, into: int = LAYERS, out: tuple[int, ...] = (), out_layer: int = LAYERS, backward: int = -1) -> str:
    """What is said if the inputs of layers `into` on, the outputs of heads `out` of `out_layer`, and the gradients of
    layers up to `backward` are not finite."""
    layers = np.array([layer for layer, _ in REFS])
    by_input = np.where(layers >= into, 8.0, 0.0)
    by_output = np.array([5.0 if (layer, head) in {(out_layer, h) for h in out} else 0.0 for layer, head in REFS])
    broken = np.maximum(by_input + by_output, np.where(layers <= backward, 8.0, 0.0))
    return place_of(REFS, broken, by_input, by_output)


def test_a_finite_sample_has_no_place_of() -> None:
    assert rows() == ""


@given(st.integers(1, LAYERS - 1))
def test_a_forward_that_breaks_between_two_layers_names_them(layer: int) -> None:
    said = rows(into=layer, backward=LAYERS - 1)  # a NaN loss makes every gradient NaN
    assert said == f"first in the forward, between the attention of layer {layer - 1} and the inputs of layer {layer}"


@given(st.integers(0, LAYERS - 2))
def test_a_backward_that_breaks_between_two_layers_names_them_and_no_other(layer: int) -> None:
    assert re.findall(r"layer (\d)", rows(backward=layer)) == [str(layer), str(layer + 1)]
    assert "backward" in rows(backward=layer)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_attention_that_breaks_itself_names_its_head(layer: int) -> None:
    said = rows(into=layer + 1, out_layer=layer, out=(1,), backward=LAYERS - 1)
    assert said == f"first in the forward, in the attention output of layer {layer} head 1; its inputs are finite"


def test_the_ends_of_the_model_are_places_too() -> None:
    assert "at or before the inputs of layer 0" in rows(into=0, backward=LAYERS - 1)
    assert "after the attention of layer 3" in rows(backward=LAYERS - 1)


def test_one_broken_projection_names_its_head() -> None:
    by_input = np.array([8.0 if ref == (2, 1) or ref[0] > 2 else 0.0 for ref in REFS])
    said = place_of(REFS, np.full(len(REFS), 8.0), by_input, np.zeros(len(REFS)))
    assert said.endswith("between the attention of layer 1 and the inputs of layer 2 head 1")


@pytest.mark.parametrize("length", [10, 200, 400])
def test_long_names_leave_out_whole_sentences_and_no_place(length: int) -> None:
    names = (
        f"1 of 9 gradients is not finite: the last one is that of {'deep.' * (length // 5)}weight. Nor is its weight."
    )
    found = Origin(3, "first in the forward, between layer 1 and layer 2", 0, "6 of 72 rows see no key.", names)
    said = NonFiniteTracker(harm="weights", origin=found).sentence(5, len(REFS))
    assert len(said) <= 500
    assert said.startswith("Numbers are not finite since step 3, first in the forward, between layer 1 and layer 2. ")
    assert "6 of 72 rows see no key." in said
    assert ("deep." in said) == (length < 400)
    assert said.endswith(".")
