"""What the tensors of one attention call say of each head: the agent's own statistics, and what only tensors show."""

import math
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import Floats, Slot
from foreshock.kernels.flash_attention import new_state
from foreshock.kernels.flash_attention.visibility import BLIND
from foreshock.lab.diagnosis.capture import AttentionCall, finite, heads_of
from foreshock.monitor.attention.probed_rows import Call, chosen_rows, measure, of_rows, pieces, times, wide

_ROWS: Final = 256
"""Rows of each head that are computed again in a call; all where there are no more."""
_COUNTED: Final = {"offset": "head.score_offset", "ties": "head.tied_rows_one", "entropy": "head.entropy"}


@torch.no_grad()
def measured(call: AttentionCall) -> dict[str, Floats]:
    """Quantities of one call by name, each [H]; NaN for what its tensors do not show.

    Those of `_COUNTED` are the agent's, of the same rows. The others are taken beside float64.
    """
    with torch.autocast(call.query.device.type, enabled=False):
        given = _batched(call)
        state = new_state(given.query.shape[1], given.query.device)
        tick = torch.zeros(1, dtype=torch.int64, device=state.device)
        measure(_ROWS, given, state, tick, call.spec, call.score_mod)
        found = _beside_float64(call, given, tick)
    words = state.cpu().numpy()
    found |= {cell: read(key, words) for cell, key in _COUNTED.items()}
    found["rows"] = words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]].sum(1).astype(np.float64)
    found["empty"] = words[:, Slot.EMPTY_ROWS].astype(np.float64)
    return found


def _batched(call: AttentionCall) -> Call:
    """The call as [B, H, S, D], its operands in the type that they were multiplied in."""
    mask = call.mask
    if mask is not None and mask.is_floating_point():  # a mask is a mask whatever number it was written with
        mask = mask.detach().masked_fill(mask <= BLIND, -math.inf)
    nothing = torch.zeros_like(call.out)
    given = Call(nothing, call.out, call.query, call.key, call.value, mask, *(call.ends or (None, None)))
    return given.batched().rounded(call.spec.numerics)


def _beside_float64(call: AttentionCall, given: Call, tick: Tensor) -> dict[str, Floats]:
    """What all scores of a row share, the largest |score|, and how far the output is from that in float64."""
    spec = replace(call.spec, numerics="float64")
    parts: list[Tensor] = []
    chosen = chosen_rows(tick, _ROWS, *given.query.shape[::2])
    for entries, rows, (scores, *_), keys in pieces(*chosen, given, spec, call.score_mod):
        value, out = wide(given.value, entries, spec)[:, :, keys], of_rows(given.out, entries, rows).double()
        seen = ~scores.isneginf()
        shown = scores.masked_fill(~seen, 0.0)
        good = seen.any(-1) & shown.isfinite().all(-1) & out.isfinite().all(-1)
        truth = times(scores.masked_fill(~good.unsqueeze(-1), 0.0).softmax(-1), value)
        common = shown.sum(-1) / seen.sum(-1).clamp_min(1)
        squares = ((out - truth).square().sum(-1), truth.square().sum(-1))
        columns = (good.double(), common, shown.abs().amax(-1), *squares)
        parts.append(torch.stack([column.transpose(0, 1).flatten(1) for column in columns]))
    found = torch.cat(parts, 2)
    count, (common, largest, *squared) = (found[0] > 0).sum(1), found[1:].masked_fill(found[0] == 0, 0.0)
    off, size = (each.sum(1).sqrt() for each in squared)
    quantities = {
        "common": common.sum(1) / count,
        "common rms": (common.square().sum(1) / count).sqrt(),
        "largest": largest.amax(1).masked_fill(count == 0, math.nan),
        "output error": (off / size).masked_fill(torch.tensor(spec.dropout_p > 0, device=off.device), math.nan),
    }
    return {name: values.cpu().numpy() for name, values in quantities.items()}


@torch.no_grad()
def broken_part(call: AttentionCall) -> str:
    """What of a call is not finite, where and why, in words."""
    where = f"layer {call.layer} ({call.name})"
    for name, tensor in (("queries", call.query), ("keys", call.key), ("values", call.value)):
        if not finite([tensor]):
            return f"the {name} that enter the attention of {where} are not finite, {heads_of(tensor)}"
    broken = f"the output of the attention of {where}, {heads_of(call.out)}, is not finite, and what enters it is"
    given, spec = _batched(call), replace(call.spec, numerics="float64")
    bad = (~given.out.isfinite()).any(-1)
    entry, head, _ = bad.nonzero()[0].tolist()
    rows = bad[entry, head].nonzero().flatten()[None, :_ROWS]
    some = pieces(torch.tensor([entry], device=rows.device), rows, given, spec, call.score_mod)
    if all(bool((~scores.isfinite()).all(-1)[0, head].all()) for _, _, (scores, *_), _ in some):
        return f"{broken}: these rows see no key, the mask hides everything from them"
    key = given.key[entry, head // (given.query.shape[1] // given.key.shape[1])]
    product = float((given.query[entry, head, rows[0]].double() @ key.double().mT).abs().max())
    limit = torch.finfo(call.out.dtype).max
    if product > limit and product * spec.scale <= limit:
        dtype = str(call.out.dtype).removeprefix("torch.")
        return f"{broken}: query times key reaches {product:.0f} before the scale, and {dtype} ends at {limit:.0f}"
    return broken
