"""NaN as people meet it: the first words about it name the place, its extent, and what it harms. Injected failures."""

import math
import re
import weakref
from typing import Any

import pytest
import torch
from tests.reports.settings import ByHand, NewTokens, broken_backward, once, padded, replaced, since
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
"""A step whose rows are measured: the tenth before it was sampled."""


def block_of(model: Model, number: int) -> Block:
    block = model.blocks[number]
    assert isinstance(block, Block)
    return block


def first_words(found: Outcome) -> str:
    """The one warning of the run."""
    assert [verdict.layer for verdict in found.raised] == [None], [verdict.sentence for verdict in found.raised]
    return found.raised[0].sentence


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize(("clip", "bounded"), [(None, True), (1.0, False)])
def test_a_faulty_attention_backward_is_reported_before_the_loss(
    known: bool, attention: str, clip: float | None, bounded: bool
) -> None:
    """TRL issue 7181: the backward of one layer's attention gives NaN for the queries."""
    found = train(
        before=broken_backward(2, "attn.q_proj", once(BROKEN_AT)), known=known, attention=attention, clip=clip
    )
    assert found.raised[0].step == BROKEN_AT < found.harmed
    said = first_words(found)
    assert "first in the backward, between layer 1 and layer 2. 8 of 16 heads have such rows." in said
    assert ("blocks.2.attn.q_proj" in said) == bounded  # clipping by a NaN norm makes every gradient NaN
    assert found.told.count(f"a checkpoint before step {BROKEN_AT}") == 1
    assert found.raised[0].severity == "critical"


def test_a_mask_of_plus_infinity_is_among_the_places() -> None:
    """A mask of the wrong sign in one layer of several, and a mask that all layers are given."""

    def broken(model: Model, step: int) -> Any:
        def hide(_: Any, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return given[0], given[1].masked_fill(given[1] < 0, math.inf)

        return [block_of(model, 2).attn.register_forward_pre_hook(hide)] if step == BROKEN_AT else []

    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(hidden, -math.inf)
    said = first_words(train(BROKEN_AT + 1, before=broken, mask=mask))
    assert "between the attention of layer 1 and the inputs of layer 2, or in its mask." in said
    assert "the weights, the mask, or the batch" in first_words(train(2, mask=-mask))


def test_skipped_updates_are_a_warning_with_their_share_and_no_alarm() -> None:
    """Time-MoE issue 71: the gradient norm is NaN in some steps, the loss is fine."""

    found = train(120, before=broken_backward(3, "down", since(3, 3)), skip_broken=True)
    said = first_words(found)
    lost, steps = map(int, re.findall(r"(\d+) of (\d+) updates were lost", said)[0])
    assert lost / steps == pytest.approx(1 / 3, abs=0.05)
    assert "first in the backward, after the attention of layer 3" in said
    assert "blocks.3.down" in said
    assert "Weights are finite." in said
    assert not re.search("risk|go back|stop", said, re.IGNORECASE)
    assert found.raised[0].severity == "warning"


@pytest.mark.parametrize("again", [(45, 58, 66), *(pytest.param((n,), marks=pytest.mark.full) for n in (58, 90))])
def test_a_loss_scaler_that_finds_its_scale_is_no_finding(again: tuple[int, ...]) -> None:
    def broken(model: Model, step: int) -> Any:
        return [poison(model.head, math.inf)] if step <= 12 or step in again else []

    assert not train(150, before=broken, skip_broken=True).raised


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
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor imports TorchScript
def test_a_forward_that_breaks_in_a_step_without_rows_is_placed_by_the_outputs(
    compiled: bool, part: str, place: str
) -> None:
    def broken(model: Model, step: int) -> Any:
        one = model.get_submodule(part)
        return [one.register_forward_hook(lambda _, __, out: out * math.nan)] if step == BROKEN_AT + 4 else []

    said = first_words(train(BROKEN_AT + 6, before=broken, compiled=compiled))
    assert f"since step {BROKEN_AT + 4}, first in the forward, {place}" in said


def test_an_output_shows_a_step_if_it_broke_in_any_call_of_it_and_not_before() -> None:
    states = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    outputs = OutputSums(states)
    sound = torch.ones(2, 3, 4)

    def step(number: int, *given: torch.Tensor) -> list[tuple[int, bool]]:
        for state, out in zip(states, given, strict=False):
            outputs.add(state, out)
            outputs.add(state, sound)
        outputs.end(number)
        return outputs.broken_at(number)

    assert step(1, sound, sound) == [(0, False), (1, False)]
    assert step(5, sound, sound.clone().index_fill_(1, torch.tensor([2]), math.nan)) == [(0, False), (1, True)]
    assert step(6, sound, sound * math.inf) == [(0, False)]
    assert outputs.broken_at(5) == [(0, False), (1, True)]
    assert not outputs.broken_at(4)
    for number in range(7, 1040):
        assert step(number, sound) == [(0, False)]
    assert not outputs.broken_at(5)


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refers weakly to each tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and "out" not in (kwargs or {}):
            self.tensors.append(weakref.ref(made))
        return made


def test_of_what_a_step_makes_outputs_keep_nothing_for_a_cuda_graph_pool_permits_none() -> None:
    # "Detected 1 tensor(s) in the cudagraph pool not tracked as outputs", by torch.compile(mode="reduce-overhead").
    states = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    outputs, out = OutputSums(states), torch.ones(2, 3, 4)
    for number in range(3):  # more calls than there is room for at first
        with Made() as made:
            for _ in range(20):
                outputs.add(states[1], out)
            outputs.add(states[0], out * math.nan)
        assert made.tensors
        assert all(tensor() is None for tensor in made.tensors)
        outputs.end(number)
    assert outputs.broken_at(2) == [(1, False)]  # the other broke before as well


def test_rows_that_see_no_key_are_the_first_suspect_once_nan_appears() -> None:
    said = first_words(train(before=broken_backward(0, "attn.q_proj", once(BROKEN_AT)), mask=padded(4, left=True)))
    assert "12 of 72 rows of a head see no key: suspect the mask first." in said


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("make", "optimizer", "named"),
    [
        (NewTokens, lambda p: torch.optim.SGD(p, lr=1e-2), "1 of 69 weights is not finite: .* of embed.weight"),
        (Model, lambda p: torch.optim.SGD(p, lr=torch.tensor(math.nan)), "The optimizer's learning rate is nan."),
    ],
)
def test_weights_that_break_without_a_broken_loss_are_reported_in_the_first_step(
    make: Any, optimizer: Any, named: str, known: bool
) -> None:
    found = train(10, make=make, optimizer=optimizer, known=known)
    assert found.raised[0].step == 1 < found.harmed
    assert "since step 1, first in the update of this step, or in the weights that were loaded" in first_words(found)
    assert re.search(named, first_words(found))
    assert "start the run again" in found.told


class Repaired(ByHand):
    """The NaN of rows that see no key is replaced by 0."""

    repairs = True


@pytest.mark.parametrize(("kind", "harmless"), [(ByHand, False), (Repaired, True)])
def test_rows_that_see_no_key_are_named_where_attention_is_written_out(kind: type[Attention], harmless: bool) -> None:
    found = train(
        BROKEN_AT + 1,
        make=replaced("blocks.1.attn", lambda _: kind()),
        mask=padded(4, left=True),
        before=broken_backward(3, "down", once(BROKEN_AT)),
    )
    assert "it computes its attention by hand, and 12 of 72 rows of a head see no key" in found.table
    place = "in the softmax of blocks.1.attn, where 12 of 72 rows of a head see no key, or hold a score that overflows"
    assert (place in first_words(found)) == (not harmless)
    assert found.raised[0].step == (BROKEN_AT if harmless else 1)
