"""Draw random rows of the model's native attention, and compute them again from its operands.

The sample is stratified: the same number of rows per batch entry, one in each section of the sequence, and the same
rows for all heads. So each row has the same probability, and all rows of an entry are multiplied with its keys at once.
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
"""Minimum of rows per measured batch entry, if it has that many; with fewer, reading the keys is not worth it."""
HELD_BYTES: Final = 16 * 2**20
"""Size limit of the largest tensor for a piece of the sampled rows. The C library returns blocks of over 32 MiB to the
system at once, and allocating them again doubles a CPU's time."""
_LOWEST: Final = {torch.float32: -80.0, torch.float64: -700.0}
"""A score this far below its row's maximum gets weight 0, because rounding removes it from a sum with a weight of 1."""


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A call's function of its scores before the softmax, in addition to softcap, causality, window and mask. It takes
scores [e, H, c, k] in float32 or float64, after scale and softcap, and int32 indices of batch entries [e, 1, 1, 1],
query heads [H, 1, 1], queries [e, 1, c, 1] and keys [k]. It returns scores that broadcast to the same shape, -inf for
hidden keys, and does not modify its arguments. Raises UnmeasurableError if it cannot compute them."""


class UnmeasurableError(Exception):
    """The scores of a call cannot be computed again; the code that raises it has already reported the call."""


class Call(NamedTuple):
    grad_out: Tensor
    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    cu_queries: Tensor | None = None
    """Cumulative lengths of packed sequences, like cu_keys; None without packing."""
    cu_keys: Tensor | None = None

    def batched(self) -> "Call":
        """Return the same call as [B, H, S, D].

        All dimensions before the heads become batch entries, and tensors without them are expanded. A single head may
        come without a head dimension.
        """
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
        """Return the same call with query, key and value in the type of the matrix products. Under autocast, wider
        inputs are rounded to the output's type; if that is not a 16-bit type, to the type that foreshock's kernels
        use."""
        if numerics not in ("kernel", "paper"):
            return self
        operand = operand_dtype(self.out.dtype)
        return self._replace(**{name: getattr(self, name).to(operand) for name in ("query", "key", "value")})


class Scores(NamedTuple):
    """Softmax inputs of sampled rows."""

    scores: Tensor
    """[e, H, c, k]; -inf for hidden keys."""
    visible: Tensor
    """Number of keys that each row sees, [e, H, c]."""
    shared: Tensor | None = None
    """Number that a bias adds to each whole row, [e, H or 1, c]; None: no bias."""


def measure(
    count: int,
    call: Call,
    state: Tensor,
    tick: Tensor,
    spec: AttentionSpec,
    score_mod: ScoreMod | None = None,
    given: Scores | None = None,
) -> None:
    """Count about `count` rows of each head (at most all rows) into `state` [H, SLOT_COUNT]. given: their Scores, if
    sampled_scores has already computed them."""
    batch, _, queries, _ = call.query.shape
    if given is not None:
        entries, rows = chosen_rows(tick, given.scores.shape[0] * given.scores.shape[2], batch, queries)
        given = given._replace(scores=given.scores.clone())  # _rows writes into them
        accumulate(state, _rows(entries, rows, call, given, wide(call.value, entries, spec), spec))
        return
    for some, rows, scores, keys in pieces(*chosen_rows(tick, count, batch, queries), call, spec, score_mod):
        accumulate(state, _rows(some, rows, call, scores, wide(call.value, some, spec)[:, :, keys], spec))


def raise_largest(largest: Tensor, call: Call, spec: AttentionSpec) -> None:
    """Raise `largest`, float32 [H], to the largest score over all rows of a call, without the number that a bias adds
    to a whole row; NaN if a score is NaN. Computes all of Q K^T, in pieces of HELD_BYTES."""
    batch, _, queries, _ = call.query.shape
    entries, rows = (torch.arange(count, device=call.query.device) for count in (batch, queries))
    for _, _, (scores, _, shared), _ in pieces(entries, rows.expand(batch, queries), call, spec, None):
        row_max = scores.amax(-1) if shared is None else scores.amax(-1) - shared
        torch.maximum(largest, row_max.amax((0, 2)).to(largest.dtype), out=largest)


def pieces(
    entries: Tensor, rows: Tensor, call: Call, spec: AttentionSpec, score_mod: ScoreMod | None
) -> Iterator[tuple[Tensor, Tensor, "Scores", slice]]:
    """Split rows `rows` [E, c] of batch entries `entries` [E]; yield each piece's entries, rows, scores and keys."""
    at_once = _at_once(call, spec)
    together = max(1, at_once // rows.shape[1])
    for some, theirs in zip(torch.split(entries, together), torch.split(rows, together), strict=True):
        keys = wide(call.key, some, spec)
        for piece in torch.split(theirs, at_once, dim=1):
            low, high = visible_keys(piece, call, spec)
            first, end = 0, keys.shape[2]
            if piece.device.type == "cpu":  # skip hidden keys; on a GPU, this would wait for the device
                first = min(int(low.min()), end - 1)
                end = max(int(high.max()), first + 1)
            scores = scores_of(some, piece, call, keys[:, :, first:end], (low, high), spec, score_mod, first)
            yield some, piece, scores, slice(first, end)


def sampled_scores(count: int, call: Call, tick: Tensor, spec: AttentionSpec, score_mod: ScoreMod) -> Scores:
    """Return the Scores of the rows that `measure` draws at this tick: `count` of each head, or fewer to limit memory.

    It does not read any tensor's value on the host, so it can be part of a compiled graph.
    """
    batch, _, queries, _ = call.query.shape
    entries, rows = chosen_rows(tick, min(count, _at_once(call, spec)), batch, queries)
    keys = wide(call.key, entries, spec)
    return scores_of(entries, rows, call, keys, visible_keys(rows, call, spec), spec, score_mod)


def _at_once(call: Call, spec: AttentionSpec) -> int:
    """Return the number of rows of each head that are computed at once."""
    held = HELD_BYTES * (16 if call.query.is_cuda else 1)  # many small pieces would leave a GPU idle
    return max(LEAST_ROWS, held // (call.query.shape[1] * call.key.shape[2] * compute_dtype(spec.numerics).itemsize))


def sizes(count: int, batch: int, queries: int) -> tuple[int, int]:
    """Return the number of batch entries and the rows per entry for about `count` rows; at most all rows."""
    of_each = min(max(-(-count // batch), min(count, LEAST_ROWS)), queries)
    return min(-(-count // of_each), batch), of_each


def chosen_rows(tick: Tensor, count: int, batch: int, queries: int) -> tuple[Tensor, Tensor]:
    """Draw the measured batch entries, int64 [E], and the rows of each, int64 [E, c], in ascending order.

    With a number drawn from [0, n) for each section i of k, (i n + drawn) // k is each of the n rows with the same
    probability.
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
    """Return keys or values of some batch entries, [e, Hkv, Sk, D], in a type in which products are exact."""
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
    """Return the Scores of rows `row` [e, c] of batch entries `entry` [e] with `keys`, which start at index `first`;
    each row sees the keys within `bounds`."""
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
        # its result for a score of 0 is the bias or mask, without functions of the score such as a softcap
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
    """Return rows `row` [e, c] of batch entries `entry` [e] of `x` [B, H, S, D]: [e, H, c, D]."""
    return x[entry.unsqueeze(1), :, row].transpose(1, 2)  # [e, H, c, ...]


def _rows(entry: Tensor, row: Tensor, call: Call, given: Scores, values: Tensor, spec: AttentionSpec) -> Rows:
    """Return all values of rows `row` [e, c] of batch entries `entry` [e]; `values` belong to the keys of `given`."""
    operand, (scores, visible, shared) = operand_dtype(call.query.dtype), given
    row_max = scores.amax(-1, keepdim=True)
    tied_bf16 = several_in_bf16(scores, row_max).squeeze(-1)
    floor = row_max.masked_fill(row_max == -math.inf, 0.0)
    below = scores.sub_(floor)
    tied_one = torch.ge(below, -one_margin(operand), out=(scratch := torch.empty_like(below))).sum(-1) > 1
    lowest = _LOWEST[below.dtype]  # on a CPU, an exp that is nearly 0 takes several times as long
    weights = torch.threshold_(torch.exp(below.clamp_(min=lowest), out=scratch), 2 * math.exp(lowest), 0.0)
    row_sum = weights.sum(-1)
    known_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    # computed from the scores minus their maximum, to avoid cancellation of a large offset
    entropy = known_sum.log() - below.mul_(weights).sum(-1) / known_sum
    own_floor = floor.squeeze(-1) if shared is None else floor.squeeze(-1) - shared
    lse = own_floor + row_sum.log()
    grad = of_rows(call.grad_out, entry, row).to(scores.dtype)  # [e, H, c, D]
    # in 16 bits under all numerics, as foreshock's kernels read it
    own = of_rows(call.out, entry, row)
    output = own.to(operand).to(scores.dtype)
    delta = (grad * output).sum(-1)
    rounded = weights.to(operand).to(weights.dtype) if spec.numerics in ("kernel", "paper") else weights
    exact = times(rounded, values) / known_sum.unsqueeze(-1)
    # with dropout only the kernel knows which weights it dropped
    delta_bias = (grad * (output - exact)).sum(-1) if spec.dropout_p == 0 else torch.zeros_like(delta)
    # float64 norms do not overflow; on a CPU, the infinity norm takes ten times as long
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
    """Return the Euclidean norm of every row of `x` [..., D], computed in `dtype`: [...]."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1, dtype=dtype))


def _of_heads(norms: Tensor, like: Tensor) -> Tensor:
    """Return the largest of `norms` [e, Hkv, k] of each key head, for its query heads: [e, H, 1]. NaN counts as 0: such
    a key is hidden, or its rows are not compared."""
    return (
        norms.nan_to_num(nan=0.0, posinf=math.inf)
        .amax(-1, keepdim=True)
        .repeat_interleave(like.shape[1] // norms.shape[1], 1)
    )


def times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply `rows` [e, H, c, n] by the matrix of their key head, `matrices` [e, Hkv, n, m]: [e, H, c, m]."""
    of_key_heads = rows.reshape(*matrices.shape[:2], -1, rows.shape[3])  # [e, Hkv, H / Hkv * c, n]
    return torch.matmul(of_key_heads, matrices).view(*rows.shape[:3], -1)


def _hides(call: Call, spec: AttentionSpec) -> bool:
    """Whether some row does not see every key, apart from masks."""
    return call.cu_queries is not None or spec.right >= 0 or spec.window_left >= 0


def visible_keys(row: Tensor, call: Call, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the keys [low, high) that each of `row` [e, c] sees, given causality, window and packed sequences."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.cu_queries is not None and call.cu_keys is not None:
        sequences, positions = place(call.cu_queries, queries)
        sequence = sequences[row]  # rows after the last sequence do not see any key
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
    """Return pseudorandom numbers in [0, 2^63), int64, that depend only on `index`, int64 of the same shape.

    It applies the finaliser of splitmix64 (Steele, Lea and Flood, 2014) to a counter on the device. So the training's
    random generators do not change, and every replay of a CUDA graph draws new numbers.
    """
    z = index * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return z & 0x7FFFFFFFFFFFFFFF


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift the 64-bit words right, without sign extension."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
