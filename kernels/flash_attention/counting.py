"""What the backward does row by row: delta, the statistics of blocks of rows, and their sum in a fixed order."""

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
    at_head,
    diagonal,
    load_mean,
    load_tile,
    place,
    served_shift,
    to_operand,
)
from foreshock.kernels.flash_attention.ties import FAST_TIES_BELOW, FAST_TIES_FROM, tie_factors, tied

_SLOTS: tl.constexpr = tl.constexpr(SLOT_COUNT)
_ROWS: tl.constexpr = tl.constexpr(int(Slot.ROWS))
_TIED_BF16: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_BF16))
_TIED_ONE: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_ONE))
_SHIFTED: tl.constexpr = tl.constexpr(int(Slot.SHIFTED_ROWS))
_EMPTY: tl.constexpr = tl.constexpr(int(Slot.EMPTY_ROWS))
_NONFINITE: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_ROWS))
_SCORE_MAX: tl.constexpr = tl.constexpr(int(Slot.SCORE_MAX))
_ROW_MAX_ABS: tl.constexpr = tl.constexpr(int(Slot.ROW_MAX_ABS))
_SCORE_OFFSET_SUM: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUM))
_SCORE_OFFSET_SUMSQ: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUMSQ))
_DELTA_BIAS_SUM: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUM))
_DELTA_BIAS_ABS: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_ABS))
_DELTA_BIAS_SUMSQ: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUMSQ))
# One bit a slot: how it is merged, and whether it is counted here.
_IS_COUNT: tl.constexpr = tl.constexpr(sum(1 << slot for slot in COUNT_SLOTS))
_IS_MAXIMUM: tl.constexpr = tl.constexpr(sum(1 << slot for slot in MAX_SLOTS))
_IS_COUNTED: tl.constexpr = tl.constexpr(
    sum(
        1 << slot.value
        for slot in (
            *(_ROWS, _TIED_BF16, _TIED_ONE, _SHIFTED, _EMPTY, _NONFINITE, _SCORE_MAX, _ROW_MAX_ABS, _SCORE_OFFSET_SUM),
            *(_SCORE_OFFSET_SUMSQ, _DELTA_BIAS_SUM, _DELTA_BIAS_ABS, _DELTA_BIAS_SUMSQ),
        )
    )
)


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
    grad_out, out, residual, query, lse, row_max, log2_lses, deltas, folded, biases, commons, factors, large, modes,
    mean_keys, cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os, stride_qb, stride_qh, stride_qs,
    heads, group, length_q, length_k, dim, scale, unit, score_unit,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_MODES: tl.constexpr, RESIDUAL: tl.constexpr, COUNT: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows, from O as stored or, where the mode says so, from O before its rounding; what rounding
    O did to delta; and what the other passes need to form P."""
    block = tl.program_id(0)
    total_q = length_q
    batch, head, start_q, length_q, _, _ = place(
        tl.program_id(1), heads, cu_seqlens_q, cu_seqlens_k, length_q, length_k, PACKED
    )
    first = block * ROWS
    rows = tl.cast(batch * heads + head, tl.int64) * total_q + start_q
    queries = first + tl.arange(0, ROWS)
    inside = queries < length_q

    grad_out = at_head(grad_out, batch, head, start_q, stride_gb, stride_gh, stride_gs)
    out = at_head(out, batch, head, start_q, stride_ob, stride_oh, stride_os)
    grad = load_tile(grad_out, 0, 0, first, ROWS, stride_gs, length_q, dim, BLOCK_D, DIM_FULL, True, False)
    rounded = load_tile(out, 0, 0, first, ROWS, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, False)
    grad = grad.to(tl.float32)
    delta = tl.sum(grad * rounded.to(tl.float32), 1)
    bias = tl.zeros((ROWS,), tl.float32)
    common = tl.zeros((ROWS,), tl.float32)
    if RESIDUAL:
        residual = at_head(residual, batch, head, start_q, stride_ob, stride_oh, stride_os)
        lost = load_tile(residual, 0, 0, first, ROWS, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, False)
        bias = -tl.sum(grad * lost.to(tl.float32), 1)
        if residual.dtype.element_ty == tl.float16:
            bias *= 1.0 / RESIDUAL_SCALE_FP16
    if HAS_MODES:
        mode = tl.load(modes + head)
        if RESIDUAL:
            # Centred values take from O what rounding adds to it; delta leaves out what rounding O itself lost.
            exact = ((mode & EXACT_DELTA) != 0) | asks(mode, CENTRED_VALUES, DROPOUT)
            delta = tl.where(exact, delta - bias, delta)
        if COUNT:
            if asks(mode, CENTRED_KEYS, SOFTCAP):
                mean = load_mean(mean_keys, tl.program_id(1) // heads * (heads // group) + head // group, dim, BLOCK_D)
                asking = at_head(query, batch, head, start_q, stride_qb, stride_qh, stride_qs)
                q = load_tile(asking, 0, 0, first, ROWS, stride_qs, length_q, dim, BLOCK_D, DIM_FULL, True, False)
                common = scale * tl.sum(q.to(tl.float32) * mean[None, :], 1)
            tl.store(commons + rows + queries, common, mask=inside)
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
        wide, narrow, _, _, _ = tie_factors(largest, common, log2_lse, score_unit, unit, out.dtype.element_ty)
        tl.store(factors + 2 * (rows + queries), wide, mask=inside)
        tl.store(factors + 2 * (rows + queries) + 1, narrow, mask=inside)
        size = tl.abs(largest - common)
        odd = inside & finite(largest) & ((size >= FAST_TIES_BELOW) | (size < FAST_TIES_FROM))
        tl.store(large + tl.program_id(1) * tl.num_programs(0) + block, tl.max(odd.to(tl.int8), 0))


@triton.jit
def count_kernel(
    lse, row_max, deltas, biases, commons, codes, modes, partial, cu_seqlens_q, cu_seqlens_k, heads, length_q, length_k,
    left, right, score_unit, unit,
    ROWS: tl.constexpr, TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr,
    HAS_MODES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The statistics of a block of rows, int64 [planes, SLOT_COUNT, blocks]."""
    block = tl.program_id(0)
    total_q = length_q
    batch, head, start_q, length_q, _, length_k = place(
        tl.program_id(1), heads, cu_seqlens_q, cu_seqlens_k, length_q, length_k, PACKED
    )
    rows = tl.cast(batch * heads + head, tl.int64) * total_q + start_q
    queries = block * ROWS + tl.arange(0, ROWS)
    inside = queries < length_q
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    common = queries * 0.0
    if HAS_MODES:
        common = tl.load(commons + rows + queries, mask=inside, other=0.0)
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
    offsets = tl.where(counted, log_sum - common - tl.log2(keys.to(tl.float32)) / LOG2E, 0.0).to(tl.float64)
    bias = tl.where(counted, bias, 0.0).to(tl.float64)
    lowest = float("-inf")
    blocks = tl.num_programs(0)
    partial += tl.program_id(1).to(tl.int64) * _SLOTS * blocks + block
    _put(partial, _ROWS, blocks, tl.sum(counted.to(tl.int64), 0))
    _, _, wide_alone, narrow_alone, bf16_is_wide = tie_factors(
        largest, common, log_sum * LOG2E, score_unit, unit, DTYPE
    )
    tied_bf16, tied_one = tied(code, wide_alone, narrow_alone, bf16_is_wide)
    shifted = (code >> 14) != 0
    if HAS_MODES:
        shifted = shifted | ((served_shift(tl.load(modes + head)) & STABLE_SOFTMAX) != 0)
    _put(partial, _TIED_BF16, blocks, tl.sum((counted & tied_bf16).to(tl.int64), 0))
    _put(partial, _TIED_ONE, blocks, tl.sum((counted & tied_one).to(tl.int64), 0))
    _put(partial, _SHIFTED, blocks, tl.sum((counted & shifted).to(tl.int64), 0))
    _put(partial, _EMPTY, blocks, tl.sum(empty.to(tl.int64), 0))
    _put(partial, _NONFINITE, blocks, tl.sum((seen & (whole == 0)).to(tl.int64), 0))
    largest -= common  # statistics speak of the scores that a head computes with
    _put(partial, _SCORE_MAX, blocks, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
    _put(partial, _ROW_MAX_ABS, blocks, tl.max(tl.where(counted, tl.abs(largest), lowest), 0).to(tl.float64))
    _put(partial, _SCORE_OFFSET_SUM, blocks, tl.sum(offsets, 0))
    _put(partial, _SCORE_OFFSET_SUMSQ, blocks, tl.sum(offsets * offsets, 0))
    _put(partial, _DELTA_BIAS_SUM, blocks, tl.sum(bias, 0))
    _put(partial, _DELTA_BIAS_ABS, blocks, tl.sum(tl.abs(bias), 0))
    _put(partial, _DELTA_BIAS_SUMSQ, blocks, tl.sum(bias * bias, 0))
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
    before = tl.load(word)
    added = tl.sum(count, 0)
    if PACKED and slot == _EMPTY:
        added += total_q - tl.load(cu_seqlens_q + sequences)
    if ((_IS_COUNT >> slot) & 1) != 0:
        tl.store(word, before + added)
    elif ((_IS_MAXIMUM >> slot) & 1) != 0:
        after = tl.maximum(before.to(tl.float64, bitcast=True), tl.max(largest, 0))
        tl.store(word, after.to(tl.int64, bitcast=True))
    else:
        after = before.to(tl.float64, bitcast=True) + tl.sum(total, 0)
        tl.store(word, after.to(tl.int64, bitcast=True))
