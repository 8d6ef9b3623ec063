"""Rows of an attention that somebody else computed, drawn at random and computed again from its operands."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.spec import compute_dtype, operand_dtype
from foreshock.kernels.flash_attention.statistics import Rows, accumulate, one_margin, several_in_bf16, several_within
from foreshock.kernels.flash_attention.visibility import place

HELD_BYTES: Final = 16 * 2**20
"""What a piece of the sampled rows holds in its largest tensor. The C library hands one of over 32 MiB back to the
system at once, which costs a CPU as much again as filling it."""


class Call(NamedTuple):
    grad_out: Tensor
    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    cu_queries: Tensor | None = None
    """Where packed sequences begin, as cu_keys; None where none are packed."""
    cu_keys: Tensor | None = None

    def batched(self) -> "Call":
        """The same call as [B, H, S, D]: what stands before the heads are entries of the batch, of which all share what
        is there once; a single head may have no dimension of its own."""
        one_head = self.out.dim() == 3
        entries = self.out.shape[:-2] if one_head else self.out.shape[:-3]
        if self.out.dim() == 4 and all(len(x) == len(self.out) for x in (self.query, self.key, self.value)):
            return self

        def flat(x: Tensor) -> Tensor:
            x = x.unsqueeze(-3) if one_head else x
            return x.expand(*entries, *x.shape[-3:]).reshape(-1, *x.shape[-3:])

        grad_out, out, query, key, value = map(flat, self[:5])
        mask = self.mask if self.mask is None or self.mask.dim() < (3 if one_head else 4) else flat(self.mask)
        return Call(grad_out, out, query, key, value, mask, self.cu_queries, self.cu_keys)


def measure(count: int, heads: Tensor, call: Call, state: Tensor, tick: Tensor, spec: AttentionSpec) -> None:
    """Count `count` rows of each of `heads` [h] (all rows where there are no more) into `state` [h, SLOT_COUNT]."""
    query, keys = call.query, call.key.shape[2]
    batch, _, queries, _ = query.shape
    total = batch * queries
    if count < total:
        place = drawn(tick, (len(heads), count), total)
    else:
        place = torch.arange(total, device=query.device).expand(len(heads), total)
    wide = compute_dtype(spec.numerics)
    held = query.shape[3] if _copies(query.device) else 1  # numbers for a row and a key
    at_once = max(1, HELD_BYTES // (len(heads) * keys * held * wide.itemsize))
    for places in torch.split(place, at_once, dim=1):
        entry, row = places.div(queries, rounding_mode="floor"), places % queries  # both [h, r]
        accumulate(state, _rows(heads.view(-1, 1), entry, row, call, spec))


def _rows(head: Tensor, entry: Tensor, row: Tensor, call: Call, spec: AttentionSpec) -> Rows:
    """What is known of the rows `row` [h, r] of batch entries `entry` [h, r] in heads `head` [h, 1]."""
    grad_out, out, query, key, value, mask = call[:6]
    operand, wide = operand_dtype(query.dtype), compute_dtype(spec.numerics)

    def widened(x: Tensor) -> Tensor:
        """As the kernel's operands: rounded where the numerics round them, then wide enough to multiply exactly."""
        return (x.to(operand) if spec.numerics in ("kernel", "paper") else x).to(wide)

    key_head = head // (query.shape[1] // key.shape[1])
    times = _times_copies if _copies(query.device) else _times
    queries = widened(query[entry, head, row])  # [h, r, D]
    scores = times(queries, key.transpose(2, 3), entry, key_head, widened).mul_(spec.scale)  # [h, r, Sk]
    if spec.softcap > 0:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    hidden = _hidden(row, call, spec)
    if mask is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        seen = mask.expand(shape)[entry, head, row]  # [h, r, Sk]
        if mask.dtype == torch.bool:
            hidden = ~seen if hidden is None else hidden | ~seen
        else:
            nothing = seen <= torch.finfo(mask.dtype).min / 2  # -inf, or what transformers writes in its place
            scores += seen
            hidden = nothing if hidden is None else hidden | nothing
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    visible = (scores != -math.inf).sum(-1).unsqueeze(0)  # [1, h, r]
    scores = scores.unsqueeze(0)  # [1, h, r, Sk], as one batch entry
    row_max = scores.amax(-1, keepdim=True)
    tied_bf16 = several_in_bf16(scores, row_max).squeeze(-1)
    tied_one = several_within(scores, row_max, one_margin(operand), torch.empty_like(scores)).squeeze(-1)
    floor = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = scores.sub_(floor).exp_()
    row_sum = weights.sum(-1)
    lse = floor.squeeze(-1) + row_sum.log()
    grad = grad_out[entry, head, row].to(wide).unsqueeze(0)  # [1, h, r, D]
    output = out[entry, head, row].to(operand).to(wide)  # in 16 bits under every numerics, as our kernels read it
    delta = (grad * output).sum(-1)
    bias = torch.zeros_like(delta)
    if spec.dropout_p == 0:  # with dropout only the kernel knows which weights it dropped
        rounded = weights.to(operand).to(wide) if spec.numerics in ("kernel", "paper") else weights
        product = times(rounded[0], value, entry, key_head, widened)  # [h, r, D]
        exact = product / row_sum[0].masked_fill(row_sum[0] == 0, 1.0).unsqueeze(-1)
        bias = (grad * (output - exact)).sum(-1)
    never = torch.zeros_like(tied_one)
    return Rows(row_max.squeeze(-1), lse, tied_bf16, tied_one, never, visible, delta - bias, bias)


def _copies(device: torch.device) -> bool:
    """Whether each row is multiplied with a copy of its head's keys and values. Those that share them could do without,
    but which do decides what is called: a device would have to be waited for."""
    return device.type != "cpu"


Widened = Callable[[Tensor], Tensor]


def _times_copies(rows: Tensor, matrices: Tensor, entry: Tensor, head: Tensor, widened: Widened) -> Tensor:
    """`rows` [h, r, n], each times that of `matrices` [B, Hkv, n, m] in its `entry` [h, r] and `head` [h, 1]:
    [h, r, m]."""
    return torch.matmul(rows.unsqueeze(-2), widened(matrices[entry, head])).squeeze(-2)


def _times(rows: Tensor, matrices: Tensor, entry: Tensor, head: Tensor, widened: Widened) -> Tensor:
    """The same product, of all rows at once that share a matrix: on a CPU the copies cost ten times as much as it."""
    of_row, order = (entry * matrices.shape[1] + head).flatten().sort()
    used, counts = torch.unique_consecutive(of_row, return_counts=True)
    flat = rows.flatten(0, 1)
    product = flat.new_empty(len(flat), matrices.shape[3])
    for shared, mine in zip(used.tolist(), torch.split(order, counts.tolist()), strict=True):
        product[mine] = flat[mine] @ widened(matrices[divmod(shared, matrices.shape[1])])
    return product.view(*rows.shape[:2], -1)


def _hidden(row: Tensor, call: Call, spec: AttentionSpec) -> Tensor | None:
    """Pairs that causality, the window or the ends of packed sequences hide, bool [h, r, Sk]; None: there are none."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.cu_queries is not None and call.cu_keys is not None:
        sequence, position = place(call.cu_queries, queries)
        sequence_of_keys, position_of_keys = place(call.cu_keys, keys)
        longer = torch.nn.functional.pad(call.cu_keys.diff() - call.cu_queries.diff(), (0, 1))
        diagonal = position if spec.causal == "top_left" else position + longer[sequence]
        distance = position_of_keys - diagonal[row].unsqueeze(-1)
        past = len(call.cu_queries) - 1  # of rows behind the last sequence, which see nothing
        mine = sequence[row].unsqueeze(-1)
        hidden = (mine != sequence_of_keys) | (mine == past)
    elif spec.causal == "none" and spec.window_left < 0 and spec.window_right < 0:
        return None
    else:
        offset = 0 if spec.causal == "top_left" else keys - queries
        distance = torch.arange(keys, device=row.device) - (row + offset).unsqueeze(-1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
    if spec.causal != "none" or spec.window_right >= 0:
        hidden |= distance > (0 if spec.causal != "none" else spec.window_right)
    if spec.window_left >= 0:
        hidden |= distance < -spec.window_left
    return hidden


def drawn(tick: Tensor, shape: tuple[int, int], below: int) -> Tensor:
    """Numbers in [0, below), int64 of `shape`, that depend on `tick` [1] alone.

    The finaliser of splitmix64 (Steele, Lea and Flood, 2014) over a counter, on the device: the random streams that the
    training draws from are left alone, and a CUDA graph draws anew in every replay.
    """
    count = math.prod(shape)
    z = (tick * count + torch.arange(count, device=tick.device)) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return ((z & 0x7FFFFFFFFFFFFFFF) % below).view(shape)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift right of the 64-bit words."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
