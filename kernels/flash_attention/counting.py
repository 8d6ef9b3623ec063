"""The backward's first and last pass: delta and the statistics of every row, and their sum in a fixed order."""

import triton
import triton.language as tl

from foreshock.contract.slots import SLOT_COUNT, Mode, Slot
from foreshock.kernels.flash_attention.blocks import LOG2E, diagonal, load_tile, sequence

_EXACT_DELTA: tl.constexpr = tl.constexpr(int(Mode.EXACT_DELTA))
_SLOTS: tl.constexpr = tl.constexpr(SLOT_COUNT)
_TIED_BF16: tl.constexpr = tl.constexpr(int(Slot.ROWS_TIED_BF16))
_TIED_ONE: tl.constexpr = tl.constexpr(int(Slot.ROWS_TIED_ONE))
_SHIFTED: tl.constexpr = tl.constexpr(int(Slot.ROWS_SHIFTED))
_EMPTY: tl.constexpr = tl.constexpr(int(Slot.ROWS_EMPTY))
_NONFINITE: tl.constexpr = tl.constexpr(int(Slot.ROWS_NONFINITE))
_SCORE_MAX: tl.constexpr = tl.constexpr(int(Slot.SCORE_MAX))
_OFFSET_SUM: tl.constexpr = tl.constexpr(int(Slot.OFFSET_SUM))
_DELTA_BIAS_SUM: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUM))


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _put(partial, slot: tl.constexpr, blocks, value):
    tl.store(partial + slot * blocks, value.to(tl.int64, bitcast=True))


@triton.jit
def row_kernel(
    grad_out, out, residual, lse, row_max, row_sum, shifts, log2_sums, deltas, partial, modes,
    cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os,
    heads, length_q, length_k, dim, score_unit, left, right,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HAS_MODES: tl.constexpr,
    RESIDUAL: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows, from O as stored or, under EXACT_DELTA, from O before its rounding; what the other
    passes need to form P; and the block's statistics, [planes, SLOT_COUNT, blocks]."""
    block = tl.program_id(0)
    index = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, start_k, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
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
        lost = load_tile(residual + start_out, 0, 0, first, ROWS, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, False)
        bias = -tl.sum(grad * lost.to(tl.float32), 1)
        if HAS_MODES:
            exact = (tl.load(modes + head) & _EXACT_DELTA) != 0
            delta = tl.where(exact, delta - bias, delta)
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    total = tl.load(row_sum + rows + queries, mask=inside, other=1.0)
    tl.store(deltas + rows + queries, delta, mask=inside)
    tl.store(shifts + rows + queries, tl.where(largest == float("-inf"), 0.0, largest / score_unit), mask=inside)
    # A row that sees no key has sum 0: its P must be 0, not NaN.
    tl.store(log2_sums + rows + queries, tl.where(total == 0.0, float("inf"), tl.log2(tl.abs(total))), mask=inside)

    if COUNT:
        high = length_k + queries * 0
        low = queries * 0
        offset = diagonal(length_q, length_k, TOP_LEFT)
        if HAS_RIGHT:
            high = tl.minimum(high, queries + (offset + right + 1))
        if HAS_LEFT:
            low = tl.maximum(low, queries + (offset - left))
        keys = tl.maximum(high - low, 0)
        empty = inside & (keys == 0)
        log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
        finite = _finite(largest) & _finite(log_sum) & _finite(delta) & _finite(bias)
        counted = inside & finite & (keys > 0)
        partial += tl.program_id(1).to(tl.int64) * _SLOTS * tl.num_programs(0) + block
        blocks = tl.num_programs(0)
        _put(partial, 0, blocks, tl.sum(counted.to(tl.int64), 0))
        _put(partial, _SHIFTED, blocks, tl.sum((counted & (total < 0.0)).to(tl.int64), 0))
        _put(partial, _EMPTY, blocks, tl.sum(empty.to(tl.int64), 0))
        _put(partial, _NONFINITE, blocks, tl.sum((inside & (keys > 0) & (finite == 0)).to(tl.int64), 0))
        lowest = float("-inf")
        _put(partial, _SCORE_MAX, blocks, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
        _put(partial, _SCORE_MAX + 1, blocks, tl.max(tl.where(counted, tl.abs(largest), lowest), 0).to(tl.float64))
        keys = tl.where(counted, keys, 1)
        offsets = tl.where(counted, log_sum - tl.log2(keys.to(tl.float32)) / LOG2E, 0.0).to(tl.float64)
        _put(partial, _OFFSET_SUM, blocks, tl.sum(offsets, 0))
        _put(partial, _OFFSET_SUM + 1, blocks, tl.sum(offsets * offsets, 0))
        biases = tl.where(counted, bias, 0.0).to(tl.float64)
        _put(partial, _DELTA_BIAS_SUM, blocks, tl.sum(biases, 0))
        _put(partial, _DELTA_BIAS_SUM + 1, blocks, tl.sum(tl.abs(biases), 0))
        _put(partial, _DELTA_BIAS_SUM + 2, blocks, tl.sum(biases * biases, 0))


@triton.jit
def merge_kernel(
    state, partial, tie_counts, cu_seqlens_q, stride_head, stride_slot, heads, sequences, total_q, blocks, tie_blocks,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add every block's statistics to one slot of one head's state, in the order of sequences and blocks."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    is_tie = (slot == _TIED_BF16) | (slot == _TIED_ONE)
    count = tl.full((BLOCK,), 0, tl.int64)
    total = tl.full((BLOCK,), 0.0, tl.float64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float64)
    columns = tl.arange(0, BLOCK)
    source = partial + slot * blocks
    plane_stride = _SLOTS * blocks
    length = blocks
    if is_tie:
        source = tie_counts + (slot - _TIED_BF16) * tie_blocks
        plane_stride = 2 * tie_blocks
        length = tie_blocks
    for index in range(0, sequences):
        plane = source + tl.cast(index * heads + head, tl.int64) * plane_stride
        for start in range(0, length, BLOCK):
            mask = start + columns < length
            words = tl.load(plane + start + columns, mask=mask, other=0)
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
    elif slot < _OFFSET_SUM:
        after = tl.maximum(before.to(tl.float64, bitcast=True), tl.max(largest, 0))
        tl.store(word, after.to(tl.int64, bitcast=True))
    else:
        after = before.to(tl.float64, bitcast=True) + tl.sum(total, 0)
        tl.store(word, after.to(tl.int64, bitcast=True))
