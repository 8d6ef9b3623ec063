"""nn.MultiheadAttention that is told which keys are padding: one graph when compiled, and the same results."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Reader(nn.Module):
    """Reads a source of other widths than its own, of which some tokens are padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(18, 3, kdim=11, vdim=7, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor, source: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.cross(x, source[..., :11], source[..., 11:], key_padding_mask=padding, need_weights=False)[0]
        return x + out


@pytest.fixture(autouse=True)
def _graphs_are_forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model: Reader, run: Callable[..., Any], lengths: tuple[int, ...], after: Any = None) -> list[Tensor]:
    """Outputs and gradients of a step for each length of the source."""
    found = []
    for step, length in enumerate(lengths):
        torch.manual_seed(step)
        x, source = torch.randn(2, 5, 18), torch.randn(2, length, 18)
        padding = torch.arange(length).expand(2, -1) >= torch.tensor([[length], [length - 2]])
        out = run(x, source, padding)
        torch.autograd.backward(out.square().mean())
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        if after is not None:
            after(1.0)
    return found


def reader(dropout: float) -> Reader:
    torch.manual_seed(7)
    model = Reader(dropout)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    ("dropout", "dynamic", "lengths"),
    [
        (0.2, None, (9,)),
        pytest.param(0.0, None, (9, 9), marks=pytest.mark.full),
        pytest.param(0.2, True, (9, 6), marks=pytest.mark.full),
    ],
)
def test_it_is_one_graph_and_computes_what_it_computes_unwatched(
    dropout: float, dynamic: bool | None, lengths: tuple[int, ...]
) -> None:
    def compiled(model: Reader) -> Any:
        return torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    alone = reader(dropout)
    expected = trained(alone, compiled(alone), lengths)
    torch._dynamo.reset()
    model, listener = reader(dropout), Listener()
    with attach(model, **{**EVERY_STEP, "attention": "keep"}) as agent:
        agent.subscribe(listener)
        got = trained(model, compiled(model), lengths, agent.step)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(slot_values(sample.words(), Slot.ROWS).min() > 0 for sample in listener.of(wire.Sample))


def test_a_mask_of_another_shape_is_refused_in_pytorchs_words_and_its_check_is_given_back() -> None:
    check = F._check_key_padding_mask  # type: ignore[attr-defined]
    model = reader(0.0)
    words = []
    for watched in (False, True):
        agent = attach(model, **EVERY_STEP) if watched else None
        with pytest.raises((AssertionError, RuntimeError)) as refused:
            model(torch.randn(2, 5, 18), torch.randn(2, 9, 18), torch.zeros(2, 4, dtype=torch.bool))
        words.append(str(refused.value))
        if agent is not None:
            agent.close()
    assert words[0] == words[1]
    assert F._check_key_padding_mask is check  # type: ignore[attr-defined]
