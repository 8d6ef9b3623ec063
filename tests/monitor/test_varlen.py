"""Sequences packed end to end, attended by PyTorch's varlen_attn: served by our kernels, or kept and probed."""

from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.attention import interception as watching


class Packed(CausalSelfAttention):
    """Packs its sequences end to end, as torchtitan's models do; the first row holds two of them."""

    window = (-1, 0)

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, dim = query.shape
        q, k, v = (x.transpose(1, 2).reshape(batch * length, heads, dim) for x in (query, key, value))
        bounds = torch.tensor([0, 5, *range(length, batch * length + 1, length)], dtype=torch.int32)
        out: Any = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=self.window)
        served: Tensor = out.view(batch, length, heads, dim).transpose(1, 2)
        return served


class PackedByHand(Packed):
    """The same with PyTorch's operators alone."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        mask = torch.ones(query.shape[0], 1, length, length, dtype=torch.bool).tril()
        mask[0, 0, 5:, :5] = False
        scores = query @ key.mT * query.shape[-1] ** -0.5
        out: Tensor = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        return out


def own_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """PyTorch's own needs a GPU; this is the same in its operators, for causal calls."""
    assert options["window_size"] == (-1, 0)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), torch.arange(len(query)), right=True)
    seen = (sequence[:, None] == sequence).tril()
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def rows_of(sample: wire.Sample) -> list[int]:
    words = sample.words()
    assert words is not None
    return slot_values(words, Slot.ROWS).tolist()  # type: ignore[no-any-return]


def state_after(model: Any, attention: Any) -> tuple[list[Tensor], list[wire.Sample]]:
    listener = Listener()
    with attach(model, **{**EVERY_STEP, "attention": attention, "probe_rows": 10**6}) as agent:
        agent.subscribe(listener)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            agent.step(train_step(model, optimizer, step))
    return [p.detach().clone() for p in model.parameters()], listener.of(wire.Sample)


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_packed_sequences_of_pytorchs_own_function_are_watched(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_own_varlen", own_varlen)
    torch.manual_seed(2)
    expected = tiny_gpt(PackedByHand(16, 2))
    model = tiny_gpt(Packed(16, 2))
    model.load_state_dict(expected.state_dict())
    before = vars(varlen)["varlen_attn"]
    weights, samples = state_after(model, attention)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        train_step(expected, optimizer, step)
    for a, b in zip(weights, expected.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-6, rtol=1e-5)
    assert [rows_of(sample) for sample in samples] == [[24, 24]] * 2
    assert vars(varlen)["varlen_attn"] is before is varlen_attn


def test_what_is_probed_of_packed_sequences_is_what_our_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_own_varlen", own_varlen)
    counted = []
    for attention in ("keep", "kernels"):
        torch.manual_seed(4)
        counted.append(state_after(tiny_gpt(Packed(16, 2), Packed(16, 2), seed=7), attention)[1])
    for kept, served in zip(*counted, strict=True):
        for slot in (Slot.ROWS, Slot.TIED_ROWS_BF16, Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
            ours, theirs = (torch.from_numpy(slot_values(s.words(), slot).copy()) for s in (served, kept))
            torch.testing.assert_close(theirs.double(), ours.double(), rtol=1e-4, atol=1e-5)


def test_an_option_of_varlen_attn_that_is_not_known_is_left_alone_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "_own_varlen", lambda *args, block_table, **options: own_varlen(*args, **options))

    class Paged(Packed):
        def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows, heads, length, dim = query.shape
            q, k, v = (x.transpose(1, 2).reshape(rows * length, heads, dim) for x in (query, key, value))
            ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
            attend: Any = varlen.varlen_attn
            out: Any = attend(q, k, v, ends, ends, length, length, window_size=(-1, 0), block_table=ends)
            return out.view(rows, length, heads, dim).transpose(1, 2)  # type: ignore[no-any-return]

    model = tiny_gpt(Paged(16, 2))
    with attach(model, **EVERY_STEP) as agent:
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    assert "it passes block_table to varlen_attn, which is not supported" in caplog.text
