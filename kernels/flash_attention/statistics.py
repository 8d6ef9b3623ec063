"""The statistics of a head: what is asked of every row, and how it is added to the state.

A row is one query position of one batch entry. Scores are what enters the softmax: scaled, soft-capped, and rounded
where the numerics round them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SLOT_COUNT, SUM_SLOTS, identity_row

PAPER_TOLERANCE = 1e-3
"""Scores this near the row's maximum are ties to the paper's rule (its epsilon, section 4)."""

_COUNTS, _MAXIMA, _SUMS = (slice(slots[0], slots[-1] + 1) for slots in (COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS))


def new_state(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """The state of heads that have seen nothing, int64 [heads, SLOT_COUNT]."""
    return torch.from_numpy(identity_row()).to(device).expand(heads, SLOT_COUNT).clone()


def bf16_tie_threshold(row_max: Tensor) -> Tensor:
    """The least score that rounds to the same bf16 as its row's maximum does, in row_max's dtype.

    Rounding never changes an order, so `scores >= threshold` is where the rounded score is the rounded maximum. It lies
    half a bf16 step below the rounded maximum, and belongs to it when that maximum's last bit is even.
    """
    rounded = row_max.to(torch.bfloat16).to(torch.float32)
    bits = torch.where(rounded == 0, -0.0, rounded).view(torch.int32)
    negative = bits < 0  # sign and magnitude: below a negative number the magnitude grows
    middle = torch.where(negative, bits + 0x8000, bits - 0x8000).view(torch.float32).to(row_max.dtype)
    odd = (bits >> 16) & 1 == 1
    return torch.where(odd, torch.nextafter(middle, middle.new_tensor(math.inf)), middle)


def one_tie_threshold(row_max: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """The least score whose exp(score - row_max) rounds to 1 in `operand_dtype`, in row_max's dtype.

    That is exp(score - row_max) >= 1 - eps / 4: half a step below 1, where the step is eps / 2; 1 is even.
    """
    return _above(row_max, math.log1p(-torch.finfo(operand_dtype).eps / 4))


def paper_tie_threshold(row_max: Tensor) -> Tensor:
    """The least score that the paper's rule takes for a maximum: row_max - 1e-3 (paper, section 4)."""
    return _above(row_max, -PAPER_TOLERANCE)


def several_at_least(scores: Tensor, threshold: Tensor, scratch: Tensor) -> Tensor:
    """Rows with more than one score at or above their threshold, bool [B, H, Sq, 1]. Overwrites `scratch`."""
    return torch.ge(scores, threshold, out=scratch).sum(-1, keepdim=True) > 1


def _above(row_max: Tensor, offset: float) -> Tensor:
    """row_max + offset, rounded up: no score between the exact sum and the next number is left out or taken in."""
    exact = row_max.to(torch.float64) + offset
    near = exact.to(row_max.dtype)
    return torch.where(near.to(torch.float64) < exact, torch.nextafter(near, near.new_tensor(math.inf)), near)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the backward knows of every row; all [B, H, Sq]."""

    row_max: Tensor
    lse: Tensor
    tied_bf16: Tensor
    tied_one: Tensor
    shifted: Tensor
    visible_keys: Tensor
    """Number of keys the row sees, broadcastable."""
    delta: Tensor
    """delta_hp = rowsum(dO * (O_hi + O_residual))."""
    delta_bias: Tensor
    """delta_lp - delta_hp = -rowsum(dO * O_residual)."""


def accumulate(state: Tensor, rows: Rows) -> None:
    """Add the statistics of `rows` to `state`, int64 [H, SLOT_COUNT]. No host synchronisation; deterministic."""
    shape = rows.row_max.shape
    empty = (rows.visible_keys == 0).expand(shape)
    finite = torch.isfinite(rows.row_max) & torch.isfinite(rows.lse)
    finite = finite & torch.isfinite(rows.delta) & torch.isfinite(rows.delta_bias)
    counted = finite & ~empty
    nonfinite = ~(finite | empty)
    counts = torch.stack([counted, rows.tied_bf16, rows.tied_one, rows.shifted, empty, nonfinite])
    counts[1:4] &= counted
    state[:, _COUNTS] += counts.sum((1, 3)).T

    floats = state.view(torch.float64)
    maxima = torch.stack([rows.row_max, rows.row_max.abs()]).masked_fill_(~counted, -math.inf)
    if maxima.numel():
        largest = maxima.amax((1, 3)).to(torch.float64).T
        floats[:, _MAXIMA] = torch.maximum(floats[:, _MAXIMA], largest)

    values = torch.stack([rows.lse, rows.delta_bias]).to(torch.float64)
    values[0] -= rows.visible_keys.to(torch.float64).log()
    values.masked_fill_(~counted, 0.0)
    offset, bias = values.sum((1, 3))
    squares = values.square().sum((1, 3))
    floats[:, _SUMS] += torch.stack([offset, squares[0], bias, values[1].abs().sum((0, 2)), squares[1]], -1)
