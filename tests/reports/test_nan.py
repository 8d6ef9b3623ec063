"""NaN as people meet it: the first words about it name the place, its extent, and what it harms. Injected failures."""

import math
import re
from typing import Any

import pytest
import torch
from tests.reports.training import BATCH, LENGTH, Block, Model, Outcome, poison, train

BROKEN_AT = 20
"""A step whose rows are measured: the tenth before it was sampled."""


def block_of(model: Model, number: int) -> Block:
    block = model.blocks[number]
    assert isinstance(block, Block)
    return block


def first_words(found: Outcome) -> str:
    """The one warning of the run."""
    assert [verdict.layer for verdict in found.raised] == [None], [verdict.sentence for verdict in found.raised]
    return found.raised[0].sentence


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize(("clip", "bounded"), [(None, True), (1.0, False)])
def test_a_faulty_attention_backward_is_reported_before_the_loss(
    known: bool, attention: str, clip: float | None, bounded: bool
) -> None:
    """TRL issue 7181: the backward of one layer's attention gives NaN for the queries."""

    def broken(model: Model, step: int) -> Any:
        return [poison(block_of(model, 2).attn.q_proj)] if step == BROKEN_AT else []

    found = train(before=broken, known=known, attention=attention, clip=clip)
    assert found.raised[0].step == BROKEN_AT < found.harmed
    said = first_words(found)
    assert "first in the backward, between layer 1 and layer 2. 8 of 16 heads have such rows." in said
    assert ("blocks.2.attn.q_proj" in said) == bounded  # clipping by a NaN norm makes every gradient NaN
    assert found.told.count(f"a checkpoint before step {BROKEN_AT}") == 1
    assert found.raised[0].severity == "critical"


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_forward_that_breaks_between_two_layers_names_them(block: int) -> None:
    """nanoGPT issue 210, Automodel issue 3232: some block's MLP or norm overflows."""

    def broken(model: Model, step: int) -> Any:
        up = block_of(model, block).up
        return [up.register_forward_hook(lambda _, __, out: out * math.inf)] if step == BROKEN_AT else []

    found = train(before=broken)
    between = f"between the attention of layer {block} and the inputs of layer {block + 1}"
    assert f"first in the forward, {between}." in first_words(found)
    assert found.raised[0].step == BROKEN_AT == found.harmed


def test_skipped_updates_are_a_warning_with_their_share_and_no_alarm() -> None:
    """Time-MoE issue 71: the gradient norm is NaN in some steps, the loss is fine."""

    def broken(model: Model, step: int) -> Any:
        return [poison(block_of(model, 3).down)] if step % 3 == 0 else []

    found = train(120, before=broken, skip_broken=True)
    said = first_words(found)
    lost, steps = map(int, re.findall(r"(\d+) of (\d+) updates were lost", said)[0])
    assert lost / steps == pytest.approx(1 / 3, abs=0.05)
    assert "first in the backward, after the attention of layer 3" in said
    assert "blocks.3.down" in said
    assert "Weights are finite." in said
    assert not re.search("risk|go back|stop", said, re.IGNORECASE)
    assert found.raised[0].severity == "warning"


def test_a_loss_scaler_that_finds_its_scale_is_no_finding() -> None:
    def broken(model: Model, step: int) -> Any:
        return [poison(model.head, math.inf)] if step <= 12 or step == 90 else []

    assert not train(150, before=broken, skip_broken=True).raised


def test_a_step_that_was_not_measured_has_no_invented_place() -> None:
    def broken(model: Model, step: int) -> Any:
        up = block_of(model, 1).up
        return [up.register_forward_hook(lambda _, __, out: out * math.nan)] if step == BROKEN_AT + 4 else []

    said = first_words(train(before=broken))
    assert "that step's rows were not measured (sample_every_steps=1 measures every step)" in said
    assert "layer" not in said


def left_padding(columns: int) -> torch.Tensor:
    """A causal mask in which the first columns of every second sequence are padding."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1).clone()
    mask[::2, ..., :columns] = False
    return mask


def test_rows_that_see_no_key_are_named_after_step_1() -> None:
    """transformers issues 32390 and 31035, PyTorch issue 103749: padding on the left of a causal model."""
    found = train(mask=left_padding(4))
    assert "12 of 72 measured rows of a head see no key" in found.table
    assert not found.raised
    assert "see no key" not in train(mask=left_padding(0)).table


def test_rows_that_see_no_key_are_the_first_suspect_once_nan_appears() -> None:
    def broken(model: Model, step: int) -> Any:
        return [poison(block_of(model, 0).attn.q_proj)] if step == BROKEN_AT else []

    said = first_words(train(before=broken, mask=left_padding(4)))
    assert "12 of 72 rows of a head see no key: suspect the mask first." in said


def test_a_healthy_run_has_no_finding() -> None:
    assert not train(60).raised
