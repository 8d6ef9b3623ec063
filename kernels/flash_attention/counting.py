"""What the backward does row by row: delta, the statistics of blocks of rows, and their sum in a fixed order."""

import triton
import triton.language as tl

from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.kernels.flash_attention.blocks import (
    EXACT_DELTA,
    LOG2E,
    RESIDUAL_SCALE_FP16,
    STABLE_SOFTMAX,
    diagonal,
    load_tile,
    sequence,
    to_operand,
)
from foreshock.kernels.flash_attention.ties import FAST_TIES_BELOW, FAST_TIES_FROM, tie_factors, tied

_SLOTS: tl.constexpr = tl.constexpr(SLOT_COUNT)
_TIED_BF16: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_BF16))
_EMPTY: tl.constexpr = tl.constexpr(int(Slot.EMPTY_ROWS))
_NONFINITE: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_ROWS))
_SCORE_MAX: tl.constexpr = tl.constexpr(int(Slot.SCORE_MAX))
_SCORE_OFFSET_SUM: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUM))
_DELTA_BIAS_SUM: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUM))


@triton.jit
def finite(x):
    """Neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def _put(partial, slot: tl.constexpr, blocks, value):
    tl.store(partial + slot * blocks, value.to(tl.int64, bitcast=True))


@triton.jit
def fold(rows, column):
    """fp32 `rows` as three bf16 summands in columns 0 to 2, so that a matrix product with ones adds them exactly."""
    rows = rows[:, None]
    high = to_operand(rows, tl.bfloat16).to(tl.float32)
    middle = to_operand(rows - high, tl.bfloat16).to(tl.float32)
    low = to_operand(rows - high - middle, tl.bfloat16).to(tl.float32)
    return tl.where(column == 0, high, tl.where(column == 1, middle, tl.where(column == 2, low, 0.0)))


@triton.jit
def row_kernel(
    grad_out, out, residual, lse, row_max, log2_lses, deltas, folded, biases, factors, large, modes, cu_seqlens_q,
    cu_seqlens_k,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, heads, length_q, length_k, dim, unit, score_unit,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, PACKED: tl.constexpr, HAS_MODES: tl.constexpr,
    RESIDUAL: tl.constexpr, COUNT: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows, from O as stored or, under EXACT_DELTA, from O before its rounding; what rounding O did
    to delta; and what the other passes need to form P."""
    block = tl.program_id(0)
    index = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, _, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
    first = block * ROWS
    rows = tl.cast(batch * heads + head, tl.int64) * total_q + start_q
    queries = first + tl.arange(0, ROWS)
    inside = queries < length_q

    grad_out += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
    grad_out += tl.cast(start_q, tl.int64) * stride_gs
    start_out = tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
    start_out += tl.cast(start_q, tl.int64) * stride_os
    grad = load_tile(grad_out, 0, 0, first, ROWS, stride_gs, length_q, dim, BLOCK_D, DIM_FULL, True, False)
    rounded = load_tile(out + start_out, 0, 0, first, ROWS, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, False)
    grad = grad.to(tl.float32)
    delta = tl.sum(grad * rounded.to(tl.float32), 1)
    bias = tl.zeros((ROWS,), tl.float32)
    if RESIDUAL:
        lost = load_tile(
            residual + start_out, 0, 0, first, ROWS, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, False
        )
        bias = -tl.sum(grad * lost.to(tl.float32), 1)
        if residual.dtype.element_ty == tl.float16:
            bias *= 1.0 / RESIDUAL_SCALE_FP16
        if HAS_MODES:
            exact = (tl.load(modes + head) & EXACT_DELTA) != 0
            delta = tl.where(exact, delta - bias, delta)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    # A row that sees no key has lse -inf: its P must be 0, not NaN.
    log2_lse = tl.where(log_sum == float("-inf"), 1e30, log_sum * LOG2E)
    tl.store(deltas + rows + queries, delta, mask=inside)
    tl.store(log2_lses + rows + queries, log2_lse, mask=inside)
    if FOLD:
        column = tl.arange(0, 16)[None, :]
        parts = fold(-log2_lse / unit, column) + fold(-delta, column - 3)
        pointers = folded + (rows + queries)[:, None] * 16 + column
        tl.store(pointers, parts.to(tl.bfloat16), mask=inside[:, None])
    if COUNT:
        tl.store(biases + rows + queries, bias, mask=inside)
        largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
        wide, narrow, _, _, _ = tie_factors(largest, log2_lse, score_unit, unit, out.dtype.element_ty)
        tl.store(factors + 2 * (rows + queries), wide, mask=inside)
        tl.store(factors + 2 * (rows + queries) + 1, narrow, mask=inside)
        size = tl.abs(largest)
        odd = inside & finite(largest) & ((size >= FAST_TIES_BELOW) | (size < FAST_TIES_FROM))
        tl.store(large + tl.program_id(1) * tl.num_programs(0) + block, tl.max(odd.to(tl.int8), 0))


@triton.jit
def count_kernel(
    lse, row_max, deltas, biases, codes, modes, partial, cu_seqlens_q, cu_seqlens_k, heads, length_q, length_k, left,
    right, score_unit, unit,
    ROWS: tl.constexpr, TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr,
    HAS_MODES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The statistics of a block of rows, int64 [planes, SLOT_COUNT, blocks]."""
    block = tl.program_id(0)
    index = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, _, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
    rows = tl.cast(batch * heads + head, tl.int64) * total_q + start_q
    queries = block * ROWS + tl.arange(0, ROWS)
    inside = queries < length_q
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
    bias = tl.load(biases + rows + queries, mask=inside, other=0.0)
    code = tl.load(codes + rows + queries, mask=inside, other=0).to(tl.int32)
    high = length_k + queries * 0
    low = queries * 0
    offset = diagonal(length_q, length_k, TOP_LEFT)
    if HAS_RIGHT:
        high = tl.minimum(high, queries + (offset + right + 1))
    if HAS_LEFT:
        low = tl.maximum(low, queries + (offset - left))
    keys = tl.maximum(high - low, 0)
    whole = finite(largest) & finite(log_sum) & finite(delta) & finite(bias)
    seen = inside & (keys > 0)
    counted = seen & whole
    empty = inside & (keys == 0)
    keys = tl.where(counted, keys, 1)
    offsets = tl.where(counted, log_sum - tl.log2(keys.to(tl.float32)) / LOG2E, 0.0).to(tl.float64)
    bias = tl.where(counted, bias, 0.0).to(tl.float64)
    lowest = float("-inf")
    blocks = tl.num_programs(0)
    partial += tl.program_id(1).to(tl.int64) * _SLOTS * blocks + block
    _put(partial, 0, blocks, tl.sum(counted.to(tl.int64), 0))
    _, _, wide_alone, narrow_alone, bf16_is_wide = tie_factors(largest, log_sum * LOG2E, score_unit, unit, DTYPE)
    tied_bf16, tied_one = tied(code, wide_alone, narrow_alone, bf16_is_wide)
    shifted = (code >> 14) != 0
    if HAS_MODES:
        shifted = shifted | ((tl.load(modes + head) & STABLE_SOFTMAX) != 0)
    _put(partial, _TIED_BF16, blocks, tl.sum((counted & tied_bf16).to(tl.int64), 0))
    _put(partial, _TIED_BF16 + 1, blocks, tl.sum((counted & tied_one).to(tl.int64), 0))
    _put(partial, _TIED_BF16 + 2, blocks, tl.sum((counted & shifted).to(tl.int64), 0))
    _put(partial, _EMPTY, blocks, tl.sum(empty.to(tl.int64), 0))
    _put(partial, _NONFINITE, blocks, tl.sum((seen & (whole == 0)).to(tl.int64), 0))
    _put(partial, _SCORE_MAX, blocks, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
    _put(partial, _SCORE_MAX + 1, blocks, tl.max(tl.where(counted, tl.abs(largest), lowest), 0).to(tl.float64))
    _put(partial, _SCORE_OFFSET_SUM, blocks, tl.sum(offsets, 0))
    _put(partial, _SCORE_OFFSET_SUM + 1, blocks, tl.sum(offsets * offsets, 0))
    _put(partial, _DELTA_BIAS_SUM, blocks, tl.sum(bias, 0))
    _put(partial, _DELTA_BIAS_SUM + 1, blocks, tl.sum(tl.abs(bias), 0))
    _put(partial, _DELTA_BIAS_SUM + 2, blocks, tl.sum(bias * bias, 0))


@triton.jit
def merge_kernel(
    state, partial, cu_seqlens_q, stride_head, stride_slot, heads, sequences, total_q, blocks,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add every block's statistics to one slot of one head's state, in the order of sequences and blocks."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    source = partial + slot * blocks
    count = tl.full((BLOCK,), 0, tl.int64)
    total = tl.full((BLOCK,), 0.0, tl.float64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, sequences * blocks, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        mask = entry < sequences * blocks
        plane = (entry // blocks) * heads + head
        words = tl.load(source + plane.to(tl.int64) * (_SLOTS * blocks) + entry % blocks, mask=mask, other=0)
        values = words.to(tl.float64, bitcast=True)
        count += words
        total += values
        largest = tl.maximum(largest, tl.where(mask, values, float("-inf")))
    word = state + head * stride_head + slot * stride_slot
    before = tl.load(word)
    added = tl.sum(count, 0)
    if PACKED and slot == _EMPTY:
        added += total_q - tl.load(cu_seqlens_q + sequences)
    if slot < _SCORE_MAX:
        tl.store(word, before + added)
    elif slot < _SCORE_OFFSET_SUM:
        after = tl.maximum(before.to(tl.float64, bitcast=True), tl.max(largest, 0))
        tl.store(word, after.to(tl.int64, bitcast=True))
    else:
        after = before.to(tl.float64, bitcast=True) + tl.sum(total, 0)
        tl.store(word, after.to(tl.int64, bitcast=True))
