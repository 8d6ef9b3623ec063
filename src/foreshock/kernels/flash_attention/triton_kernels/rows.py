"""The first pass of the backward: delta of every row, and the vectors that the other passes read."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.slots import SLOT_COUNT
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    EXACT_DELTA,
    LOG2E,
    RESIDUAL_SCALE_FP16,
    load_tile,
    to_operand,
)
from foreshock.kernels.flash_attention.triton_kernels.counting import COUNT_ROWS
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.passes import RowVectors, Tensors
from foreshock.kernels.flash_attention.triton_kernels.places import at_head, one_head


@triton.jit
def fold(rows, column):
    """Split fp32 `rows` into three bf16 summands in columns 0 to 2, which a matrix product with ones adds exactly."""
    rows = rows[:, None]
    high = to_operand(rows, tl.bfloat16).to(tl.float32)
    middle = to_operand(rows - high, tl.bfloat16).to(tl.float32)
    low = to_operand(rows - high - middle, tl.bfloat16).to(tl.float32)
    return tl.where(column == 0, high, tl.where(column == 1, middle, tl.where(column == 2, low, 0.0)))


@triton.jit
def row_kernel(
    grad_out, out, residual, lse, grad_lses, log2_lses, deltas, folded, biases, done, modes,
    cu_seqlens_q, cu_seqlens_k, strides, sizes,
    SPEC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute delta of a block of rows, the delta bias, and the lse in the form in which the other passes need it.

    delta is computed from the stored O or, if the mode says so, from O before its rounding.
    """
    block = tl.program_id(0)
    stride_g, stride_o = strides
    heads, _, _, _, dim, unit = sizes
    place, _, rows, start_q, length_q, _, _ = one_head(tl.program_id(1), sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    batch, head, _ = place
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
    if residual is not None:
        residual = at_head(residual, batch, head, start_q, stride_o)
        lost = load_tile(residual, 0, 0, first, ROWS, stride_o[2], length_q, dim, SPEC, True, False)
        bias = -tl.sum(grad * lost.to(tl.float32), 1)
        if residual.dtype.element_ty == tl.float16:
            bias *= 1.0 / RESIDUAL_SCALE_FP16
        if modes is not None:
            delta = tl.where((tl.load(modes + head) & EXACT_DELTA) != 0, delta - bias, delta)
    log_sum = tl.load(lse + rows + queries, mask=inside, other=0.0)
    # A row that does not see any key has lse -inf: its P must be 0, not NaN.
    unseen = log_sum == float("-inf")
    log2_lse = tl.where(unseen, 1e30, log_sum * LOG2E)
    if grad_lses is not None:  # d lse_i / d S_ij = P_ij
        delta -= tl.where(unseen, 0.0, tl.load(grad_lses + rows + queries, mask=inside, other=0.0))
    tl.store(deltas + rows + queries, delta, mask=inside)
    tl.store(log2_lses + rows + queries, log2_lse, mask=inside)
    if folded is not None:
        column = tl.arange(0, 16)[None, :]
        parts = fold(-log2_lse / unit, column) + fold(-delta, column - 3)
        pointers = folded + (rows + queries)[:, None] * 8 + column
        tl.store(pointers, parts.to(tl.bfloat16), mask=inside[:, None] & (column < 8))
    if done is not None:
        tl.store(biases + rows + queries, bias, mask=inside)
        if (block == 0) & (tl.program_id(1) < heads):
            tl.store(done + tl.program_id(1), 0)  # no program of the counting kernel has finished yet


class _Plan(NamedTuple):
    """Layout of one call's vectors in its memory: offset, type and shape of each; None for unused vectors."""

    parts: tuple[tuple[int, torch.dtype, tuple[int, ...]] | None, ...]
    size: int


def _plan(call: Call, given: Tensors) -> _Plan:
    rows, planes = tuple(given.lse.shape), call.sequences * call.heads
    counts = given.state is not None
    single = (torch.float32, rows)
    parts: list[tuple[int, torch.dtype, tuple[int, ...]] | None] = []
    size = 0
    for needed, (dtype, shape) in (
        (True, single),
        (True, single),
        (True, single),
        (call.foldable, (torch.bfloat16, (rows[0] * rows[1], 1, rows[2], 8))),
        (counts, (torch.int32, (call.heads,))),
        (counts, (torch.int64, (planes, SLOT_COUNT, triton.cdiv(call.longest_q, COUNT_ROWS)))),
    ):
        parts.append((size, dtype, shape) if needed else None)
        size += -(-math.prod(shape) * dtype.itemsize // 256) * 256 if needed else 0
    return _Plan(tuple(parts), size)


def _vectors(call: Call, given: Tensors, addresses: bool) -> RowVectors:
    plan = call.plans.get(given.state is None)
    if plan is None:
        plan = call.plans[given.state is None] = _plan(call, given)
    memory = torch.empty(plan.size, dtype=torch.uint8, device=given.lse.device)
    if addresses:
        start = memory.data_ptr()
        made: list[Any] = [None if part is None else start + part[0] for part in plan.parts]
    else:
        made = [None if part is None else _view(memory, *part) for part in plan.parts]
    return RowVectors._make([*made, memory])


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def launch_rows(call: Call, given: Tensors, addresses: bool = False) -> RowVectors:
    """Launch the rows pass and return its vectors, or only their addresses if `addresses`: cached launches need no
    more."""
    lse = given.lse
    rows = _vectors(call, given, addresses)
    call.launch(
        "rows",
        (
            given.grad_out,
            given.out,
            given.residual,
            lse,
            given.grad_lse,
            rows.log2_lse,
            rows.delta,
            rows.folded,
            rows.bias,
            rows.done,
            given.modes,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        lambda: Launch(
            row_kernel,
            (triton.cdiv(call.longest_q, call.row_block), call.sequences * call.heads, 1),
            (
                (given.grad_out.stride(), given.out.stride()),
                (*call.planes, call.dim, float(call.unit)),
            ),
            {"SPEC": call.compiled, "ROWS": call.row_block},
            {"num_warps": 4},
        ),
    )
    return rows
