"""The statistics of a head: the values of each row, and how they are added to the state.

A row is one query position of one batch entry. Scores are the input of the softmax: scaled, soft-capped, and rounded
if the numerics round them. `foreshock.contract.slots` defines every statistic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.slots import SLOT_COUNT, Slot, identity_row


def _runs(slots: Sequence[Slot]) -> list[tuple[slice, slice]]:
    """Group adjacent slots: (slice of a state, slice of `slots`). Each group is one operation on the device."""
    runs: list[tuple[slice, slice]] = []
    for place, slot in enumerate(slots):
        first, source = runs.pop() if runs and runs[-1][0].stop == slot else (slice(slot, slot), slice(place, place))
        runs.append((slice(first.start, slot + 1), slice(source.start, place + 1)))
    return runs


# The slots that `accumulate` updates, in the order of its values. It does not change any other slot.
_COUNTS: Final = _runs(
    [
        Slot.ROWS,
        Slot.TIED_ROWS_BF16,
        Slot.TIED_ROWS_ONE,
        Slot.SHIFTED_ROWS,
        Slot.EMPTY_ROWS,
        Slot.NONFINITE_ROWS,
        Slot.NONFINITE_INPUT_ROWS,
        Slot.NONFINITE_OUTPUT_ROWS,
    ]
)
_MAXIMA: Final = _runs([Slot.SCORE_MAX, Slot.ROW_MAX_ABS])
_SUMS: Final = _runs(
    [
        Slot.SCORE_OFFSET_SUM,
        Slot.SCORE_OFFSET_SUMSQ,
        Slot.DELTA_BIAS_SUM,
        Slot.DELTA_BIAS_ABS,
        Slot.DELTA_BIAS_SUMSQ,
    ]
)


def new_state(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Return an empty state, int64 [heads, SLOT_COUNT], into which `flash_attention` counts statistics.

    A slot contains a count, or the bits of a sum or maximum as float64; `foreshock.contract.slots` reads them and
    names their units (rows or nats). heads: query heads; raises ValueError if less than 1. device: the query's device;
    PyTorch raises an error if it does not exist.
    """
    if heads < 1:
        raise ValueError(f"heads is {heads}; pass the number of query heads, 1 or more")
    return torch.from_numpy(identity_row()).to(device).expand(heads, SLOT_COUNT).clone()


def one_margin(operand_dtype: torch.dtype) -> float:
    """Return the largest m - s, for row maximum m and score s, at which exp(s - m) rounds to 1 in `operand_dtype`.

    -ln(1 - eps / 4): half a step below 1, where the step is eps / 2, and 1 is even. 1.955e-3 in bf16, 2.442e-4 in fp16.
    """
    return -math.log1p(-torch.finfo(operand_dtype).eps / 4)


def several_within(scores: Tensor, row_max: Tensor, margin: float, scratch: Tensor) -> Tensor:
    """Return the rows with several scores s >= row_max - margin, bool [B, H, Sq, 1]; overwrite `scratch`."""
    return torch.sub(scores, row_max, out=scratch).ge_(-margin).sum(-1, keepdim=True) > 1


def several_in_bf16(scores: Tensor, row_max: Tensor) -> Tensor:
    """Return the rows in which more than one score rounds to the maximum's bf16 value, bool [B, H, Sq, 1]."""
    return scores.to(torch.bfloat16).eq_(row_max.to(torch.bfloat16)).sum(-1, keepdim=True) > 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of every row in the backward, all [B, H, Sq]."""

    row_max: Tensor
    lse: Tensor
    tied_bf16: Tensor
    tied_one: Tensor
    shifted: Tensor
    visible_keys: Tensor
    """Number of keys that the row sees, broadcastable."""
    delta: Tensor
    """delta_hp = rowsum(dO * (O_hi + O_residual))."""
    delta_bias: Tensor
    """delta_lp - delta_hp = -rowsum(dO * O_residual)."""
    entropy: Tensor | None = None
    """lse - sum P S, only of sampled rows (nats)."""
    computed_finite: Tensor | None = None
    """Whether the output recomputed from query, key and value in at least float32 is finite, bool."""
    output_finite: Tensor | None = None
    """Whether the model's own output is finite, bool."""
    output_error: Tensor | None = None
    """Distance between the model's own output and its recomputation, as a fraction of the rounding bound
    (output_check.py); NaN if it has no bound."""


def accumulate(state: Tensor, rows: Rows) -> None:
    """Add the statistics of `rows` to `state`, int64 [H, SLOT_COUNT]. Deterministic, without host synchronisation."""
    if rows.row_max.numel() == 0:
        return
    seen = (rows.visible_keys > 0).expand_as(rows.row_max)
    # A sum is finite only if all its summands are; abs() < inf is False for NaN too.
    finite = (rows.row_max + rows.lse + rows.delta + rows.delta_bias).abs() < math.inf
    counted = finite & seen
    # Finite queries and keys have finite scores in float32, so a nonfinite score proves a nonfinite input.
    input_finite = (rows.row_max + rows.lse).abs() < math.inf
    if rows.computed_finite is not None:
        input_finite &= rows.computed_finite
    output_sound = torch.ones_like(finite) if rows.output_finite is None else rows.output_finite | ~input_finite
    counts = torch.stack(
        [counted, rows.tied_bf16, rows.tied_one, rows.shifted, seen, finite, input_finite, output_sound]
    )
    counts[1:4] &= counted
    counts[4:].logical_not_()  # invert to: empty, not finite, and the two parts of not finite
    counts[5] &= seen
    counts[6:] &= counts[5]
    added = counts.sum((1, 3)).T
    for own, given in _COUNTS:
        state[:, own] += added[:, given]

    floats, ignored = state.view(torch.float64), ~counted
    maxima = torch.stack([rows.row_max, rows.row_max.abs()]).masked_fill_(ignored, -math.inf)
    largest = maxima.amax((1, 3)).T.to(torch.float64)
    for own, given in _MAXIMA:
        floats[:, own] = torch.maximum(floats[:, own], largest[:, given])

    values = torch.stack([rows.lse, rows.delta_bias]).to(torch.float64)
    most_entropy = rows.visible_keys.to(torch.float64).log()
    values[0] -= most_entropy
    values.masked_fill_(ignored, 0.0)
    offset, bias = values
    sums = torch.stack([offset, offset.square(), bias, bias.abs(), bias.square()]).sum((1, 3)).T
    for own, given in _SUMS:
        floats[:, own] += sums[:, given]
    if rows.entropy is not None:
        state[:, Slot.ENTROPY_ROWS] += added[:, 0]
        entropy = rows.entropy.to(torch.float64).masked_fill(ignored, 0.0)
        floats[:, Slot.ENTROPY_SUM] += entropy.sum((0, 2))
        most_entropy = most_entropy.expand_as(entropy).masked_fill(ignored, 0.0)
        floats[:, Slot.MOST_ENTROPY_SUM] += most_entropy.sum((0, 2))
    if rows.output_error is not None:
        checked = counted & ~rows.output_error.isnan()
        compared = torch.stack([checked, checked & (rows.output_error > 1)]).sum((1, 3)).T
        state[:, Slot.CHECKED_ROWS : Slot.WRONG_ROWS + 1] += compared
        error = rows.output_error.masked_fill(~checked, -math.inf).amax((0, 2)).to(torch.float64)
        floats[:, Slot.OUTPUT_ERROR_MAX] = torch.maximum(floats[:, Slot.OUTPUT_ERROR_MAX], error)
