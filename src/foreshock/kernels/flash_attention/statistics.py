"""The statistics of a head: what is asked of every row, and how it is added to the state.

A row is one query position of one batch entry. Scores are what enters the softmax: scaled, soft-capped, and rounded
where the numerics round them. `foreshock.contract.slots` defines every statistic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.slots import SLOT_COUNT, Slot, identity_row


def _runs(slots: Sequence[Slot]) -> list[tuple[slice, slice]]:
    """Slots that lie side by side: where in a state, and where in `slots`. Each run is one operation on the device."""
    runs: list[tuple[slice, slice]] = []
    for place, slot in enumerate(slots):
        first, source = runs.pop() if runs and runs[-1][0].stop == slot else (slice(slot, slot), slice(place, place))
        runs.append((slice(first.start, slot + 1), slice(source.start, place + 1)))
    return runs


# What `accumulate` counts, in the order in which it has the values. It leaves all other slots alone.
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
    """The state of heads that have seen nothing, int64 [heads, SLOT_COUNT], which `flash_attention` counts into.

    A slot holds a count, or the bits of a sum or maximum as float64 (`foreshock.contract.slots`, which also reads them
    and names their units: rows, or nats). heads: of the query, 1 or more; anything less raises ValueError. device:
    where the query lies; PyTorch refuses one that is not there.
    """
    if heads < 1:
        raise ValueError(f"a state of {heads} heads was asked for; give the number of query heads, 1 or more")
    return torch.from_numpy(identity_row()).to(device).expand(heads, SLOT_COUNT).clone()


def one_margin(operand_dtype: torch.dtype) -> float:
    """How far below its row's maximum m a score s may lie for exp(s - m) to round to 1 in `operand_dtype`.

    -ln(1 - eps / 4): half a step below 1, where the step is eps / 2, and 1 is even. 1.955e-3 in bf16, 2.442e-4 in fp16.
    """
    return -math.log1p(-torch.finfo(operand_dtype).eps / 4)


def several_within(scores: Tensor, row_max: Tensor, margin: float, scratch: Tensor) -> Tensor:
    """Rows with more than one score s where row_max - s <= margin, bool [B, H, Sq, 1]. Overwrites `scratch`."""
    return torch.sub(scores, row_max, out=scratch).ge_(-margin).sum(-1, keepdim=True) > 1


def several_in_bf16(scores: Tensor, row_max: Tensor) -> Tensor:
    """Rows with more than one score that rounds to the same bf16 as the row's maximum, bool [B, H, Sq, 1]."""
    return scores.to(torch.bfloat16).eq_(row_max.to(torch.bfloat16)).sum(-1, keepdim=True) > 1


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
    entropy: Tensor | None = None
    """lse - sum P S of rows that are sampled (nats)."""
    computed_finite: Tensor | None = None
    """Whether the output is finite when it is computed again from query, key and value in at least float32, bool."""
    output_finite: Tensor | None = None
    """Whether the model's own output is finite, bool."""
    output_error: Tensor | None = None
    """How far the model's own output is from its recomputation, in parts of what rounding explains (output_check.py);
    NaN where that is unknown."""


def accumulate(state: Tensor, rows: Rows) -> None:
    """Add the statistics of `rows` to `state`, int64 [H, SLOT_COUNT]. No host synchronisation; deterministic."""
    if rows.row_max.numel() == 0:
        return
    seen = (rows.visible_keys > 0).expand_as(rows.row_max)
    # A sum is finite only if all its parts are; abs() < inf is false for NaN too.
    finite = (rows.row_max + rows.lse + rows.delta + rows.delta_bias).abs() < math.inf
    counted = finite & seen
    # A finite query and key have finite scores in float32, so that other scores show an input that is not finite.
    input_finite = (rows.row_max + rows.lse).abs() < math.inf
    if rows.computed_finite is not None:
        input_finite &= rows.computed_finite
    output_sound = torch.ones_like(finite) if rows.output_finite is None else rows.output_finite | ~input_finite
    counts = torch.stack(
        [counted, rows.tied_bf16, rows.tied_one, rows.shifted, seen, finite, input_finite, output_sound]
    )
    counts[1:4] &= counted
    counts[4:].logical_not_()  # empty; not finite, and its two parts
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
