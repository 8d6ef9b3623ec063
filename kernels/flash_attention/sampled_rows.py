"""Statistics of a sample of rows of any attention, in two launches: the rows, then their sum into the state.

The same rows, computed in the same way, as `foreshock.monitor.attention.probed_rows` computes in PyTorch where there
is no GPU.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False
# ruff: noqa: N803, N806  # Triton names its compile-time arguments in capitals

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.blocks import (
    LN2,
    LOG2E,
    tanh,
    to_operand,
)
from foreshock.kernels.flash_attention.counting import (
    DELTA_BIAS_ABS_SLOT,
    DELTA_BIAS_SUM_SLOT,
    DELTA_BIAS_SUMSQ_SLOT,
    EMPTY_SLOT,
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
from foreshock.kernels.flash_attention.launch import compiled_for
from foreshock.kernels.flash_attention.places import diagonal, visible
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.statistics import one_margin

# What is kept of a row between the launches, one plane [h, r] each.
_ROW_MAX: tl.constexpr = tl.constexpr(0)
_LSE: tl.constexpr = tl.constexpr(1)
_TIES_BF16: tl.constexpr = tl.constexpr(2)
_TIES_ONE: tl.constexpr = tl.constexpr(3)
_KEYS: tl.constexpr = tl.constexpr(4)
_DELTA: tl.constexpr = tl.constexpr(5)
_BIAS: tl.constexpr = tl.constexpr(6)
PLANES = 7


@triton.jit
def draw(tick, index, below):
    """Number `index` of those drawn at `tick`, in [0, below): the finaliser of splitmix64, as probed_rows.drawn."""
    z = (tick + index).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z & 0x7FFFFFFFFFFFFFFF) % below.to(tl.uint64)).to(tl.int64)


@triton.jit
def load_rows(source, rows, stride, mask, columns, dim):
    """Rows `rows` of the head at `source`, widened, [rows, BLOCK_D]."""
    pointers = source + rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(pointers, mask=mask[:, None] & (columns < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_row(source, row, stride, columns, dim):
    """Row `row` of the head at `source`, widened, [BLOCK_D]."""
    return tl.load(source + row.to(tl.int64) * stride + columns, mask=columns < dim, other=0.0).to(tl.float32)


@triton.jit
def score(products, keys, row, looks, scale, softcap, SPEC: tl.constexpr):
    """What enters the softmax from products of one query with `keys`; -inf where it does not see them."""
    scores = products * scale
    if SPEC.SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    return tl.where(visible(row, keys, looks, SPEC), scores, float("-inf"))


@triton.jit
def row_statistics_kernel(
    grad_out, out, query, key, value, tick, kept, chosen, strides, sizes, margin,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Everything about one row of one head, into the planes of `kept`; which head it is, into `chosen`."""
    stride_g, stride_o, stride_q, stride_k, stride_v = strides
    heads, group, turn, total, length_q, length_k, dim, scale, softcap, left, right = sizes
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    index = tl.program_id(1)
    count = tl.num_programs(0)
    sampled = tl.program_id(0) + index * count
    now = tl.load(tick)
    head = ((now * turn + index) % heads).to(tl.int32)
    place = tl.program_id(0).to(tl.int64)
    if DRAWN:
        place = draw(now * (count * tl.num_programs(1)), sampled.to(tl.int64), total)
    batch = place // length_q
    row = (place % length_q).to(tl.int32)
    columns = tl.arange(0, BLOCK_D)
    query += batch * stride_q[0] + head.to(tl.int64) * stride_q[1]
    key += batch * stride_k[0] + (head // group).to(tl.int64) * stride_k[1]
    value += batch * stride_v[0] + (head // group).to(tl.int64) * stride_v[1]
    asked = load_row(query, row, stride_q[2], columns, dim)[None, :]
    offset = diagonal(length_q, length_k, SPEC.TOP_LEFT)
    looks = (offset, length_k, left, right)
    low = 0
    high = length_k
    if SPEC.HAS_RIGHT:
        high = tl.maximum(tl.minimum(high, row + offset + right + 1), 0)
    if SPEC.HAS_LEFT:
        low = tl.minimum(tl.maximum(row + offset - left, 0), high) // BLOCK * BLOCK
    largest = float("-inf")
    broken = 0
    for start in range(low, high, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        products = tl.sum(load_rows(key, keys, stride_k[2], keys < length_k, columns, dim) * asked, 1)
        scores = score(products, keys, row, looks, scale, softcap, SPEC)
        broken += tl.sum((scores != scores).to(tl.int32), 0)
        largest = tl.maximum(largest, tl.max(scores, 0))
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    rounded_largest = to_operand(largest, tl.bfloat16).to(tl.float32)
    ties_bf16 = 0
    ties_one = 0
    seen = 0
    row_sum = 0.0
    product = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(low, high, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < length_k
        products = tl.sum(load_rows(key, keys, stride_k[2], inside, columns, dim) * asked, 1)
        scores = score(products, keys, row, looks, scale, softcap, SPEC)
        there = scores != float("-inf")
        seen += tl.sum(there.to(tl.int32), 0)
        ties_bf16 += tl.sum(
            (there & (to_operand(scores, tl.bfloat16).to(tl.float32) == rounded_largest)).to(tl.int32), 0
        )
        ties_one += tl.sum((there & (scores - floor >= -margin)).to(tl.int32), 0)
        weights = tl.exp2((scores - floor) * LOG2E)
        row_sum += tl.sum(weights, 0)
        if not SPEC.DROPOUT:
            rounded = to_operand(weights, out.dtype.element_ty).to(tl.float32)
            product += tl.sum(load_rows(value, keys, stride_v[2], inside, columns, dim) * rounded[:, None], 0)
    delta = 0.0
    bias = 0.0
    grad = load_row(grad_out + batch * stride_g[0] + head.to(tl.int64) * stride_g[1], row, stride_g[2], columns, dim)
    given = load_row(out + batch * stride_o[0] + head.to(tl.int64) * stride_o[1], row, stride_o[2], columns, dim)
    delta += tl.sum(grad * given, 0)
    if not SPEC.DROPOUT:
        bias += tl.sum(grad * (given - product / tl.where(row_sum == 0.0, 1.0, row_sum)), 0)
    plane = count * tl.num_programs(1)
    kept += sampled
    tl.store(kept + _ROW_MAX * plane, tl.where(broken > 0, float("nan"), largest))
    tl.store(kept + _LSE * plane, floor + tl.log2(row_sum) * LN2)
    tl.store(kept + _TIES_BF16 * plane, tl.cast(ties_bf16, tl.float32))
    tl.store(kept + _TIES_ONE * plane, tl.cast(ties_one, tl.float32))
    tl.store(kept + _KEYS * plane, tl.cast(seen, tl.float32))
    tl.store(kept + _DELTA * plane, delta - bias)
    tl.store(kept + _BIAS * plane, bias)
    tl.store(chosen + index, head)


@triton.jit
def sum_kernel(state, tick, kept, chosen, stride_head, stride_slot, count, handful, BLOCK: tl.constexpr):
    """Adds the rows of one head to its state, in a fixed order; the last program moves the tick on."""
    index = tl.program_id(0)
    if index == handful:
        add_count(tick, 1)
    else:
        plane = count * handful
        kept += index * count
        state += tl.load(chosen + index).to(tl.int64) * stride_head
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
            whole = finite(largest) & finite(lse) & finite(delta) & finite(bias)
            # a row whose scores are all NaN counts its keys as seen
            seen = inside & (keys > 0)
            counted = seen & whole
            offset = tl.where(counted, lse - tl.log2(tl.where(counted, keys, 1.0)) * LN2, 0.0).to(tl.float64)
            bias = tl.where(counted, bias, 0.0).to(tl.float64)
            lowest = float("-inf")
            add_count(state + ROWS_SLOT * stride_slot, tl.sum(counted.to(tl.int64), 0))
            add_count(state + TIED_BF16_SLOT * stride_slot, tl.sum((counted & (ties_bf16 > 1)).to(tl.int64), 0))
            add_count(state + TIED_ONE_SLOT * stride_slot, tl.sum((counted & (ties_one > 1)).to(tl.int64), 0))
            add_count(state + EMPTY_SLOT * stride_slot, tl.sum((inside & (keys == 0)).to(tl.int64), 0))
            add_count(state + NONFINITE_SLOT * stride_slot, tl.sum((seen & (whole == 0)).to(tl.int64), 0))
            raise_maximum(
                state + SCORE_MAX_SLOT * stride_slot, tl.max(tl.where(counted, largest, lowest), 0).to(tl.float64)
            )
            size = tl.where(counted, tl.abs(largest), lowest)
            raise_maximum(state + ROW_MAX_ABS_SLOT * stride_slot, tl.max(size, 0).to(tl.float64))
            add_sum(state + SCORE_OFFSET_SUM_SLOT * stride_slot, tl.sum(offset, 0))
            add_sum(state + SCORE_OFFSET_SUMSQ_SLOT * stride_slot, tl.sum(offset * offset, 0))
            add_sum(state + DELTA_BIAS_SUM_SLOT * stride_slot, tl.sum(bias, 0))
            add_sum(state + DELTA_BIAS_ABS_SLOT * stride_slot, tl.sum(tl.abs(bias), 0))
            add_sum(state + DELTA_BIAS_SUMSQ_SLOT * stride_slot, tl.sum(bias * bias, 0))


def serves(query: Tensor, key: Tensor, value: Tensor, out: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels read these tensors: 16 bits, rows of adjacent elements, a head dim up to 256."""
    tensors = (query, key, value, out)
    return (
        spec.numerics == "kernel"
        and query.shape[3] <= 256
        and all(t.dtype == query.dtype and t.element_size() == 2 and t.stride(3) == 1 for t in tensors)
    )


def count_sampled_rows(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    tick: Tensor,
    rows: int,
    heads: int,
    spec: AttentionSpec,
) -> None:
    """Add `rows` rows of each of `heads` heads, from head tick * heads on, to `state`; then move `tick` on by 1.

    query, out, grad_out [B, H, Sq, D]; key, value [B, Hkv, Sk, D]; state int64 [H, SLOT_COUNT]; tick int64 [1]. All
    rows where there are no more. Never waits for the device.
    """
    batch, all_heads, length_q, dim = query.shape
    total = batch * length_q
    count = min(rows, total)
    if grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    kept = torch.empty(PLANES, heads, count, dtype=torch.float32, device=query.device)
    chosen = torch.empty(heads, dtype=torch.int32, device=query.device)
    compiled = compiled_for(spec, dim, packed=False)
    row_statistics_kernel[(count, heads)](
        grad_out, out, query, key, value, tick, kept, chosen,
        (grad_out.stride(), out.stride(), query.stride(), key.stride(), value.stride()),
        (
            *(all_heads, all_heads // key.shape[1], heads if heads < all_heads else 0, total, length_q, key.shape[2]),
            *(dim, float(spec.scale), float(spec.softcap), spec.window_left, spec.right),
        ),
        one_margin(query.dtype),
        DRAWN=rows < total, BLOCK=max(16, 8192 // compiled.BLOCK_D), SPEC=compiled,
    )  # fmt: skip
    sum_kernel[(heads + 1,)](state, tick, kept, chosen, *state.stride(), count, heads, BLOCK=256)
