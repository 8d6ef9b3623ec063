"""Rows of an attention that somebody else computed, drawn at random and computed again from its operands.

They are stratified: as many of each entry of the batch, one in each stretch of the sequence, the same of all heads. So
each row has an equal chance, and those of one entry are multiplied with its keys at once.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.output_check import allowance, distance
from foreshock.kernels.flash_attention.spec import Numerics, compute_dtype, operand_dtype
from foreshock.kernels.flash_attention.statistics import Rows, accumulate, one_margin, several_in_bf16
from foreshock.kernels.flash_attention.visibility import place, seen_keys, shared_by_keys

LEAST_ROWS: Final = 16
"""Of an entry of the batch that is measured, where it has as many: fewer would read its keys for little."""
HELD_BYTES: Final = 16 * 2**20
"""What a piece of the sampled rows holds in its largest tensor. The C library hands one of over 32 MiB back to the
system at once, which costs a CPU as much again as filling it."""
_LOWEST: Final = {torch.float32: -80.0, torch.float64: -700.0}
"""A score so far below its row's maximum has a weight of 0: a sum that holds a weight of 1 rounds it away."""


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""What a call makes of its scores before their softmax, beside softcap, causality, window and mask. It takes scores
[e, H, c, k] in float32 or float64, scale and softcap in them, and int32 numbers of the batch's entries [e, 1, 1, 1],
query heads [H, 1, 1], queries [e, 1, c, 1] and keys [k]. It returns scores that broadcast to the same shape, -inf where
a key is hidden, and writes into none of them. Raises UnmeasurableError where it cannot."""


class UnmeasurableError(Exception):
    """The scores of a call cannot be computed again; whoever raises it has named the call."""


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

    def rounded(self, numerics: Numerics) -> "Call":
        """The same call with query, key and value in the type that they were multiplied in. Under autocast wider ones
        were rounded to the type that the output has; where it has none of 16 bits, our kernels' own choice."""
        if numerics not in ("kernel", "paper"):
            return self
        operand = operand_dtype(self.out.dtype)
        return self._replace(**{name: getattr(self, name).to(operand) for name in ("query", "key", "value")})


class Scores(NamedTuple):
    """Of sampled rows, as they enter the softmax."""

    scores: Tensor
    """[e, H, c, k]; -inf where a key is hidden."""
    visible: Tensor
    """How many keys each row sees, [e, H, c]."""
    shared: Tensor | None = None
    """What a bias adds to each row as a whole, [e, H or 1, c]; None: nothing."""


def measure(
    count: int,
    call: Call,
    state: Tensor,
    tick: Tensor,
    spec: AttentionSpec,
    score_mod: ScoreMod | None = None,
    given: Scores | None = None,
) -> None:
    """Count some `count` rows of each head (all rows where there are no more) into `state` [H, SLOT_COUNT]. given: what
    sampled_scores computed of them."""
    batch, _, queries, _ = call.query.shape
    if given is not None:
        entries, rows = chosen_rows(tick, given.scores.shape[0] * given.scores.shape[2], batch, queries)
        given = given._replace(scores=given.scores.clone())  # _rows writes into them
        accumulate(state, _rows(entries, rows, call, given, wide(call.value, entries, spec), spec))
        return
    for some, rows, scores, keys in pieces(*chosen_rows(tick, count, batch, queries), call, spec, score_mod):
        accumulate(state, _rows(some, rows, call, scores, wide(call.value, some, spec)[:, :, keys], spec))


def raise_largest(largest: Tensor, call: Call, spec: AttentionSpec) -> None:
    """Raise `largest`, float32 [H], to the largest score of every row of a call, less what a bias adds to all keys: the
    work of Q K^T in full, in pieces of HELD_BYTES. NaN where a score is."""
    batch, _, queries, _ = call.query.shape
    entries, rows = (torch.arange(count, device=call.query.device) for count in (batch, queries))
    for _, _, (scores, _, shared), _ in pieces(entries, rows.expand(batch, queries), call, spec, None):
        row_max = scores.amax(-1) if shared is None else scores.amax(-1) - shared
        torch.maximum(largest, row_max.amax((0, 2)).to(largest.dtype), out=largest)


def pieces(
    entries: Tensor, rows: Tensor, call: Call, spec: AttentionSpec, score_mod: ScoreMod | None
) -> Iterator[tuple[Tensor, Tensor, "Scores", slice]]:
    """Of rows `rows` [E, c] of batch entries `entries` [E], piece by piece: entries, rows, scores, of which keys."""
    at_once = _at_once(call, spec)
    together = max(1, at_once // rows.shape[1])
    for some, theirs in zip(torch.split(entries, together), torch.split(rows, together), strict=True):
        keys = wide(call.key, some, spec)
        for piece in torch.split(theirs, at_once, dim=1):
            low, high = visible_keys(piece, call, spec)
            first, end = 0, keys.shape[2]
            if piece.device.type == "cpu":  # keys that none of these rows sees; elsewhere they would be waited for
                first = min(int(low.min()), end - 1)
                end = max(int(high.max()), first + 1)
            scores = scores_of(some, piece, call, keys[:, :, first:end], (low, high), spec, score_mod, first)
            yield some, piece, scores, slice(first, end)


def sampled_scores(count: int, call: Call, tick: Tensor, spec: AttentionSpec, score_mod: ScoreMod) -> Scores:
    """Scores of the rows that `measure` takes at this tick: `count` of each head, or fewer where these would hold too
    much. Reads no tensor's value, so that it may be part of a compiled graph."""
    batch, _, queries, _ = call.query.shape
    entries, rows = chosen_rows(tick, min(count, _at_once(call, spec)), batch, queries)
    keys = wide(call.key, entries, spec)
    return scores_of(entries, rows, call, keys, visible_keys(rows, call, spec), spec, score_mod)


def _at_once(call: Call, spec: AttentionSpec) -> int:
    """How many rows of each head are computed at once."""
    held = HELD_BYTES * (16 if call.query.is_cuda else 1)  # a GPU is kept waiting by many small pieces
    return max(LEAST_ROWS, held // (call.query.shape[1] * call.key.shape[2] * compute_dtype(spec.numerics).itemsize))


def sizes(count: int, batch: int, queries: int) -> tuple[int, int]:
    """Of how many entries of the batch some `count` rows are measured, and how many of each: all of all of them where
    there are no more."""
    of_each = min(max(-(-count // batch), min(count, LEAST_ROWS)), queries)
    return min(-(-count // of_each), batch), of_each


def chosen_rows(tick: Tensor, count: int, batch: int, queries: int) -> tuple[Tensor, Tensor]:
    """The entries that are measured, int64 [E], and the rows of each, int64 [E, c], in rising order.

    With a number drawn from [0, n) for each of k stretches, (i n + drawn) // k is each of n rows with equal chance.
    """
    entries, of_each = sizes(count, batch, queries)
    place = torch.arange(max(entries, of_each), device=tick.device)
    if entries == batch and of_each == queries:
        return place[:batch], place[:queries].expand(batch, queries)
    index = torch.arange(1 + entries * of_each, device=tick.device)
    numbers = drawn(tick * len(index) + index)
    rows = (place[:of_each] * queries + numbers[1:].view(entries, of_each) % queries) // of_each
    return (place[:entries] * batch + numbers[0] % batch) // entries, rows


def wide(x: Tensor, entries: Tensor, spec: AttentionSpec) -> Tensor:
    """Keys or values of some entries of the batch, [e, Hkv, Sk, D], wide enough to multiply exactly."""
    return (x if len(entries) == len(x) else x[entries]).to(compute_dtype(spec.numerics))


def scores_of(
    entry: Tensor,
    row: Tensor,
    call: Call,
    keys: Tensor,
    bounds: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    score_mod: ScoreMod | None,
    first: int = 0,
) -> Scores:
    """Of the rows `row` [e, c] of batch entries `entry` [e] with `keys`, the number `first` and those behind it, of
    which each row sees those in `bounds`."""
    low, high = bounds
    scores = times(of_rows(call.query, entry, row).to(keys.dtype), keys.mT).mul_(spec.scale)  # [e, H, c, k]
    if spec.softcap > 0:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    visible = (high - low).unsqueeze(1).expand(scores.shape[:3])
    hidden, added = None, None
    end = first + keys.shape[2]
    position = torch.arange(first, end, dtype=torch.int32, device=row.device)
    if score_mod is not None:
        head = torch.arange(scores.shape[1], dtype=torch.int32, device=row.device)
        query = torch.cat([row, row], 1)[:, None, :, None].int()
        # what it makes of a score of 0 separates a mask and a bias from what, as a softcap, bends the scores
        both = torch.cat([scores, torch.zeros_like(scores)], 2)
        modified = score_mod(both, entry.view(-1, 1, 1, 1).int(), head.view(-1, 1, 1), query, position)
        scores, added = torch.empty_like(both).copy_(modified).chunk(2, 2)
    if _hides(call, spec):
        hidden = ((position < low.unsqueeze(-1)) | (position >= high.unsqueeze(-1))).unsqueeze(1)
    if (mask := call.mask) is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(len(call.query), -1, call.query.shape[2], call.key.shape[2])
        mask = of_rows(mask[..., first:end], entry, row)  # [e, H or 1, c, k]
        if mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
            visible = (~hidden).sum(-1)
        else:
            scores += (bias := mask.to(scores.dtype))
            added = bias if added is None else added + bias
    shared = None
    if added is not None:
        added = added if hidden is None else added.masked_fill(hidden, -math.inf)
        visible, shared = seen_keys(added), None if spec.learned_bias else shared_by_keys(added)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return Scores(scores, visible, shared)


def of_rows(x: Tensor, entry: Tensor, row: Tensor) -> Tensor:
    """The rows `row` [e, c] of batch entries `entry` [e] of `x` [B, H, S, D]: [e, H, c, D]."""
    return x[entry.unsqueeze(1), :, row].transpose(1, 2)  # [e, H, c, ...]


def _rows(entry: Tensor, row: Tensor, call: Call, given: Scores, values: Tensor, spec: AttentionSpec) -> Rows:
    """What is known of the rows `row` [e, c] of batch entries `entry` [e], of whose keys `values` are."""
    operand, (scores, visible, shared) = operand_dtype(call.query.dtype), given
    row_max = scores.amax(-1, keepdim=True)
    tied_bf16 = several_in_bf16(scores, row_max).squeeze(-1)
    floor = row_max.masked_fill(row_max == -math.inf, 0.0)
    below = scores.sub_(floor)
    tied_one = torch.ge(below, -one_margin(operand), out=(scratch := torch.empty_like(below))).sum(-1) > 1
    lowest = _LOWEST[below.dtype]  # a CPU takes several times as long for an exp that is nearly 0
    weights = torch.threshold_(torch.exp(below.clamp_(min=lowest), out=scratch), 2 * math.exp(lowest), 0.0)
    row_sum = weights.sum(-1)
    known_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    # of the scores less their maximum, so that no offset cancels
    entropy = known_sum.log() - below.mul_(weights).sum(-1) / known_sum
    own_floor = floor.squeeze(-1) if shared is None else floor.squeeze(-1) - shared
    lse = own_floor + row_sum.log()
    grad = of_rows(call.grad_out, entry, row).to(scores.dtype)  # [e, H, c, D]
    # in 16 bits under every numerics, as our kernels read it
    own = of_rows(call.out, entry, row)
    output = own.to(operand).to(scores.dtype)
    delta = (grad * output).sum(-1)
    rounded = weights.to(operand).to(weights.dtype) if spec.numerics in ("kernel", "paper") else weights
    exact = times(rounded, values) / known_sum.unsqueeze(-1)
    # with dropout only the kernel knows which weights it dropped
    delta_bias = (grad * (output - exact)).sum(-1) if spec.dropout_p == 0 else torch.zeros_like(delta)
    # the largest norm of a float32 fits; a CPU takes ten times as long for the infinity norm
    computed_finite, output_finite = (norms_of(x, torch.float64) < math.inf for x in (exact, output))
    never = torch.zeros_like(tied_one)
    row_max = row_max.squeeze(-1)
    delta -= delta_bias
    error = None
    if (allowed := allowance(call.query.dtype, spec, call.query.shape[3], call.key.shape[2])) is not None:
        value_norms = norms_of(values, scores.dtype)
        mean_square = times(weights, value_norms.square().unsqueeze(-1)).squeeze(-1) / known_sum
        norms = (
            norms_of(of_rows(call.query, entry, row), scores.dtype),
            _of_heads(norms_of(call.key if len(entry) == len(call.key) else call.key[entry], scores.dtype), row_max),
            _of_heads(value_norms, row_max),
        )
        away, size = norms_of(own - exact, scores.dtype), norms_of(exact, scores.dtype)
        error = distance(away, size, row_max, mean_square, *norms, spec.scale, allowed)
    return Rows(
        row_max if shared is None else row_max - shared,
        lse,
        tied_bf16,
        tied_one,
        never,
        visible,
        delta,
        delta_bias,
        entropy,
        computed_finite,
        output_finite,
        error,
    )


def norms_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The Euclidean norm of every row of `x` [..., D], computed in `dtype`: [...]."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1, dtype=dtype))


def _of_heads(norms: Tensor, like: Tensor) -> Tensor:
    """The largest of `norms` [e, Hkv, k] of each key head, for the query heads that read it: [e, H, 1]. One that is NaN
    is of a key that is hidden, or its rows are not compared."""
    return (
        norms.nan_to_num(nan=0.0, posinf=math.inf)
        .amax(-1, keepdim=True)
        .repeat_interleave(like.shape[1] // norms.shape[1], 1)
    )


def times(rows: Tensor, matrices: Tensor) -> Tensor:
    """`rows` [e, H, c, n], each times that of `matrices` [e, Hkv, n, m] which its head reads: [e, H, c, m]."""
    of_key_heads = rows.reshape(*matrices.shape[:2], -1, rows.shape[3])  # [e, Hkv, H / Hkv * c, n]
    return torch.matmul(of_key_heads, matrices).view(*rows.shape[:3], -1)


def _hides(call: Call, spec: AttentionSpec) -> bool:
    """Whether some row does not see every key, masks left aside."""
    return call.cu_queries is not None or spec.right >= 0 or spec.window_left >= 0


def visible_keys(row: Tensor, call: Call, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The keys [low, high) that causality, the window and the ends of packed sequences let each of `row` [e, c] see."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.cu_queries is not None and call.cu_keys is not None:
        sequences, positions = place(call.cu_queries, queries)
        sequence = sequences[row]  # one past the last of rows behind it, which see nothing
        starts = call.cu_keys.long()
        ends = torch.cat([starts[1:], starts[-1:]])
        longer = torch.nn.functional.pad(starts.diff() - call.cu_queries.long().diff(), (0, 1))
        low, high = starts[sequence], ends[sequence]
        diagonal = low + positions[row] + (0 if spec.causal == "top_left" else longer[sequence])
    else:
        low, high = torch.zeros_like(row), torch.full_like(row, keys)
        diagonal = row + (0 if spec.causal == "top_left" else keys - queries)
    if spec.right >= 0:
        high = torch.minimum(high, diagonal + spec.right + 1)
    if spec.window_left >= 0:
        low = torch.maximum(low, diagonal - spec.window_left)
    return low, torch.maximum(low, high)


def drawn(index: Tensor) -> Tensor:
    """Numbers in [0, 2^63), int64 of the shape of `index`, int64, that depend on it alone.

    The finaliser of splitmix64 (Steele, Lea and Flood, 2014) over a counter, on the device: the random streams that the
    training draws from are left alone, and a CUDA graph draws anew in every replay.
    """
    z = index * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return z & 0x7FFFFFFFFFFFFFFF


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift right of the 64-bit words."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
