"""Activation checkpointing of every kind: each row is counted once, on its own layer, or an error says why not."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import CausalSelfAttention, Checkpoint, TinyGPT, tiny_gpt, train_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint as imported_by_name

from foreshock.contract import wire
from foreshock.monitor import attach

QUICK: dict[str, Any] = {
    "attention": "kernels",
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "strict": True,
    "quiet": True,
}

KINDS: dict[str, Checkpoint] = {
    "non-reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False),
    "reentrant": lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True),
    "imported by name": lambda *args: imported_by_name(*args, use_reentrant=False),
    "held in a partial, reentrant": functools.partial(imported_by_name, use_reentrant=True),
}

MARKED_PLACES = [
    pytest.param(
        place, marks=[pytest.mark.execution("nanoGPT", "checkpoint around attention")] if place != "blocks" else []
    )
    for place in ("attention alone", "blocks", "both")
]


def model(place: str = "", kind: Checkpoint | None = None) -> TinyGPT:
    """Two layers whose weights are always the same, checkpointed at `place`."""
    torch.manual_seed(3)
    inner, outer = (kind if place in (where, "both") else None for where in ("attention alone", "blocks"))
    return tiny_gpt(*(CausalSelfAttention(16, 2, checkpoint=inner) for _ in range(2)), checkpoint=outer)


def train(watched: TinyGPT, compiled: Any = None) -> tuple[list[Tensor], list[Any]]:
    """Losses and weights after two steps with the agent, and the words of each sample."""
    listener, losses = Listener(), []
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    with attach(watched, **QUICK, numerics="kernel") as agent:
        agent.subscribe(listener)
        runs = compiled(watched) if compiled is not None else watched
        for step in range(2):
            losses.append(train_step(runs, optimizer, step).detach())
            agent.step(losses[-1])
    return [*losses, *watched.parameters()], [sample.words() for sample in listener.of(wire.Sample)]


@pytest.fixture(scope="module")
def plain() -> tuple[list[Tensor], list[Any]]:
    return train(model())


def assert_same(got: tuple[list[Tensor], list[Any]], expected: tuple[list[Tensor], list[Any]]) -> None:
    for a, b in zip(got[0], expected[0], strict=True):
        assert torch.equal(a, b)
    for mine, theirs in zip(got[1], expected[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


# PyTorch itself warns of a reentrant checkpoint within a reentrant one, with or without foreshock
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", MARKED_PLACES)
def test_a_recompute_counts_once_on_its_own_layer_and_changes_no_bit(
    place: str, kind: str, plain: tuple[list[Tensor], list[Any]]
) -> None:
    assert_same(train(model(place, KINDS[kind])), plain)


@pytest.mark.full
@pytest.mark.parametrize("place", MARKED_PLACES)
def test_a_compiled_recompute_counts_once_on_its_own_layer(place: str, plain: tuple[list[Tensor], list[Any]]) -> None:
    got = train(model(place, KINDS["non-reentrant"]), lambda m: torch.compile(m, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    assert_same(got, plain)


def test_checkpointing_is_given_back_when_the_agent_leaves() -> None:
    before = dict(vars(torch.utils.checkpoint)), torch._dynamo.config.get_config_copy()
    attach(model(), **QUICK).close()
    assert (vars(torch.utils.checkpoint), torch._dynamo.config.get_config_copy()) == before


class SomebodyElses(torch.autograd.Function):
    """A checkpoint that is not PyTorch's."""

    @staticmethod
    def forward(ctx: Any, function: Any, *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            result: Tensor = function(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        torch.autograd.backward(out, gradients)
        return None, *(t.grad for t in inputs)


def test_a_recompute_whose_layer_is_not_known_trains_on_and_is_named(
    caplog: pytest.LogCaptureFixture, plain: tuple[list[Tensor], list[Any]]
) -> None:
    trained = train(model("attention alone", SomebodyElses.apply))[0]
    for ours, theirs in zip(trained, plain[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-8)  # O is rounded to bf16 in one of the passes alone
    named = [each for each in caplog.messages if "attention is recomputed in a backward" in each]
    assert len(named) == 1


def test_somebody_elses_checkpoint_round_whole_blocks_works(plain: tuple[list[Tensor], list[Any]]) -> None:
    assert_same(train(model("blocks", SomebodyElses.apply)), plain)
