"""Lengths that change from step to step under torch.compile: nothing differs, and each row counts once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP, operator_alone
from tests.monitor.test_foreign_models import DECODER, tiny
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

LENGTHS = (12, 9, 11, 7)

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _the_compiler_starts_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def course(model: nn.Module, agent: Any = None) -> tuple[list[Tensor], int]:
    """The loss of each step and the weights after them, and how many graphs were made."""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    running: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, length in enumerate(LENGTHS):
        out = running(batch(step)[:, :length])
        loss = next_token_loss(getattr(out, "logits", out), batch(step)[:, :length])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
        if agent is not None:
            agent.step(loss)
    return [*losses, *(p.detach() for p in model.parameters())], graphs


def tiny_llama() -> nn.Module:
    return tiny("Llama", **DECODER).train()


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (tiny_gpt, "keep"),
        pytest.param(tiny_gpt, "kernels", marks=pytest.mark.full),
        pytest.param(tiny_llama, "keep", marks=pytest.mark.full),
    ],
)
def test_a_graph_serves_several_lengths_and_counts_each_row_once(make: Any, attention: Any) -> None:
    if attention == "kernels":
        with operator_alone():
            expected, without_us = course(make())
    else:
        expected, without_us = course(make())
    torch._dynamo.reset()
    model, listener = make(), Listener()
    with attach(model, **{**EVERY_STEP, "attention": attention, "probe_rows": 10**6}) as agent:
        agent.subscribe(listener)
        got, graphs = course(model, agent)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert graphs == without_us < len(LENGTHS)
    counted = []
    for sample in listener.of(wire.Sample):
        words = sample.words()
        assert words is not None
        counted.append(set(slot_values(words, Slot.ROWS).tolist()))
    assert counted == [{2 * length} for length in LENGTHS]
