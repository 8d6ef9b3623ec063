"""The edges of the public function: dynamic shapes, omitted lengths, a second backward, evaluation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention, new_state, op


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def leaves(length: int, dim: int = 24, seed: int = 5) -> list[Tensor]:
    return [drawn(1, 2, length, dim, seed=seed + i).requires_grad_() for i in range(3)]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_graph_serves_every_length(scale: float | None) -> None:
    torch._dynamo.reset()
    state = new_state(2, "cpu")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_attention(query * 1.0, key, value, causal=True, scale=scale, state=state)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs)
    rows, compilations = 0, []
    for length in (31, 47, 20):
        inputs = leaves(length)
        plain = flash_attention(*inputs, causal=True, scale=scale)
        grads = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
        wanted = torch.autograd.grad(plain.square().sum(), inputs)
        assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))
        rows += length
        compilations.append(graphs.frame_count)
    assert state[:, Slot.ROWS].tolist() == [rows] * 2
    assert len(set(compilations)) == 1  # all of them before the second length
    torch._dynamo.reset()


def test_packed_sequences_need_not_say_how_long_the_longest_is() -> None:
    inputs = leaves(50)
    lengths = torch.tensor([0, 13, 13, 44], dtype=torch.int32)
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": "top_left"}
    told = flash_attention(*inputs, **packed, max_seqlen_q=31, max_seqlen_k=31)  # type: ignore[call-overload]
    assert torch.equal(flash_attention(*inputs, **packed), told)  # type: ignore[call-overload]


def test_a_graph_that_is_kept_counts_its_rows_once() -> None:
    inputs, state = leaves(17), new_state(2, "cpu")
    out = flash_attention(*inputs, causal=True, state=state)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    counted = state.clone()
    again = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert torch.equal(state, counted)
    assert state[:, Slot.ROWS].tolist() == [17, 17]


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_longest_sequence_told_too_short_is_refused(side: str) -> None:
    lengths = torch.tensor([0, 9, 34], dtype=torch.int32)
    told = {"max_seqlen_q": 25, "max_seqlen_k": 25} | {f"max_seqlen_{side}": 24}
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": "top_left"}
    with pytest.raises(
        ValueError, match=f"max_seqlen_{side} is 24, but the longest sequence has 25 rows; pass at least that, or"
    ):
        flash_attention(*leaves(34), **packed, **told)  # type: ignore[call-overload]


def test_a_forward_without_a_backward_keeps_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def noting(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def taking(*inputs: object) -> tuple[Tensor, ...]:
            result = forward(*inputs)
            kept.append(result[1].numel())
            return result

        return taking

    for name in ("attention_forward", "_attention_forward"):  # by PyTorch's dispatcher, and past it
        monkeypatch.setattr(op, name, noting(getattr(op, name)))
    inputs = leaves(21)
    with_one = flash_attention(*inputs, causal=True)
    with torch.no_grad():
        assert torch.equal(flash_attention(*inputs, causal=True), with_one)
    assert torch.equal(flash_attention(*(x.detach() for x in inputs), causal=True), with_one)
    flash_attention(inputs[0].detach(), inputs[1], inputs[2].detach())
    assert kept == [with_one.numel(), 0, 0, with_one.numel()]
