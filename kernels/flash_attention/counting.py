"""What the backward does row by row: delta, the statistics of blocks of rows, and their sum in a fixed order."""

from typing import Final

import triton
import triton.language as tl

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SLOT_COUNT, Slot
from foreshock.kernels.flash_attention.blocks import (
    CENTRED_KEYS,
    CENTRED_VALUES,
    EXACT_DELTA,
    LOG2E,
    RESIDUAL_SCALE_FP16,
    STABLE_SOFTMAX,
    asks,
    load_mean,
    load_tile,
    served_shift,
    to_operand,
)
from foreshock.kernels.flash_attention.places import at_head, diagonal, one_head
from foreshock.kernels.flash_attention.ties import FAST_TIES_BELOW, FAST_TIES_FROM, tie_factors, tied

_SLOTS: tl.constexpr = tl.constexpr(SLOT_COUNT)
ROWS_SLOT: tl.constexpr = tl.constexpr(int(Slot.ROWS))
TIED_BF16_SLOT: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_BF16))
TIED_ONE_SLOT: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_ONE))
SHIFTED_SLOT: tl.constexpr = tl.constexpr(int(Slot.SHIFTED_ROWS))
EMPTY_SLOT: tl.constexpr = tl.constexpr(int(Slot.EMPTY_ROWS))
NONFINITE_SLOT: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_ROWS))
SCORE_MAX_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_MAX))
ROW_MAX_ABS_SLOT: tl.constexpr = tl.constexpr(int(Slot.ROW_MAX_ABS))
SCORE_OFFSET_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUM))
SCORE_OFFSET_SUMSQ_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUMSQ))
DELTA_BIAS_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUM))
DELTA_BIAS_ABS_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_ABS))
DELTA_BIAS_SUMSQ_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUMSQ))
# One bit a slot: how it is merged, and whether it is counted here.
_IS_COUNT: tl.constexpr = tl.constexpr(sum(1 << slot for slot in COUNT_SLOTS))
_IS_MAXIMUM: tl.constexpr = tl.constexpr(sum(1 << slot for slot in MAX_SLOTS))
_COUNTED: Final = (
    *(ROWS_SLOT, TIED_BF16_SLOT, TIED_ONE_SLOT, SHIFTED_SLOT, EMPTY_SLOT, NONFINITE_SLOT, SCORE_MAX_SLOT),
    *(ROW_MAX_ABS_SLOT, SCORE_OFFSET_SUM_SLOT, SCORE_OFFSET_SUMSQ_SLOT),
    *(DELTA_BIAS_SUM_SLOT, DELTA_BIAS_ABS_SLOT, DELTA_BIAS_SUMSQ_SLOT),
)
_IS_COUNTED: tl.constexpr = tl.constexpr(sum(1 << slot.value for slot in _COUNTED))


@triton.jit
def finite(x):
    """Neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def add_count(word, amount):
    """Add to a word of the state. All three are atomic: backwards of several streams may count into one state."""
    tl.atomic_add(word, amount, sem="relaxed")


@triton.jit
def add_sum(word, amount):
    """Add a float64 to a word of the state."""
    tl.atomic_add(word.to(tl.pointer_type(tl.float64), bitcast=True), amount, sem="relaxed")


@triton.jit
def raise_maximum(word, value):
    """Raise a word of the state to a float64 that is no NaN, where that is larger."""
    # -0.0 compares as positive and has the bits of the least integer: as a sum with 0 it is 0.
    tl.atomic_max(word.to(tl.pointer_type(tl.float64), bitcast=True), value + 0.0, sem="relaxed")


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
    grad_out, out, residual, query, lse, row_max, log2_lses, deltas, folded, biases, commons, factors, large, modes,
    mean_keys, cu_seqlens_q, cu_seqlens_k, strides, sizes, SPEC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows, from O as stored or, where the mode says so, from O before its rounding; what rounding
    O did to delta; and what the other passes need to form P."""
    block = tl.program_id(0)
    stride_g, stride_o, stride_q = strides
    heads, group, _, _, dim, scale, unit, score_unit = sizes
    place, _, rows, start_q, length_q, _, _ = one_head(tl.program_id(1), sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    batch, head, kv_head = place
    first = block * ROWS
    queries = first + tl.arange(0, ROWS)
    inside = queries < length_q

    grad_out = at_head(grad_out, batch, head, start_q, stride_g)
    out = at_head(out, batch, head, start_q, stride_o)
    grad = load_tile(grad_out, 0, 0, first, ROWS, stride_g[2], length_q, dim, SPEC, True, False)
    rounded = load_tile(out, 0, 0, first, ROWS, stride_o[2], length_q, dim, SPEC, True, False)
    grad = grad.to(tl.float32)
    delta = tl.sum(grad * rounded.to(tl.float32), 1)
    bias = tl.zeros((ROWS,), tl.float32)
    common = tl.zeros((ROWS,), tl.float32)
    if residual is not None:
        residual = at_head(residual, batch, head, start_q, stride_o)
        lost = load_tile(residual, 0, 0, first, ROWS, stride_o[2], length_q, dim, SPEC, True, False)
        bias = -tl.sum(grad * lost.to(tl.float32), 1)
        if residual.dtype.element_ty == tl.float16:
            bias *= 1.0 / RESIDUAL_SCALE_FP16
    if modes is not None:
        mode = tl.load(modes + head)
        if residual is not None:
            # Centred values take from O what rounding adds to it; delta leaves out what rounding O itself lost.
            exact = ((mode & EXACT_DELTA) != 0) | asks(mode, CENTRED_VALUES, SPEC.DROPOUT)
            delta = tl.where(exact, delta - bias, delta)
        if factors is not None:
            if asks(mode, CENTRED_KEYS, SPEC.SOFTCAP):
                mean = load_mean(mean_keys, tl.program_id(1) // heads * (heads // group) + kv_head, dim, SPEC.BLOCK_D)
                asking = at_head(query, batch, head, start_q, stride_q)
                q = load_tile(asking, 0, 0, first, ROWS, stride_q[2], length_q, dim, SPEC, True, False)
                common = scale * tl.sum(q.to(tl.float32) * mean[None, :], 1)
            tl.store(commons + rows + queries, common, mask=inside)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    # A row that sees no key has lse -inf: its P must be 0, not NaN.
    log2_lse = tl.where(log_sum == float("-inf"), 1e30, log_sum * LOG2E)
    tl.store(deltas + rows + queries, delta, mask=inside)
    tl.store(log2_lses + rows + queries, log2_lse, mask=inside)
    if folded is not None:
        column = tl.arange(0, 16)[None, :]
        parts = fold(-log2_lse / unit, column) + fold(-delta, column - 3)
        pointers = folded + (rows + queries)[:, None] * 8 + column
        tl.store(pointers, parts.to(tl.bfloat16), mask=inside[:, None] & (column < 8))
    if factors is not None:
        tl.store(biases + rows + queries, bias, mask=inside)
        largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
        wide, narrow, _, _, _ = tie_factors(largest, common, log2_lse, score_unit, unit, out.dtype.element_ty)
        tl.store(factors + 2 * (rows + queries), wide, mask=inside)
        tl.store(factors + 2 * (rows + queries) + 1, narrow, mask=inside)
        size = tl.abs(largest - common)
        odd = inside & finite(largest) & ((size >= FAST_TIES_BELOW) | (size < FAST_TIES_FROM))
        tl.store(large + tl.program_id(1) * tl.num_programs(0) + block, tl.max(odd.to(tl.int8), 0))


@triton.jit
def count_kernel(
    lse, row_max, deltas, biases, commons, codes, modes, partial, cu_seqlens_q, cu_seqlens_k, sizes,
    SPEC: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The statistics of a block of rows, int64 [planes, SLOT_COUNT, blocks]."""
    block = tl.program_id(0)
    _, _, _, _, left, right, score_unit, unit = sizes
    place, _, rows, _, length_q, _, length_k = one_head(tl.program_id(1), sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    queries = block * ROWS + tl.arange(0, ROWS)
    inside = queries < length_q
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    common = queries * 0.0
    if modes is not None:
        common = tl.load(commons + rows + queries, mask=inside, other=0.0)
    delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
    bias = tl.load(biases + rows + queries, mask=inside, other=0.0)
    code = tl.load(codes + rows + queries, mask=inside, other=0).to(tl.int32)
    high = length_k + queries * 0
    low = queries * 0
    offset = diagonal(length_q, length_k, SPEC.TOP_LEFT)
    if SPEC.HAS_RIGHT:
        high = tl.minimum(high, queries + (offset + right + 1))
    if SPEC.HAS_LEFT:
        low = tl.maximum(low, queries + (offset - left))
    keys = tl.maximum(high - low, 0)
    whole = finite(largest) & finite(log_sum) & finite(delta) & finite(bias)
    seen = inside & (keys > 0)
    counted = seen & whole
    empty = inside & (keys == 0)
    keys = tl.where(counted, keys, 1)
    offsets = tl.where(counted, log_sum - common - tl.log2(keys.to(tl.float32)) / LOG2E, 0.0).to(tl.float64)
    bias = tl.where(counted, bias, 0.0).to(tl.float64)
    lowest = float("-inf")
    blocks = tl.num_programs(0)
    partial += tl.program_id(1).to(tl.int64) * _SLOTS * blocks + block
    _put(partial, ROWS_SLOT, blocks, tl.sum(counted.to(tl.int64), 0))
    _, _, wide_alone, narrow_alone, bf16_is_wide = tie_factors(
        largest, common, log_sum * LOG2E, score_unit, unit, DTYPE
    )
    tied_bf16, tied_one = tied(code, wide_alone, narrow_alone, bf16_is_wide)
    shifted = (code >> 14) != 0
    if modes is not None:
        shifted = shifted | ((served_shift(tl.load(modes + place[1])) & STABLE_SOFTMAX) != 0)
    _put(partial, TIED_BF16_SLOT, blocks, tl.sum((counted & tied_bf16).to(tl.int64), 0))
    _put(partial, TIED_ONE_SLOT, blocks, tl.sum((counted & tied_one).to(tl.int64), 0))
    _put(partial, SHIFTED_SLOT, blocks, tl.sum((counted & shifted).to(tl.int64), 0))
    _put(partial, EMPTY_SLOT, blocks, tl.sum(empty.to(tl.int64), 0))
    _put(partial, NONFINITE_SLOT, blocks, tl.sum((seen & (whole == 0)).to(tl.int64), 0))
    largest -= common  # statistics speak of the scores that a head computes with
    _put(partial, SCORE_MAX_SLOT, blocks, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
    _put(partial, ROW_MAX_ABS_SLOT, blocks, tl.max(tl.where(counted, tl.abs(largest), lowest), 0).to(tl.float64))
    _put(partial, SCORE_OFFSET_SUM_SLOT, blocks, tl.sum(offsets, 0))
    _put(partial, SCORE_OFFSET_SUMSQ_SLOT, blocks, tl.sum(offsets * offsets, 0))
    _put(partial, DELTA_BIAS_SUM_SLOT, blocks, tl.sum(bias, 0))
    _put(partial, DELTA_BIAS_ABS_SLOT, blocks, tl.sum(tl.abs(bias), 0))
    _put(partial, DELTA_BIAS_SUMSQ_SLOT, blocks, tl.sum(bias * bias, 0))
    for slot in tl.static_range(_SLOTS):  # to what is counted elsewhere nothing is added
        if ((_IS_COUNTED >> slot) & 1) == 0:
            if ((_IS_MAXIMUM >> slot) & 1) != 0:
                _put(partial, slot, blocks, tl.full((), float("-inf"), tl.float64))
            else:
                tl.store(partial + slot * blocks, tl.full((), 0, tl.int64))


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
    added = tl.sum(count, 0)
    if PACKED and slot == EMPTY_SLOT:
        added += total_q - tl.load(cu_seqlens_q + sequences)
    if ((_IS_COUNT >> slot) & 1) != 0:
        add_count(word, added)
    elif ((_IS_MAXIMUM >> slot) & 1) != 0:
        raise_maximum(word, tl.max(largest, 0))
    else:
        add_sum(word, tl.sum(total, 0))
