"""Helpers for probes: operands whose scores have an offset, the state after backwards, and reference statistics."""

import math
from typing import Any

import numpy as np
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
    """query, key, value and the gradient of the output. `offset` shifts the scores so that rounding ties rows."""
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
    """The counters after `times` backwards through a probe of `out`."""
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
SAMPLED_ROW_SLOTS = (Slot.ENTROPY_ROWS, Slot.CHECKED_ROWS, Slot.WRONG_ROWS)
"""Slots that only sampled rows have; the kernels do not count them."""


def visible(queries: int, keys: int, causal: str = "none", window: tuple[int, int] = (-1, -1)) -> Tensor:
    """Visibility of each key for each row, [Sq, Sk]."""
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (0 if causal == "top_left" else keys - queries)
    seen = ahead <= (0 if causal != "none" else keys)
    left, right = window
    return seen & (ahead >= -left if left >= 0 else seen) & (ahead <= right if right >= 0 else seen)


def scores_of(query: Tensor, key: Tensor, seen: Tensor, *, scale: float | None = None, softcap: float = 0.0) -> Tensor:
    """Scores [B, H, Sq, Sk] in float64; -inf for hidden keys."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    return (softcap * (scores / softcap).tanh() if softcap else scores).masked_fill(~seen, -math.inf)


def reference_statistics(scores: Tensor) -> dict[Slot, Tensor]:
    """Expected statistics of each head with these scores."""
    seen = scores > -math.inf
    some = seen.any(-1)
    shares = scores.softmax(-1).masked_fill(~seen, 0.0)
    offset = torch.where(some, scores.logsumexp(-1) - seen.sum(-1).double().log(), 0.0)
    row_max = scores.amax(-1)
    tied = (scores.bfloat16() == row_max.bfloat16().unsqueeze(-1)).sum(-1) > 1
    return {
        Slot.ROWS: some.sum((0, 2)),
        Slot.EMPTY_ROWS: (~some).sum((0, 2)),
        Slot.TIED_ROWS_BF16: (tied & some).sum((0, 2)),
        Slot.SCORE_MAX: row_max.amax((0, 2)),
        Slot.ROW_MAX_ABS: row_max.abs().masked_fill(~some, -math.inf).amax((0, 2)),
        Slot.SCORE_OFFSET_SUM: offset.sum((0, 2)),
        Slot.SCORE_OFFSET_SUMSQ: offset.square().sum((0, 2)),
        Slot.ENTROPY_ROWS: some.sum((0, 2)),
        Slot.ENTROPY_SUM: torch.special.entr(shares).sum((0, 2, 3)),
    }


def assert_counts(words: Words, expected: dict[Slot, Tensor], tolerance: float, *slots: Slot) -> None:
    """Compares the given slots, or all expected ones."""
    for slot in slots or expected:
        got = slot_values(words, slot)
        np.testing.assert_allclose(got, expected[slot], rtol=tolerance, atol=tolerance, err_msg=slot.name)


def counted_rows(listener: Listener) -> list[list[int]]:
    """Rows per head, for each sample."""
    return [slot_values(sample.words(), Slot.ROWS).astype(int).tolist() for sample in listener.of(wire.Sample)]
