"""The last pass of the backward: the statistics of blocks of rows, and their sum in a fixed order."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SLOT_COUNT, Slot
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    LOG2E,
    PAPER_SOFTMAX,
    PAPER_TOLERANCE,
)
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.passes import RowVectors, Tensors
from foreshock.kernels.flash_attention.triton_kernels.places import at_head, diagonal, one_head
from foreshock.kernels.flash_attention.triton_kernels.ties import tied

_SLOTS: tl.constexpr = tl.constexpr(SLOT_COUNT)
_SLOTS_WIDE: tl.constexpr = tl.constexpr(triton.next_power_of_2(SLOT_COUNT))
ROWS_SLOT: tl.constexpr = tl.constexpr(int(Slot.ROWS))
TIED_BF16_SLOT: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_BF16))
TIED_ONE_SLOT: tl.constexpr = tl.constexpr(int(Slot.TIED_ROWS_ONE))
SHIFTED_SLOT: tl.constexpr = tl.constexpr(int(Slot.SHIFTED_ROWS))
EMPTY_SLOT: tl.constexpr = tl.constexpr(int(Slot.EMPTY_ROWS))
NONFINITE_SLOT: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_ROWS))
NONFINITE_INPUT_SLOT: tl.constexpr = tl.constexpr(int(Slot.NONFINITE_INPUT_ROWS))
SCORE_MAX_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_MAX))
ROW_MAX_ABS_SLOT: tl.constexpr = tl.constexpr(int(Slot.ROW_MAX_ABS))
SCORE_OFFSET_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUM))
SCORE_OFFSET_SUMSQ_SLOT: tl.constexpr = tl.constexpr(int(Slot.SCORE_OFFSET_SUMSQ))
DELTA_BIAS_SUM_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUM))
DELTA_BIAS_ABS_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_ABS))
DELTA_BIAS_SUMSQ_SLOT: tl.constexpr = tl.constexpr(int(Slot.DELTA_BIAS_SUMSQ))
# One bit per slot: how it is merged, and whether these kernels count it.
_IS_COUNT: tl.constexpr = tl.constexpr(sum(1 << slot for slot in COUNT_SLOTS))
_IS_MAXIMUM: tl.constexpr = tl.constexpr(sum(1 << slot for slot in MAX_SLOTS))
_COUNTED: Final = (
    *(ROWS_SLOT, TIED_BF16_SLOT, TIED_ONE_SLOT, SHIFTED_SLOT, EMPTY_SLOT, NONFINITE_SLOT, SCORE_MAX_SLOT),
    *(ROW_MAX_ABS_SLOT, SCORE_OFFSET_SUM_SLOT, SCORE_OFFSET_SUMSQ_SLOT),
    *(DELTA_BIAS_SUM_SLOT, DELTA_BIAS_ABS_SLOT, DELTA_BIAS_SUMSQ_SLOT, NONFINITE_INPUT_SLOT),
)
_IS_COUNTED: tl.constexpr = tl.constexpr(sum(1 << slot.value for slot in _COUNTED))

COUNT_ROWS: Final = 1024
"""Rows per program of the counting kernel."""


@triton.jit
def finite(x):
    """Whether x is neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def add_count(word, amount, mask=None):
    """Add to words of the state. Like the next two functions, it is atomic, because backwards of several streams may
    count into one state."""
    tl.atomic_add(word, amount, mask=mask, sem="relaxed")


@triton.jit
def add_sum(word, amount, mask=None):
    """Add float64 to words of the state."""
    tl.atomic_add(word.to(tl.pointer_type(tl.float64), bitcast=True), amount, mask=mask, sem="relaxed")


@triton.jit
def raise_maximum(word, value, mask=None):
    """Set words of the state to the maximum of them and float64 values that are not NaN."""
    # -0.0 would compare as positive but has the bits of the least integer; adding 0 makes it 0.
    tl.atomic_max(word.to(tl.pointer_type(tl.float64), bitcast=True), value + 0.0, mask=mask, sem="relaxed")


@triton.jit
def _put(partial, slot: tl.constexpr, blocks, value):
    tl.store(partial + slot * blocks, value.to(tl.int64, bitcast=True))


@triton.jit
def merge(
    state, partial, cu_seqlens_q, head, heads, total_q, blocks, entries, strides,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the statistics of `entries` blocks, the same number per sequence, to one head's state in a fixed order."""
    stride_head, stride_slot = strides
    slot = tl.arange(0, _SLOTS_WIDE)
    known = slot < _SLOTS
    count = tl.zeros((_SLOTS_WIDE,), tl.int64)
    total = tl.zeros((_SLOTS_WIDE,), tl.float64)
    largest = tl.full((_SLOTS_WIDE,), float("-inf"), tl.float64)
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        plane = (entry // blocks) * heads + head
        source = partial + plane.to(tl.int64) * (_SLOTS * blocks) + entry % blocks
        mask = known[:, None] & (entry < entries)[None, :]
        # Other programs wrote these words, so bypass this multiprocessor's own cache.
        words = tl.load(source[None, :] + slot[:, None] * blocks, mask=mask, other=0, cache_modifier=".cg")
        values = words.to(tl.float64, bitcast=True)
        count += tl.sum(words, 1)
        total += tl.sum(values, 1)
        largest = tl.maximum(largest, tl.max(tl.where(mask, values, float("-inf")), 1))
    if PACKED:
        past = total_q - tl.load(cu_seqlens_q + entries // blocks)
        count += tl.where(slot == EMPTY_SLOT, past, 0)
    word = state + head * stride_head + slot * stride_slot
    is_count = ((_IS_COUNT >> slot) & 1) != 0
    is_maximum = ((_IS_MAXIMUM >> slot) & 1) != 0
    add_count(word, count, known & is_count)
    raise_maximum(word, largest, known & is_maximum)
    add_sum(word, total, known & (is_count == 0) & (is_maximum == 0))


@triton.jit
def count_kernel(
    lse, row_max, seconds, deltas, biases, done, modes, out, partial, state, cu_seqlens_q, cu_seqlens_k, strides, sizes,
    SPEC: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the statistics of a block of rows to `partial`, int64 [planes, SLOT_COUNT, blocks]; a head's last program
    adds all of the head's blocks to the state."""
    block = tl.program_id(0)
    heads, _, total_q, _, _, _, _, _, left, right, _, _ = sizes
    stride_state, stride_o, dim = strides
    place, _, rows, start_q, length_q, _, length_k = one_head(tl.program_id(1), sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    batch, head, _ = place
    mode = 0
    if modes is not None:
        mode = tl.load(modes + head)
    queries = block * ROWS + tl.arange(0, ROWS)
    inside = queries < length_q
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    second = tl.load(seconds + rows + queries, mask=inside, other=0.0)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
    bias = tl.load(biases + rows + queries, mask=inside, other=0.0)
    high = length_k + queries * 0
    low = queries * 0
    offset = diagonal(length_q, length_k, SPEC.TOP_LEFT)
    if SPEC.HAS_RIGHT:
        high = tl.minimum(high, queries + (offset + right + 1))
    if SPEC.HAS_LEFT:
        low = tl.maximum(low, queries + (offset - left))
    keys = tl.maximum(high - low, 0)
    # Finite queries and keys have finite scores in float32, so a nonfinite score proves a nonfinite input.
    entered = finite(largest) & finite(log_sum)
    whole = entered & finite(delta) & finite(bias)
    seen = inside & (keys > 0)
    unknown = seen & entered & (whole == 0)
    if tl.max(unknown.to(tl.int32), 0) > 0:  # a value or a gradient is not finite
        row = at_head(out, batch, head, start_q, stride_o) + queries.to(tl.int64) * stride_o[2]
        for column in range(dim):
            entered = entered & finite(tl.load(row + column, mask=unknown, other=0.0).to(tl.float32))
    counted = seen & whole
    empty = inside & (keys == 0)
    keys = tl.where(counted, keys, 1)
    offsets = tl.where(counted, log_sum - tl.log2(keys.to(tl.float32)) / LOG2E, 0.0).to(tl.float64)
    bias = tl.where(counted, bias, 0.0).to(tl.float64)
    lowest = float("-inf")
    blocks = tl.num_programs(0)
    own = partial + tl.program_id(1).to(tl.int64) * _SLOTS * blocks + block
    _put(own, ROWS_SLOT, blocks, tl.sum(counted.to(tl.int64), 0))
    tied_bf16, tied_one = tied(largest, second, DTYPE)
    shifted = (largest - second <= PAPER_TOLERANCE) & (largest != 0.0) & ((mode & PAPER_SOFTMAX) != 0)
    _put(own, TIED_BF16_SLOT, blocks, tl.sum((counted & tied_bf16).to(tl.int64), 0))
    _put(own, TIED_ONE_SLOT, blocks, tl.sum((counted & tied_one).to(tl.int64), 0))
    _put(own, SHIFTED_SLOT, blocks, tl.sum((counted & shifted).to(tl.int64), 0))
    _put(own, EMPTY_SLOT, blocks, tl.sum(empty.to(tl.int64), 0))
    _put(own, NONFINITE_SLOT, blocks, tl.sum((seen & (whole == 0)).to(tl.int64), 0))
    _put(own, NONFINITE_INPUT_SLOT, blocks, tl.sum((seen & (entered == 0)).to(tl.int64), 0))
    _put(own, SCORE_MAX_SLOT, blocks, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64))
    _put(own, ROW_MAX_ABS_SLOT, blocks, tl.max(tl.where(counted, tl.abs(largest), lowest), 0).to(tl.float64))
    _put(own, SCORE_OFFSET_SUM_SLOT, blocks, tl.sum(offsets, 0))
    _put(own, SCORE_OFFSET_SUMSQ_SLOT, blocks, tl.sum(offsets * offsets, 0))
    _put(own, DELTA_BIAS_SUM_SLOT, blocks, tl.sum(bias, 0))
    _put(own, DELTA_BIAS_ABS_SLOT, blocks, tl.sum(tl.abs(bias), 0))
    _put(own, DELTA_BIAS_SUMSQ_SLOT, blocks, tl.sum(bias * bias, 0))
    for slot in tl.static_range(_SLOTS):  # slots that these kernels do not count
        if ((_IS_COUNTED >> slot) & 1) == 0:
            if ((_IS_MAXIMUM >> slot) & 1) != 0:
                _put(own, slot, blocks, tl.full((), float("-inf"), tl.float64))
            else:
                tl.store(own + slot * blocks, tl.full((), 0, tl.int64))
    tl.debug_barrier()  # wait until all threads of this program have written
    entries = tl.num_programs(1) // heads * blocks
    if tl.atomic_add(done + head, 1, sem="acq_rel") == entries - 1:
        merge(state, partial, cu_seqlens_q, head, heads, total_q, blocks, entries, stride_state, SPEC.PACKED, 128)


def launch_count(call: Call, given: Tensors, rows: RowVectors, state: Tensor) -> None:
    """Launch the kernel that adds every row's statistics to the state."""
    call.launch(
        "count",
        (
            given.lse,
            given.row_max,
            given.second,
            rows.delta,
            rows.bias,
            rows.done,
            given.modes,
            given.out,
            rows.partial,
            state,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        lambda: Launch(
            count_kernel,
            (triton.cdiv(call.longest_q, COUNT_ROWS), call.sequences * call.heads, 1),
            ((state.stride(), given.out.stride(), call.dim), call.sizes),
            {
                "SPEC": call.compiled,
                "ROWS": COUNT_ROWS,
                "DTYPE": tl.bfloat16 if given.out.dtype == torch.bfloat16 else tl.float16,
            },
            {"num_warps": 4, "num_stages": 1},
        ),
    )
