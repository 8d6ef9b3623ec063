"""Statistics of sampled rows of any attention, in two launches: the first computes rows, the second adds them up.

A program computes some rows of one head and batch entry. It reads the keys that they see in tiles twice: first for the
maxima, then for all other statistics. `foreshock.monitor.attention.probed_rows` computes the same rows in the same way
in PyTorch, for machines without a GPU.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False
# ruff: noqa: N803  # Triton names its compile-time arguments in capitals

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.launch import compiled_for
from foreshock.kernels.flash_attention.output_check import Allowance, allowance
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.statistics import one_margin
from foreshock.kernels.flash_attention.triton_kernels.blocks import INTERPRET, LN2, LOG2E, tanh, to_operand
from foreshock.kernels.flash_attention.triton_kernels.counting import (
    DELTA_BIAS_ABS_SLOT,
    DELTA_BIAS_SUM_SLOT,
    DELTA_BIAS_SUMSQ_SLOT,
    EMPTY_SLOT,
    NONFINITE_INPUT_SLOT,
    NONFINITE_SLOT,
    ROW_MAX_ABS_SLOT,
    ROWS_SLOT,
    SCORE_MAX_SLOT,
    SCORE_OFFSET_SUM_SLOT,
    SCORE_OFFSET_SUMSQ_SLOT,
    TIED_BF16_SLOT,
    TIED_ONE_SLOT,
    add_count,
    add_sum,
    finite,
    raise_maximum,
)
from foreshock.kernels.flash_attention.triton_kernels.places import diagonal
from foreshock.kernels.flash_attention.triton_kernels.ties import bf16_tie_threshold, one_tie_threshold
from foreshock.kernels.flash_attention.visibility import BLIND, UNSEEN

# Slots that only sampled rows have.
_NONFINITE_OUTPUT_SLOT: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_OUTPUT_ROWS))
_ENTROPY_ROWS_SLOT: tl.constexpr = tl.constexpr(int(Slot.ENTROPY_ROWS))
_ENTROPY_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.ENTROPY_SUM))
_MOST_ENTROPY_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.MOST_ENTROPY_SUM))
_CHECKED_SLOT: tl.constexpr = tl.constexpr(int(Slot.CHECKED_ROWS))
_WRONG_SLOT: tl.constexpr = tl.constexpr(int(Slot.WRONG_ROWS))
_OUTPUT_ERROR_SLOT: tl.constexpr = tl.constexpr(int(Slot.OUTPUT_ERROR_MAX))
# Values of a row between the two launches, one plane [h, r] each.
_ROW_MAX: tl.constexpr = tl.constexpr(0)
_LSE: tl.constexpr = tl.constexpr(1)
_TIES_BF16: tl.constexpr = tl.constexpr(2)
_TIES_ONE: tl.constexpr = tl.constexpr(3)
_KEYS: tl.constexpr = tl.constexpr(4)
_DELTA: tl.constexpr = tl.constexpr(5)
_BIAS: tl.constexpr = tl.constexpr(6)
_ENTROPY: tl.constexpr = tl.constexpr(7)
_FINITE: tl.constexpr = tl.constexpr(8)
"""Whether the output is finite: bit 0 for the recomputed output, bit 1 for the model's."""
_ERROR: tl.constexpr = tl.constexpr(9)
"""Distance between the model's output and the recomputed one, as a fraction of the rounding bound; NaN: no bound."""
PLANES = 10
_UNSEEN: tl.constexpr = tl.constexpr(UNSEEN)
_BLIND: tl.constexpr = tl.constexpr(BLIND)
_NO_WEIGHT: tl.constexpr = tl.constexpr(-256.0)
"""An exponent of two whose power is 0 in float32. It replaces -inf for hidden keys, because 0 times infinity is NaN."""
_BOOL: tl.constexpr = tl.constexpr(1)
_ADDED: tl.constexpr = tl.constexpr(2)


@triton.jit
def draw(index, below):
    """Return a pseudorandom int64 in [0, below) for `index`: the finaliser of splitmix64, as probed_rows.drawn."""
    z = index.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z & 0x7FFFFFFFFFFFFFFF) % tl.cast(below, tl.uint64)).to(tl.int64)


@triton.jit
def load_rows(source, rows, stride, mask, dim, BLOCK_D: tl.constexpr):
    """Load `rows` of the head at `source`, [rows, BLOCK_D]; rows outside `mask` [rows] are zero."""
    columns = tl.arange(0, BLOCK_D)
    pointers = source + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tile = tl.load(pointers, mask=mask[:, None] & (columns < dim)[None, :], other=0.0)
    if INTERPRET:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def bounds(row, inside, cu_queries, cu_keys, sizes, SPEC: tl.constexpr):
    """Return the keys [low, high) that each row sees, given causality, window and ends of packed sequences."""
    length_q, length_k, sequences, left, right = sizes[4], sizes[5], sizes[6], sizes[9], sizes[10]
    first = row * 0
    end = first + length_k
    diagonal_key = row + diagonal(length_q, length_k, SPEC.TOP_LEFT)
    if SPEC.PACKED:
        sequence = row * 0
        for start in range(0, sequences, 64):
            index = start + tl.arange(0, 64)
            after = tl.load(cu_queries + 1 + index, mask=index < sequences, other=2147483647)
            sequence += tl.sum((after[None, :] <= row[:, None]).to(tl.int32), 1)
        known = inside & (sequence < sequences)  # rows after the last sequence do not see any key
        start_q = tl.load(cu_queries + sequence, mask=known, other=0)
        end_q = tl.load(cu_queries + sequence + 1, mask=known, other=0)
        first = tl.load(cu_keys + sequence, mask=known, other=0)
        end = tl.load(cu_keys + sequence + 1, mask=known, other=0)
        diagonal_key = first + row - start_q
        if not SPEC.TOP_LEFT:
            diagonal_key += (end - first) - (end_q - start_q)
    high = end
    low = first
    if SPEC.HAS_RIGHT:
        high = tl.minimum(high, diagonal_key + right + 1)
    if SPEC.HAS_LEFT:
        low = tl.maximum(low, diagonal_key - left)
    return low, tl.where(inside, tl.maximum(low, high), low)


@triton.jit
def scores_of(
    asked, key, mask, row, start, low, high, stride_k, stride_m, sizes, score_numbers,
    MASK: tl.constexpr, KEYS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Return a tile's softmax inputs (-inf for hidden keys), which keys are seen, the added bias, and the keys."""
    scale, softcap = score_numbers
    keys = start + tl.arange(0, KEYS)
    tile = load_rows(key, keys, stride_k, keys < sizes[5], sizes[7], SPEC.BLOCK_D)
    scores = tl.dot(asked, tl.trans(tile)) * scale
    if SPEC.SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    seen = keys[None, :] < high[:, None]
    if SPEC.PACKED or SPEC.HAS_LEFT:
        seen = seen & (keys[None, :] >= low[:, None])
    added = scores * 0.0
    if MASK != 0:
        pointers = mask + row[:, None].to(tl.int64) * stride_m[2] + keys[None, :].to(tl.int64) * stride_m[3]
        given = tl.load(pointers, mask=seen, other=0)
        if MASK == _BOOL:
            seen = seen & (given != 0)
        else:
            added = tl.where(seen, given.to(tl.float32), float("-inf"))
            scores += added
    return tl.where(seen, scores, float("-inf")), seen, added, tile


@triton.jit
def all_finite(rows):
    """Whether every number of each row is finite. A sum could overflow, and a maximum could drop a NaN."""
    return tl.sum((finite(rows) == 0).to(tl.int32), 1) == 0


@triton.jit
def squared_norms(rows):
    """The squared Euclidean norm of each row, in float32."""
    rows = rows.to(tl.float32)
    return tl.sum(rows * rows, 1)


@triton.jit
def output_error(given, exact, largest, mean_square, asked, key_square, value_square, scale, allowed):
    """As `output_check.distance`, but given squared norms."""
    of_values, of_norms, of_maximum, of_scores, of_largest_value, at_least = allowed
    spread = tl.sqrt(tl.maximum(mean_square - squared_norms(exact), 0.0))
    norms = tl.sqrt(squared_norms(asked)) * tl.sqrt(key_square)
    off = of_norms * tl.abs(scale) * norms + of_maximum * tl.abs(largest) + of_scores
    bound = of_values * tl.sqrt(mean_square) + of_largest_value * tl.sqrt(value_square) + at_least
    bound += (tl.exp2(2.0 * off * LOG2E) - 1.0) * spread
    return tl.sqrt(squared_norms(given - exact)) / bound


@triton.jit
def row_statistics_kernel(
    grad_out, out, query, key, value, mask, cu_queries, cu_keys, tick, kept, strides, sizes, score_numbers, allowed,
    CHECKED: tl.constexpr, MARGIN: tl.constexpr, DRAWN: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_DV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute all values of ROWS rows of one head and batch entry, and store them in the planes of `kept`."""
    stride_g, stride_o, stride_q, stride_k, stride_v, stride_m = strides
    batch, group, entries, count = sizes[0], sizes[1], sizes[2], sizes[3]
    length_q, length_k, dim, dim_v = sizes[4], sizes[5], sizes[7], sizes[8]
    place = tl.program_id(1)
    head = tl.program_id(2)
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = local < count
    entry = place.to(tl.int64)
    row = local
    if DRAWN:
        base = tl.load(tick) * (1 + entries * count)
        entry = (entry * batch + draw(base, batch)) // entries
        number = draw(base + (1 + place * count + local).to(tl.int64), length_q)
        row = ((local.to(tl.int64) * length_q + number) // count).to(tl.int32)
    row = tl.where(inside, row, 0)
    query += entry * stride_q[0] + head.to(tl.int64) * stride_q[1]
    key += entry * stride_k[0] + (head // group).to(tl.int64) * stride_k[1]
    value += entry * stride_v[0] + (head // group).to(tl.int64) * stride_v[1]
    if MASK != 0:
        mask += entry * stride_m[0] + head.to(tl.int64) * stride_m[1]
    asked = load_rows(query, row, stride_q[2], inside, dim, SPEC.BLOCK_D)
    low, high = bounds(row, inside, cu_queries, cu_keys, sizes, SPEC)
    stop = tl.max(tl.where(low < high, high, 0), 0)
    begin = tl.min(tl.where(low < high, low, stop), 0) // KEYS * KEYS
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    most_added = tl.full((ROWS,), float("-inf"), tl.float32)
    key_square = tl.full((), 0.0, tl.float32)
    for start in range(begin, stop, KEYS):
        scores, seen, added, keys_tile = scores_of(
            asked, key, mask, row, start, low, high, stride_k[2], stride_m, sizes, score_numbers, MASK, KEYS, SPEC
        )
        if CHECKED:
            key_square = tl.maximum(key_square, tl.max(squared_norms(keys_tile), 0))
        largest = tl.maximum(largest, tl.max(scores, 1))
        if MASK == _ADDED:
            most_added = tl.maximum(most_added, tl.max(added, 1))
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    tie_bf16 = bf16_tie_threshold(largest)
    tie_one = one_tie_threshold(largest, MARGIN)
    ties_bf16 = tl.zeros((ROWS,), tl.int32)
    ties_one = tl.zeros((ROWS,), tl.int32)
    visible = (high - low).to(tl.float32) if MASK == 0 else tl.zeros((ROWS,), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    depth = tl.zeros((ROWS,), tl.float32)  # sum of weights times their exponent of two
    product = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    mean_square = tl.zeros((ROWS,), tl.float32)
    value_square = tl.full((), 0.0, tl.float32)
    for start in range(begin, stop, KEYS):
        scores, seen, added, keys_tile = scores_of(
            asked, key, mask, row, start, low, high, stride_k[2], stride_m, sizes, score_numbers, MASK, KEYS, SPEC
        )
        if MASK != 0:
            shares = seen.to(tl.float32)
            if MASK == _ADDED:
                near = tl.minimum(added - most_added[:, None] + _UNSEEN, 0.0)
                shares = tl.where(seen, tl.exp2(near * LOG2E), 0.0)
            visible += tl.sum(shares, 1)
        # Both counts in one sum: a reduction over the keys costs as much as an exponential.
        tied = tl.where(scores >= tie_bf16[:, None], 1, 0) + tl.where(scores >= tie_one[:, None], 1 << 16, 0)
        counts = tl.sum(tied, 1)
        ties_bf16 += counts & 0xFFFF
        ties_one += counts >> 16
        exponent = (scores - floor[:, None]) * LOG2E
        weights = tl.exp2(exponent)
        row_sum += tl.sum(weights, 1)
        depth += tl.sum(weights * tl.maximum(exponent, _NO_WEIGHT), 1)
        keys = start + tl.arange(0, KEYS)
        values = load_rows(value, keys, stride_v[2], keys < length_k, dim_v, BLOCK_DV)
        product = tl.dot(to_operand(weights, out.dtype.element_ty), values, product)
        if CHECKED:
            squares = squared_norms(values)
            mean_square += tl.sum(weights * squares[None, :], 1)
            value_square = tl.maximum(value_square, tl.max(squares, 0))
    if MASK == _ADDED:
        visible = tl.where(visible == visible, visible, 1.0)  # NaN if the bias is not finite
        visible = tl.where(most_added <= _BLIND, 0.0, visible)
    grad_out += entry * stride_g[0] + head.to(tl.int64) * stride_g[1]
    out += entry * stride_o[0] + head.to(tl.int64) * stride_o[1]
    grad = load_rows(grad_out, row, stride_g[2], inside, dim_v, BLOCK_DV).to(tl.float32)
    given = load_rows(out, row, stride_o[2], inside, dim_v, BLOCK_DV).to(tl.float32)
    delta = tl.sum(grad * given, 1)
    bias = delta * 0.0
    known_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    exact = product / known_sum[:, None]
    if not SPEC.DROPOUT:
        bias = tl.sum(grad * (given - exact), 1)
    sound = all_finite(exact).to(tl.int32) + 2 * all_finite(given).to(tl.int32)
    plane = entries * count * tl.num_programs(2)
    kept += (head * entries + place) * count + local
    shared = tl.zeros((ROWS,), tl.float32)  # as visibility.shared_by_keys
    if MASK == _ADDED:
        shared = tl.where(finite(most_added) & (most_added > _BLIND), most_added, 0.0)
    tl.store(kept + _ROW_MAX * plane, largest - shared, mask=inside)  # may ignore a NaN score; the lse shows it
    tl.store(kept + _LSE * plane, floor - shared + tl.log2(row_sum) * LN2, mask=inside)
    tl.store(kept + _TIES_BF16 * plane, ties_bf16.to(tl.float32), mask=inside)
    tl.store(kept + _TIES_ONE * plane, ties_one.to(tl.float32), mask=inside)
    tl.store(kept + _KEYS * plane, visible, mask=inside)
    tl.store(kept + _DELTA * plane, delta - bias, mask=inside)
    tl.store(kept + _BIAS * plane, bias, mask=inside)
    tl.store(kept + _FINITE * plane, sound.to(tl.float32), mask=inside)
    if CHECKED:
        error = output_error(
            given, exact, largest, mean_square / known_sum, asked, key_square, value_square, score_numbers[0], allowed
        )
        tl.store(kept + _ERROR * plane, error, mask=inside)
    tl.store(kept + _ENTROPY * plane, (tl.log2(known_sum) - depth / known_sum) * LN2, mask=inside)


@triton.jit
def sum_kernel(state, tick, kept, stride_head, stride_slot, count, heads, CHECKED: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows of one head to its state, in a fixed order; the last program increments the tick."""
    head = tl.program_id(0)
    if head == heads:
        add_count(tick, 1)
    else:
        plane = count * heads
        kept += head * count
        state += head.to(tl.int64) * stride_head
        # Sums stay in registers until the end: with atomic adds to the state, each block would wait for the last one.
        counted_rows = tl.full((), 0, tl.int64)
        tied_bf16 = counted_rows
        tied_one = counted_rows
        empty = counted_rows
        nonfinite = counted_rows
        nonfinite_input = counted_rows
        nonfinite_output = counted_rows
        checked = counted_rows
        wrong = counted_rows
        score_max = tl.full((), float("-inf"), tl.float64)
        row_max_abs = score_max
        error_max = score_max
        offset_sum = tl.full((), 0.0, tl.float64)
        offset_sumsq = offset_sum
        bias_sum = offset_sum
        bias_abs = offset_sum
        bias_sumsq = offset_sum
        entropy_sum = offset_sum
        most_entropy_sum = offset_sum
        for start in range(0, count, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < count
            largest = tl.load(kept + _ROW_MAX * plane + rows, mask=inside, other=0.0)
            lse = tl.load(kept + _LSE * plane + rows, mask=inside, other=0.0)
            ties_bf16 = tl.load(kept + _TIES_BF16 * plane + rows, mask=inside, other=0.0)
            ties_one = tl.load(kept + _TIES_ONE * plane + rows, mask=inside, other=0.0)
            keys = tl.load(kept + _KEYS * plane + rows, mask=inside, other=0.0)
            delta = tl.load(kept + _DELTA * plane + rows, mask=inside, other=0.0)
            bias = tl.load(kept + _BIAS * plane + rows, mask=inside, other=0.0)
            entropy = tl.load(kept + _ENTROPY * plane + rows, mask=inside, other=0.0)
            sound = tl.load(kept + _FINITE * plane + rows, mask=inside, other=0.0).to(tl.int32)
            entered = finite(largest) & finite(lse) & ((sound & 1) != 0)
            whole = finite(largest) & finite(lse) & finite(delta) & finite(bias)
            seen = inside & (keys > 0)
            counted = seen & whole
            most_entropy = tl.log2(tl.where(counted, keys, 1.0)) * LN2
            offset = tl.where(counted, lse - most_entropy, 0.0).to(tl.float64)
            bias = tl.where(counted, bias, 0.0).to(tl.float64)
            lowest = float("-inf")
            counted_rows += tl.sum(counted.to(tl.int64), 0)
            tied_bf16 += tl.sum((counted & (ties_bf16 > 1)).to(tl.int64), 0)
            tied_one += tl.sum((counted & (ties_one > 1)).to(tl.int64), 0)
            empty += tl.sum((inside & (keys == 0)).to(tl.int64), 0)
            broken = seen & (whole == 0)
            nonfinite += tl.sum(broken.to(tl.int64), 0)
            nonfinite_input += tl.sum((broken & (entered == 0)).to(tl.int64), 0)
            nonfinite_output += tl.sum((broken & entered & ((sound & 2) == 0)).to(tl.int64), 0)
            score_max = tl.maximum(score_max, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
            size = tl.where(counted, tl.abs(largest), lowest)
            row_max_abs = tl.maximum(row_max_abs, tl.max(size, 0).to(tl.float64))
            offset_sum += tl.sum(offset, 0)
            offset_sumsq += tl.sum(offset * offset, 0)
            bias_sum += tl.sum(bias, 0)
            bias_abs += tl.sum(tl.abs(bias), 0)
            bias_sumsq += tl.sum(bias * bias, 0)
            entropy_sum += tl.sum(tl.where(counted, entropy, 0.0).to(tl.float64), 0)
            most_entropy_sum += tl.sum(most_entropy.to(tl.float64), 0)
            if CHECKED:
                error = tl.load(kept + _ERROR * plane + rows, mask=inside, other=0.0)
                compared = counted & (error == error)
                checked += tl.sum(compared.to(tl.int64), 0)
                wrong += tl.sum((compared & (error > 1.0)).to(tl.int64), 0)
                error_max = tl.maximum(error_max, tl.max(tl.where(compared, error, lowest), 0).to(tl.float64))
        add_count(state + ROWS_SLOT * stride_slot, counted_rows)
        add_count(state + TIED_BF16_SLOT * stride_slot, tied_bf16)
        add_count(state + TIED_ONE_SLOT * stride_slot, tied_one)
        add_count(state + EMPTY_SLOT * stride_slot, empty)
        add_count(state + NONFINITE_SLOT * stride_slot, nonfinite)
        add_count(state + NONFINITE_INPUT_SLOT * stride_slot, nonfinite_input)
        add_count(state + _NONFINITE_OUTPUT_SLOT * stride_slot, nonfinite_output)
        raise_maximum(state + SCORE_MAX_SLOT * stride_slot, score_max)
        raise_maximum(state + ROW_MAX_ABS_SLOT * stride_slot, row_max_abs)
        add_sum(state + SCORE_OFFSET_SUM_SLOT * stride_slot, offset_sum)
        add_sum(state + SCORE_OFFSET_SUMSQ_SLOT * stride_slot, offset_sumsq)
        add_sum(state + DELTA_BIAS_SUM_SLOT * stride_slot, bias_sum)
        add_sum(state + DELTA_BIAS_ABS_SLOT * stride_slot, bias_abs)
        add_sum(state + DELTA_BIAS_SUMSQ_SLOT * stride_slot, bias_sumsq)
        add_count(state + _ENTROPY_ROWS_SLOT * stride_slot, counted_rows)
        add_sum(state + _ENTROPY_SUM_SLOT * stride_slot, entropy_sum)
        add_sum(state + _MOST_ENTROPY_SUM_SLOT * stride_slot, most_entropy_sum)
        if CHECKED:
            add_count(state + _CHECKED_SLOT * stride_slot, checked)
            add_count(state + _WRONG_SLOT * stride_slot, wrong)
            raise_maximum(state + _OUTPUT_ERROR_SLOT * stride_slot, error_max)


def serves(query: Tensor, key: Tensor, value: Tensor, out: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels support these tensors: 16 bits, rows of adjacent elements, head dims up to 256."""
    tensors = (query, key, value, out)
    return (
        spec.numerics == "kernel"
        and max(query.shape[3], value.shape[3]) <= 256
        and all(t.dtype == query.dtype and t.element_size() == 2 and t.stride(3) == 1 for t in tensors)
    )


def tiles_for(width: int, count: int) -> dict[str, int]:
    """Return rows and keys of a tile and warps of a program, for head dims up to `width` and `count` rows per entry."""
    narrow = width <= 128
    rows = min(64 if narrow else 32, max(16, 1 << (count - 1).bit_length()))
    return {"ROWS": rows, "KEYS": 64 if narrow else 32, "num_warps": 4}


def count_sampled_rows(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    state: Tensor,
    tick: Tensor,
    chosen: tuple[int, int],
    spec: AttentionSpec,
) -> None:
    """Add sampled rows of each head to `state`, and increment `tick`. Never waits for the device.

    chosen: number of batch entries, and of rows per entry; if that is all rows, each is counted once. query is
    [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv]; out and grad_out are [B, H, Sq, Dv]. mask is bool or
    added to the scores, and broadcasts to [B, H, Sq, Sk]. cu_queries and cu_keys are int32 [N + 1] if N sequences are
    packed (B = 1). state is int64 [H, SLOT_COUNT], tick int64 [1].
    """
    batch, heads, length_q, dim = query.shape
    length_k, dim_v = value.shape[2:]
    entries, count = chosen
    if grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    if mask is not None:
        mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(batch, heads, length_q, length_k)
    packed = cu_queries is not None
    kept = torch.empty(PLANES, heads, entries * count, dtype=torch.float32, device=query.device)
    compiled = compiled_for(spec, dim, packed=packed)
    block_v = max(16, 1 << (dim_v - 1).bit_length())
    tiles = tiles_for(max(compiled.BLOCK_D, block_v), count)
    allowed = allowance(query.dtype, spec, dim, length_k)
    checked = allowed is not None
    row_statistics_kernel[(triton.cdiv(count, tiles["ROWS"]), entries, heads)](
        grad_out, out, query, key, value, mask, cu_queries, cu_keys, tick, kept,
        (
            *(grad_out.stride(), out.stride(), query.stride(), key.stride(), value.stride()),
            (0, 0, 0, 0) if mask is None else mask.stride(),
        ),
        (
            *(batch, heads // key.shape[1], entries, count, length_q, length_k),
            *(0 if cu_queries is None else len(cu_queries) - 1, dim, dim_v, spec.window_left, spec.right),
        ),
        (float(spec.scale), float(spec.softcap)), tuple(allowed or Allowance(*[0.0] * 6)), CHECKED=checked,
        MARGIN=one_margin(query.dtype),
        DRAWN=(entries, count) != (batch, length_q),
        MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
        BLOCK_DV=block_v, SPEC=compiled, **tiles,
    )  # fmt: skip
    sum_kernel[(heads + 1,)](
        state, tick, kept, *state.stride(), entries * count, heads, CHECKED=checked, BLOCK=1024, num_warps=8
    )
