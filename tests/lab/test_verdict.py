"""A checkpoint and a model get the first answer: is it attention, which head, is it this rounding, what to do."""

from pathlib import Path

import pytest
from tests.lab.tagger_model import diagnosed, key_bias, weights


def test_a_healthy_checkpoint_is_told_to_have_another_trouble(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights())
    assert said.exit_code == 0, said.output
    assert "Not this rounding: no head has large scores" in said.output
    assert "foreshock switch" not in said.output
    assert "row_corrected" not in said.output


def test_a_head_whose_scores_moved_as_a_whole_is_named_with_what_would_confirm_it(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, key_bias(60.0))
    assert (
        "Attention, with the mark of this rounding: the scores of layer 1 head 2 moved as a whole, by +" in said.output
    )
    assert "One checkpoint cannot say whether it grows" in said.output
    assert 'agent.set_mode(agent.modes(), "row_corrected"' in said.output


@pytest.mark.parametrize(
    ("nats", "sentence"),
    [
        ((20.0, 60.0), "Attention, most likely this rounding"),
        ((60.0, 60.0), "Attention is shifted, but the shift does not grow"),
        ((20.0, 60.0, 20.0), "It grew and is back"),
    ],
)
def test_several_checkpoints_say_whether_the_shift_grows(
    nats: tuple[float, ...], sentence: str, tmp_path: Path
) -> None:
    said = diagnosed(tmp_path, *map(key_bias, nats))
    assert sentence in said.output
    assert "layer 1 head 2" in said.output


def test_a_shift_in_attention_that_runs_in_float32_is_not_called_this_rounding(tmp_path: Path) -> None:
    assert "not by this rounding, because it ran in float32 here" in diagnosed(
        tmp_path, key_bias(60.0), build="in_float32"
    ).output.replace("\n", " ")


def test_scores_that_grew_apart_are_another_trouble(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__0__qkv__weight=lambda weight: weight * 60))
    assert "something else than this rounding: scores of layer 0 head" in said.output
    assert "A switch of numerics would not help" in said.output


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__1__qkv__weight=lambda weight: weight.fill_(float("nan"))))
    assert said.exit_code == 0, said.output
    assert "1 of its parameters hold values that are not finite, blocks.1.qkv.weight among them" in said.output


def test_finite_weights_that_overflow_are_named_by_layer(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__0__out__weight=lambda weight: weight.fill_(3e38)))
    assert said.exit_code == 0, said.output
    assert "first in the forward, after the attention of layer 0: " in said.output
