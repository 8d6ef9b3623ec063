"""What stands in attention's place: exact counts, the same weights as without it, calls that it keeps to PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import (
    AttentionWithMask,
    CausalSelfAttention,
    GroupedQueryAttention,
    tiny_gpt,
    train_step,
)
from tests.monitor.watching import rows_of, watch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import watched_layer


def test_statistics_equal_brute_force_on_the_tensors_that_were_received(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[Tensor, Tensor]] = []

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        received.append((query.detach().clone(), key.detach().clone()))
        return flash_attention(query, key, value, **options)

    monkeypatch.setattr(watched_layer, "flash_attention", record)
    _, listener = watch(tiny_gpt(), steps=1, numerics="kernel")
    words = listener.of(wire.Sample)[0].words()
    for layer, (query, key) in enumerate(received):
        for head in range(2):
            counted = words[2 * layer + head]
            scores = [
                [float(q @ k) * query.shape[-1] ** -0.5 for k in key[b, head].bfloat16().double()[: i + 1]]
                for b in range(query.shape[0])
                for i, q in enumerate(query[b, head].bfloat16().double())
            ]
            offsets = [float(np.logaddexp.reduce(row) - np.log(len(row))) for row in scores]
            assert counted[Slot.ROWS] == len(scores)
            assert slot_values(counted, Slot.SCORE_MAX) == pytest.approx(max(map(max, scores)), rel=1e-5)
            assert slot_values(counted, Slot.ROW_MAX_ABS) == pytest.approx(max(abs(max(r)) for r in scores), rel=1e-5)
            assert slot_values(counted, Slot.SCORE_OFFSET_SUM) == pytest.approx(sum(offsets), abs=1e-4)
            assert slot_values(counted, Slot.SCORE_OFFSET_SUMSQ) == pytest.approx(sum(o * o for o in offsets), rel=1e-4)


class AttentionWithOurOperator(CausalSelfAttention):
    """Calls the same operator directly, with no agent."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal="top_left", numerics="kernel")
        assert isinstance(out, Tensor)
        return out


@pytest.mark.promise("A14")
def test_loss_and_weights_are_equal_bit_for_bit_with_and_without_the_agent() -> None:
    def train(model: nn.Module, agent: Agent | None) -> tuple[list[Tensor], list[Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            losses.append(train_step(model, optimizer, step).detach())
            if agent is not None:
                agent.step(losses[-1])
        return losses, list(model.parameters())

    torch.manual_seed(1)
    alone = tiny_gpt(AttentionWithOurOperator(16, 2), AttentionWithOurOperator(16, 2))
    torch.manual_seed(1)
    watched = tiny_gpt(CausalSelfAttention(16, 2), CausalSelfAttention(16, 2))
    agent = attach(watched, **EVERY_STEP, numerics="kernel")
    expected, got = train(alone, None), train(watched, agent)
    agent.close()
    for a, b in zip(expected[0] + expected[1], got[0] + got[1], strict=True):
        assert torch.equal(a, b)


def test_grouped_queries_are_watched_per_query_head() -> None:
    agent, listener = watch(tiny_gpt(GroupedQueryAttention(16, 4, 2)), steps=1)
    assert rows_of(listener) == [24] * 4
    assert listener.of(wire.Started)[0].layers[0].kv_heads == 2
    assert "separate (wq, wk)" in agent.report()


def test_evaluation_counts_nothing_and_accumulated_micro_batches_add_up() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    listener = Listener()
    agent.subscribe(listener)
    with torch.no_grad():
        model(tiny_models.batch(0))
    for step in range(2):
        ids = tiny_models.batch(step)
        torch.autograd.backward(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
    agent.step()
    agent.close()
    assert rows_of(listener) == [2 * 24] * 4


class AttentionThroughAHelper(CausalSelfAttention):
    """Calls PyTorch's attention two functions away from its forward."""

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).split(x.shape[2], dim=2))
        out: Tensor = self.c_proj(tiny_attention(*heads).transpose(1, 2).flatten(2))
        return out


def tiny_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tiny_attention_of(query, key, value, causal=True)


def tiny_attention_of(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("attention", ["keep", pytest.param("kernels", marks=pytest.mark.full)])
def test_attention_through_a_helper_counts_every_row_under_torch_compile(attention: Any) -> None:
    model = tiny_gpt(AttentionThroughAHelper(16, 2))
    agent = attach(model, **{**EVERY_STEP, "attention": attention, "probe_rows": 10**6})
    agent.subscribe(listener := Listener())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        agent.step(train_step(compiled, optimizer, step))
    agent.close()
    torch._dynamo.reset()
    expected = watch(tiny_gpt(CausalSelfAttention(16, 2)), attention="kernels")[1]
    assert rows_of(listener) == rows_of(expected)
    assert min(rows_of(listener)) > 0


def test_a_call_with_a_mask_keeps_pytorchs_attention_and_is_measured() -> None:
    torch.manual_seed(5)
    masked = tiny_gpt(AttentionWithMask(16, 2), CausalSelfAttention(16, 2))
    agent, listener = watch(masked, steps=3, probe_rows=7)
    assert rows_of(listener) == [21, 21, 72, 72]
    assert "blocks.0" in agent.report()


@pytest.mark.parametrize("head_dim", [12, 264])
def test_a_head_dim_that_no_kernel_serves_is_named_and_its_layer_is_kept(head_dim: int) -> None:
    """ "meta" stands in for the accelerator."""
    query = torch.empty(1, 2, 4, head_dim, device="meta", dtype=torch.bfloat16)
    layer = watched_layer.WatchedLayer(
        "h.0",
        torch.empty(2, SLOT_COUNT, dtype=torch.int64, device="meta"),
        torch.empty(2, dtype=torch.int32, device="meta"),
        "auto",
    )
    expected = f"its head dim is {head_dim}; the kernels support multiples of 8 up to 256"
    assert layer.problem(query, query, query) == expected
    attach(tiny_gpt(CausalSelfAttention(2 * head_dim, 2)), **EVERY_STEP).close()  # the reference serves any
