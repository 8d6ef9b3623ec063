"""Device functions and constants that forward and backward share: loading, rounding and storing tiles, mode flags."""

import torch
import triton
import triton.language as tl

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import shift, spec

INTERPRET: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels on a CPU. It multiplies bf16 as bit patterns, and truncates instead of
rounding, so under it tiles are converted to fp32 when loaded, and rounded explicitly."""

EXACT_DELTA: tl.constexpr = tl.constexpr(int(Mode.EXACT_DELTA))
PAPER_SOFTMAX: tl.constexpr = tl.constexpr(int(Mode.PAPER_SOFTMAX))
ROW_CORRECTED: tl.constexpr = tl.constexpr(int(Mode.ROW_CORRECTED))
PAPER_TOLERANCE: tl.constexpr = tl.constexpr(shift.PAPER_TOLERANCE)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RESIDUAL_SCALE_FP16: tl.constexpr = tl.constexpr(spec.residual_scale(torch.float16))


@triton.jit
def to_operand(x, dtype: tl.constexpr):
    """Round x to nearest even in the operand's 16-bit type (in the interpreter, the result stays fp32)."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        return x.to(dtype).to(tl.float32)
    return x.to(dtype)


_ONES: tl.constexpr = tl.constexpr(8)


@triton.jit
def no_sums(ROWS: tl.constexpr):
    """Return row sums of zero, [ROWS, 8]."""
    return tl.zeros((ROWS, _ONES), tl.float32)


@triton.jit
def add_rows(sums, tile):
    """Add the row sums of `tile`, 16-bit numbers [ROWS, C], to `sums` in fp32.

    The matrix unit computes them as a product with ones, of the narrowest width that it supports. This stays in
    registers and takes a sixteenth of the instructions of adding each entry, which limit the speed of these passes.
    """
    return tl.dot(tile, tl.full((tile.shape[1], _ONES), 1.0, tile.dtype), sums)


@triton.jit
def row_sums(sums):
    """Return the sums, [ROWS]."""
    return tl.sum(sums, 1) / _ONES  # exact, because all columns are equal


@triton.jit
def load_tile(
    source, batch, head, row, rows, stride, length, dim,
    SPEC: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load a tile as wide as the head dim (`load_columns`)."""
    return load_columns(
        source, batch, head, row, rows, stride, length, dim, SPEC.BLOCK_D, SPEC.DIM_FULL, CHECK_ROWS, TMA
    )


@triton.jit
def load_columns(
    source, batch, head, row, rows, stride, length, dim,
    BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows [row, row + rows) of one head as a tile [rows, BLOCK_D]; zero outside [0, length) x [0, dim).

    `source` is a tensor descriptor [B, H, S, D] under TMA, else a pointer to the head's first row.
    """
    if TMA:
        tile = source.load([batch, head, row, 0]).reshape(rows, BLOCK_D)
    else:
        local = tl.arange(0, rows)
        columns = tl.arange(0, BLOCK_D)
        offsets = local[:, None].to(tl.int64) * stride + columns[None, :]
        pointers = source + tl.cast(row, tl.int64) * stride + offsets
        if CHECK_ROWS and DIM_FULL:
            tile = tl.load(pointers, mask=(row + local < length)[:, None], other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(pointers, mask=(row + local < length)[:, None] & (columns < dim)[None, :], other=0.0)
        elif DIM_FULL:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(columns < dim)[None, :], other=0.0)
    if INTERPRET:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def in_registers(tile):
    """Move a `tile` of 16-bit numbers to registers, from which the matrix unit then reads it.

    Triton leaves a loaded tile in shared memory, but narrow tiles exhaust the bandwidth of shared memory.
    """
    if INTERPRET:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, True, 2)


@triton.jit
def store_tile(pointer, tile, row, stride, length, dim, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Write a tile [ROWS, BLOCK_D] to rows [row, ...) of the head at `pointer`, rounded to its type."""
    local = tl.arange(0, ROWS)
    columns = tl.arange(0, SPEC.BLOCK_D)
    pointers = pointer + tl.cast(row, tl.int64) * stride + local[:, None].to(tl.int64) * stride + columns[None, :]
    dtype: tl.constexpr = pointer.dtype.element_ty
    mask = (row + local < length)[:, None]
    if not SPEC.DIM_FULL:
        mask = mask & (columns < dim)[None, :]
    tl.store(pointers, to_operand(tile, dtype).to(dtype), mask=mask)


@triton.jit
def tanh(x):
    """tanh of x, accurate to a few units in the last place.

    Near 0 the quotient would cancel, and its error, times a large softcap, could exceed the score. So a Taylor series
    is used there; its first omitted term is below 2^-27 of x.
    """
    square = x * x
    series = x + x * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    return tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def cap_scores(products, scale, softcap, SPEC: tl.constexpr):
    """Return scores from products of queries and keys. Unless PRESCALED, they stay in units of 1 / scale, which saves
    one multiplication per entry."""
    if SPEC.SOFTCAP:
        return softcap * tanh(products * (scale / softcap))
    if SPEC.PRESCALED:
        return products * scale
    return products


@triton.jit
def load_seed(seeds):
    """Load dropout's seed; 0 without dropout."""
    seed = 0
    if seeds is not None:
        seed = tl.load(seeds)
    return seed


@triton.jit
def kept(seed, plane, queries, keys, threshold):
    """Return dropout's mask, as `dropout.kept`: the Philox word at (key, query, plane, 0) is at least `threshold`."""
    zero = (queries * 0 + keys * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(
        seed, keys.to(tl.uint32) + zero, queries.to(tl.uint32) + zero, plane.to(tl.uint32) + zero, zero
    )
    return word >= threshold


@triton.jit
def _fill(tensor, begin, end, stride_row, dim, value, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write `value` to the rows [begin, end) of one head."""
    columns = tl.arange(0, BLOCK_D)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        pointers = tensor + row[:, None].to(tl.int64) * stride_row + columns[None, :]
        values = tl.full((ROWS, BLOCK_D), value, tl.float32).to(tensor.dtype.element_ty)
        tl.store(pointers, values, mask=(row < end)[:, None] & (columns < dim)[None, :])


@triton.jit
def blank_rest_kernel(
    tensor, cu_seqlens, sequences, longest, total, stride_head, stride_row, dim, fill,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fill the rows of one head that no program computes: `fill` after the last packed sequence, and NaN in a sequence
    after `longest` rows, so that uninitialised memory cannot pass for a result."""
    tensor += tl.program_id(0).to(tl.int64) * stride_head
    _fill(tensor, tl.load(cu_seqlens + sequences), total, stride_row, dim, fill, ROWS, BLOCK_D)
    found = 0
    for first in range(0, sequences, 128):
        index = first + tl.arange(0, 128)
        inside = index < sequences
        starts = tl.load(cu_seqlens + index, mask=inside, other=0)
        ends = tl.load(cu_seqlens + index + 1, mask=inside, other=0)
        found = tl.maximum(found, tl.max(ends - starts, 0))
    if found > longest:
        for index in range(sequences):
            begin = tl.load(cu_seqlens + index) + longest
            _fill(tensor, begin, tl.load(cu_seqlens + index + 1), stride_row, dim, float("nan"), ROWS, BLOCK_D)
