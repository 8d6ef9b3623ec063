"""xformers itself, on a GPU: its attention is kept to the last bit and measured. What stands in for it is tested
elsewhere (test_libraries.py)."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

THERE = torch.cuda.is_available() and importlib.util.find_spec("xformers") is not None
with warnings.catch_warnings():  # of its own import
    warnings.simplefilter("ignore")
    xops: Any = importlib.import_module("xformers.ops") if THERE else None
    THERE = THERE and importlib.import_module("xformers")._has_cpp_library
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not THERE, reason="needs a CUDA GPU and an xformers that was built for this PyTorch"),
]

ROWS, LENGTH, HEADS, DIM = 2, 96, 2, 64


def biases() -> dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], Tensor]]]:
    """By name: how xformers is asked, and which keys j a query i sees then."""
    attn_bias = importlib.import_module("xformers.ops.fmha.attn_bias")
    return {
        "every key": (lambda: None, lambda i, j: j >= 0),
        "causal": (attn_bias.LowerTriangularMask, lambda i, j: j <= i),
        "causal window": (
            lambda: attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(16),
            lambda i, j: (j <= i) & (j > i - 16),
        ),
        "window": (
            lambda: attn_bias.LocalAttentionFromBottomRightMask(window_left=7, window_right=5),
            lambda i, j: (j >= i - 7) & (j <= i + 5),
        ),
    }


class Attends(nn.Module):
    """Hands queries, keys and values [B, S, H, D] to xformers, and keeps what it gave."""

    def __init__(self, bias: Callable[[], Any]) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = HEADS, nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, 8)
        self.bias, self.seen = bias, (torch.empty(0), torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        self.seen = query.detach(), key.detach()
        out: Tensor = xops.memory_efficient_attention(query, key, value, self.bias())
        projected: Tensor = self.proj(out.flatten(2))
        return projected


def trained(bias: Callable[[], Any], *, watched: bool) -> tuple[list[Tensor], nn.Module, Listener]:
    """Outputs and gradients of one step, the model and what an agent heard."""
    torch.manual_seed(0)
    model = nn.Sequential(Attends(bias)).to("cuda", torch.bfloat16)
    x = torch.randn(ROWS, LENGTH, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    listener = Listener()

    def step() -> list[Tensor]:
        out: Tensor = model(x)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        return [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]

    if not watched:
        return step(), model, listener
    with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 10**6}) as agent:
        agent.subscribe(listener)
        kept = step()
        agent.step()
    return kept, model, listener


@pytest.mark.parametrize("name", ["every key", "causal", "causal window", "window"])
def test_xformers_is_kept_to_the_last_bit_and_every_row_of_it_is_measured(name: str) -> None:
    bias, sees = biases()[name]
    without, _, _ = trained(bias, watched=False)
    got, model, listener = trained(bias, watched=True)
    for mine, own in zip(got, without, strict=True):
        assert torch.equal(mine, own)
    words = next(each for sample in listener.of(wire.Sample) if (each := sample.words()) is not None)
    assert slot_values(words, Slot.ROWS).tolist() == [ROWS * LENGTH] * HEADS
    attends: Any = model[0]  # type: ignore[index]
    query, key = (each.double().transpose(1, 2) for each in attends.seen)
    at = torch.arange(LENGTH, device="cuda")
    scores = (query @ key.mT / DIM**0.5).masked_fill(~sees(at[:, None], at), -torch.inf)
    largest = scores.amax((0, 2, 3)).cpu()
    assert slot_values(words, Slot.SCORE_MAX).tolist() == pytest.approx(largest.tolist(), rel=1e-4)
    count = sees(at[:, None], at).sum(1)
    offset = (scores.logsumexp(-1) - count.log()).sum((0, 2)).cpu()
    assert slot_values(words, Slot.SCORE_OFFSET_SUM).tolist() == pytest.approx(offset.tolist(), rel=1e-3)
