"""Injected NaN and infinity: the first warning names the place, its extent and the damage."""

import math
import re
import weakref
from typing import Any

import pytest
import torch
from tests.reports.settings import HandwrittenAttention, NewTokens, broken_backward, once, padded, replaced, since
from tests.reports.training import (
    LENGTH,
    Attention,
    Block,
    Model,
    Outcome,
    poison,
    train,
)
from torch.utils._python_dispatch import TorchDispatchMode

from foreshock.monitor.attention.probe import OutputSums

BROKEN_AT = 20
"""A sampled step; the step ten before it was sampled too."""


def block_of(model: Model, number: int) -> Block:
    block = model.blocks[number]
    assert isinstance(block, Block)
    return block


def warning_text(outcome: Outcome) -> str:
    """The text of the only warning of the run."""
    assert [verdict.layer for verdict in outcome.raised] == [None], [verdict.sentence for verdict in outcome.raised]
    return outcome.raised[0].sentence


@pytest.mark.parametrize("as_numbers", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize(("clip", "location_known"), [(None, True), (1.0, False)])
def test_nan_in_attention_backward_is_reported_before_the_loss_is_nan(
    as_numbers: bool, attention: str, clip: float | None, location_known: bool
) -> None:
    """TRL issue 7181: the attention backward of one layer returns NaN for the queries."""
    outcome = train(
        before=broken_backward(2, "attn.q_proj", once(BROKEN_AT)), as_numbers=as_numbers, attention=attention, clip=clip
    )
    assert outcome.raised[0].step == BROKEN_AT < outcome.failure_step
    text = warning_text(outcome)
    assert "first in the backward, between layer 1 and layer 2. 8 of 16 heads have such rows." in text
    assert ("blocks.2.attn.q_proj" in text) == location_known  # clipping by a NaN norm makes every gradient NaN
    assert outcome.first_text.count(f"a checkpoint before step {BROKEN_AT}") == 1
    assert outcome.raised[0].severity == "critical"


def test_positive_infinity_in_a_mask_is_reported_as_a_possible_origin() -> None:
    """A mask with the wrong sign in one layer, and in all layers."""

    def break_step(model: Model, step: int) -> Any:
        def hide(_: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return inputs[0], inputs[1].masked_fill(inputs[1] < 0, math.inf)

        return [block_of(model, 2).attn.register_forward_pre_hook(hide)] if step == BROKEN_AT else []

    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(hidden, -math.inf)
    text = warning_text(train(BROKEN_AT + 1, before=break_step, mask=mask))
    assert "between the attention of layer 1 and the inputs of layer 2, or in its mask." in text
    assert "the weights, the mask, or the batch" in warning_text(train(2, mask=-mask))


def test_skipped_updates_raise_a_warning_with_their_share() -> None:
    """Time-MoE issue 71: the gradient norm is NaN in some steps, the loss is fine."""

    outcome = train(120, before=broken_backward(3, "down", since(3, 3)), skip_broken=True)
    text = warning_text(outcome)
    lost, steps = map(int, re.findall(r"(\d+) of (\d+) updates were lost", text)[0])
    assert lost / steps == pytest.approx(1 / 3, abs=0.05)
    assert "first in the backward, after the attention of layer 3" in text
    assert "blocks.3.down" in text
    assert "Weights are finite." in text
    assert not re.search("risk|go back|stop", text, re.IGNORECASE)
    assert outcome.raised[0].severity == "warning"


@pytest.mark.parametrize(
    "later_overflows", [(45, 58, 66), *(pytest.param((n,), marks=pytest.mark.full) for n in (58, 90))]
)
def test_occasional_loss_scaler_overflows_raise_no_warning(later_overflows: tuple[int, ...]) -> None:
    def break_step(model: Model, step: int) -> Any:
        return [poison(model.head, math.inf)] if step <= 12 or step in later_overflows else []

    assert not train(150, before=break_step, skip_broken=True).raised


@pytest.mark.parametrize(
    ("compiled", "part", "place"),
    [
        (False, "embed", "at or before the attention of layer 0"),
        (False, "blocks.1.up", "between the attention of layer 1 and that of layer 2"),
        pytest.param(
            *(True, "blocks.1.up", "between the attention of layer 1 and that of layer 2"), marks=pytest.mark.full
        ),
        (False, "head", "after the attention of layer 3: in the loss, the output head or the last block"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # from torch.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor imports TorchScript
def test_nan_in_an_unsampled_step_is_located_by_attention_outputs(compiled: bool, part: str, place: str) -> None:
    def break_step(model: Model, step: int) -> Any:
        module = model.get_submodule(part)
        return [module.register_forward_hook(lambda _, __, out: out * math.nan)] if step == BROKEN_AT + 4 else []

    text = warning_text(train(BROKEN_AT + 6, before=break_step, compiled=compiled))
    assert f"since step {BROKEN_AT + 4}, first in the forward, {place}" in text


def test_output_sums_report_outputs_first_nonfinite_at_a_recent_step() -> None:
    states = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    outputs = OutputSums(states)
    finite = torch.ones(2, 3, 4)

    def step(number: int, *outputs_of_step: torch.Tensor) -> list[tuple[int, bool]]:
        for state, out in zip(states, outputs_of_step, strict=False):
            outputs.add(state, out)
            outputs.add(state, finite)
        outputs.end(number)
        return outputs.broken_at(number)

    assert step(1, finite, finite) == [(0, False), (1, False)]
    assert step(5, finite, finite.clone().index_fill_(1, torch.tensor([2]), math.nan)) == [(0, False), (1, True)]
    assert step(6, finite, finite * math.inf) == [(0, False)]
    assert outputs.broken_at(5) == [(0, False), (1, True)]
    assert not outputs.broken_at(4)
    for number in range(7, 1040):
        assert step(number, finite) == [(0, False)]
    assert not outputs.broken_at(5)


class TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stores a weak reference to each tensor that an operator creates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "out" not in (kwargs or {}):
            self.tensors.append(weakref.ref(result))
        return result


def test_output_sums_retain_no_tensor_created_in_a_step() -> None:
    # CUDA graphs allow no extra tensor in their pool. torch.compile(mode="reduce-overhead") would raise
    # "Detected 1 tensor(s) in the cudagraph pool not tracked as outputs".
    states = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    outputs, out = OutputSums(states), torch.ones(2, 3, 4)
    for number in range(3):  # more calls than the initial capacity
        with TensorTracker() as tracker:
            for _ in range(20):
                outputs.add(states[1], out)
            outputs.add(states[0], out * math.nan)
        assert tracker.tensors
        assert all(tensor() is None for tensor in tracker.tensors)
        outputs.end(number)
    assert outputs.broken_at(2) == [(1, False)]  # output 0 was already non-finite before


def test_rows_without_keys_are_the_first_suspect_for_nan() -> None:
    text = warning_text(train(before=broken_backward(0, "attn.q_proj", once(BROKEN_AT)), mask=padded(4, left=True)))
    assert "12 of 72 rows of a head see no key: suspect the mask first." in text


@pytest.mark.parametrize("as_numbers", [True, False])
@pytest.mark.parametrize(
    ("make", "optimizer", "expected"),
    [
        (NewTokens, lambda p: torch.optim.SGD(p, lr=1e-2), "1 of 69 weights is not finite: .* of embed.weight"),
        (Model, lambda p: torch.optim.SGD(p, lr=torch.tensor(math.nan)), "The optimizer's learning rate is nan."),
    ],
)
def test_nonfinite_weights_or_learning_rate_are_reported_in_the_first_step(
    make: Any, optimizer: Any, expected: str, as_numbers: bool
) -> None:
    outcome = train(10, make=make, optimizer=optimizer, as_numbers=as_numbers)
    assert outcome.raised[0].step == 1 < outcome.failure_step
    assert "since step 1, first in the update of this step, or in the weights that were loaded" in warning_text(outcome)
    assert re.search(expected, warning_text(outcome))
    assert "start the run again" in outcome.first_text


class RepairedAttention(HandwrittenAttention):
    """Attention that replaces the NaN of rows without keys by 0."""

    repairs = True


@pytest.mark.parametrize(("kind", "harmless"), [(HandwrittenAttention, False), (RepairedAttention, True)])
def test_rows_without_keys_are_reported_for_handwritten_attention(kind: type[Attention], harmless: bool) -> None:
    outcome = train(
        BROKEN_AT + 1,
        make=replaced("blocks.1.attn", lambda _: kind()),
        mask=padded(4, left=True),
        before=broken_backward(3, "down", once(BROKEN_AT)),
    )
    assert "it computes its attention by hand, and 12 of 72 rows of a head see no key" in outcome.table
    place = "in the softmax of blocks.1.attn, where 12 of 72 rows of a head see no key, or hold a score that overflows"
    assert (place in warning_text(outcome)) == (not harmless)
    assert outcome.raised[0].step == (BROKEN_AT if harmless else 1)
