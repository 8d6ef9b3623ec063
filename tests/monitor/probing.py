"""What probes are tried on: operands whose scores drift, and the state after some backwards through a probe."""

from typing import Any

import torch
from tests.monitor.doubles import Listener
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words, slot_values
from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.attention.probe import Sampling, new_ticks, probe, start_sampling, stop_sampling


def tensors(
    dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, length: int = 24, offset: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and the output's gradient; scores drift by `offset`, so that rows tie once rounded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randn(3, length, count, 16, generator=generator).transpose(1, 2)

    query, key, value, grad = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    query, key = query.round(decimals=0) + offset, key.round(decimals=0) + offset
    return tuple(x.to(dtype) for x in (query, key, value, grad))  # type: ignore[return-value]


def probed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    sampling: Sampling,
    times: int = 1,
    **options: Any,
) -> Words:
    """The state after `times` backwards through a probe of `out`, as the words travel."""
    state, tick, number = new_state(query.shape[1]), new_ticks(1, query.device)[0], start_sampling(sampling)
    try:
        leaf = out.detach().requires_grad_()
        for _ in range(times):
            watched = probe(leaf, query, key, value, state, tick, number, **options)
            assert torch.equal(watched.nan_to_num(), out.nan_to_num())
            (given,) = torch.autograd.grad(watched, leaf, grad)
            assert given is grad or torch.equal(given, grad)
    finally:
        stop_sampling(number)
    return state.numpy()


EVERY_ROW = 10**6
OF_SAMPLED_ROWS = (Slot.ENTROPY_ROWS, Slot.CHECKED_ROWS, Slot.WRONG_ROWS)
"""Counted where rows are sampled, and not by our own kernels."""


def counted_rows(listener: Listener) -> list[list[int]]:
    """Rows counted per head, sample by sample."""
    return [slot_values(sample.words(), Slot.ROWS).astype(int).tolist() for sample in listener.of(wire.Sample)]
