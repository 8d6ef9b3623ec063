"""Counting, per row, the scores that stand at the row's maximum, by two definitions at once."""

import triton
import triton.language as tl

from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    INTERPRET,
    LOG2E,
    PAPER_TOLERANCE,
    cap_scores,
    load_tile,
)
from foreshock.kernels.flash_attention.triton_kernels.places import at_head, diagonal, key_ranges, visible

_HIGH: tl.constexpr = tl.constexpr(2.0**18)
"""Weight of the narrower definition in the packed count; rows of up to 2^18 keys are counted exactly."""


FAST_TIES_BELOW: tl.constexpr = tl.constexpr(512.0)
"""Row maxima, in size, from which on a bf16 step of scores is too many binades of P for `add_floors`."""
FAST_TIES_FROM: tl.constexpr = tl.constexpr(2.0**-6)
"""Row maxima, in size, below which a bf16 step of scores moves P by too few steps of fp32 for `add_floors`."""


@triton.jit
def bf16_tie_threshold(row_max):
    """As `statistics.bf16_tie_threshold`: the least score that rounds to the same bf16 as the maximum does."""
    bits = row_max.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    zero = (rounded & 0x7FFF) == 0
    odd = rounded & 1
    negative = (rounded >> 15) != 0
    above = (rounded << 16) - 0x8000 + odd
    below = (rounded << 16) + 0x8000 - odd
    threshold = tl.where(negative, below, above)
    threshold = tl.where(zero, 0x80008000, threshold)
    return threshold.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def one_tie_threshold(row_max, MARGIN: tl.constexpr):
    """The least score at most MARGIN below row_max, where fp32 is fine enough to separate the two."""
    near = row_max - MARGIN
    bits = near.to(tl.int32, bitcast=True)
    above = tl.where(bits < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    return tl.where(row_max - near > MARGIN, above, near)  # a difference of neighbours is exact


@triton.jit
def _thresholds(row_max, dtype: tl.constexpr):
    # log1p(-eps / 4), rounded down: eps is 2^-7 in bf16 and 2^-10 in fp16.
    margin: tl.constexpr = 0.001955034676939249 if dtype == tl.bfloat16 else 0.0002441704273223877
    return bf16_tie_threshold(row_max), one_tie_threshold(row_max, margin)


@triton.jit
def tie_factors(row_max, log2_lse, score_unit, unit, dtype: tl.constexpr):
    """Of each row: what P is multiplied by to reach 1 at the wider threshold and at the narrower one, what the integer
    parts of the maximum's own products are, and whether bf16's threshold is the wider one."""
    top = tl.fma(row_max * (1.0 / score_unit), unit, -log2_lse)
    bf16, one = _thresholds(row_max, dtype)
    # A shade more than 1, so that a score at the threshold counts.
    wide = tl.exp2(tl.fma(row_max - tl.minimum(bf16, one), LOG2E, -top)) * (1.0 + 2.0**-21)
    narrow = tl.exp2(tl.fma(row_max - tl.maximum(bf16, one), LOG2E, -top)) * (1.0 + 2.0**-21)
    largest = tl.exp2(top)
    wide_alone = tl.floor(tl.minimum(largest * wide, 100.0))  # below what `code_of_counts` says of large scores
    narrow_alone = tl.floor(tl.minimum(largest * narrow, 100.0))
    return wide, narrow, wide_alone, narrow_alone, bf16 <= one


@triton.jit
def tie_thresholds(row_max, dtype: tl.constexpr):
    """What `count_ties` takes of each row."""
    bf16, one = _thresholds(row_max, dtype)
    return tl.minimum(bf16, one), tl.maximum(bf16, one)


@triton.jit
def count_ties(products, score_unit, wide, narrow):
    """Packed count per row of the scores at or above each threshold, exact for any score."""
    scores = products * score_unit  # rounded as the row maximum was
    at_wide, at_narrow = (scores >= wide[:, None]).to(tl.float32), (scores >= narrow[:, None]).to(tl.float32)
    return tl.sum(at_narrow * _HIGH + at_wide, 1)


@triton.jit
def _halves(tile):
    """A tile [R, 2 C, 4] as two tiles [R, C, 4] of alternate middle indices."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tile.reshape(rows, columns // 2, 2, 4).permute(0, 1, 3, 2))


@triton.jit
def add_floors(total, tile, factor):
    """total [R, C / 32, 4] plus the integer parts of tile [R, C] times factor [R]; `total` starts at 2^23.

    From 2^23 to 2^24 fp32 holds integers alone, so that a multiply-add that rounds down adds an integer part in one
    instruction. A Hopper accumulator spreads a row over four threads in pairs of entries; the tile is cut so that every
    entry stays in the thread that holds it.
    """
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    factor = factor[:, None, None]
    even, odd = tl.split(tile.reshape(rows, columns // 8, 4, 2))
    for half in tl.static_range(2):
        first, second = _halves(even if half == 0 else odd)
        p0, p1 = _halves(first)
        p2, p3 = _halves(second)
        if INTERPRET:
            total += tl.floor(p0 * factor) + tl.floor(p1 * factor) + tl.floor(p2 * factor) + tl.floor(p3 * factor)
        else:
            total = tl.inline_asm_elementwise(
                "fma.rm.f32 $0, $2, $6, $1; fma.rm.f32 $0, $3, $6, $0; fma.rm.f32 $0, $4, $6, $0; "
                "fma.rm.f32 $0, $5, $6, $0;",
                "=&f,f,f,f,f,f,f",
                [total, p0, p1, p2, p3, factor],
                tl.float32,
                True,
                1,
            )
    return total


@triton.jit
def code_of_counts(ties):
    """How many scores `count_ties` found, as `code_of_floors` says it: more than any maximum's own, or none."""
    narrow = tl.floor(ties / _HIGH)
    wide = ties - narrow * _HIGH
    return tl.where(wide >= 2.0, 127, 0) + tl.where(narrow >= 2.0, 127 * 128, 0)


@triton.jit
def code_of_floors(wide_floors, narrow_floors):
    """The sums of a row's integer parts as one number below 2^14."""
    wide = tl.sum(tl.sum(wide_floors - 8388608.0, 2), 1)
    narrow = tl.sum(tl.sum(narrow_floors - 8388608.0, 2), 1)
    return tl.minimum(wide, 127.0).to(tl.int32) + tl.minimum(narrow, 127.0).to(tl.int32) * 128


@triton.jit
def tied(code, wide_alone, narrow_alone, bf16_is_wide):
    """Rows with several bf16 maxima, and rows with several P that round to 1: their integer parts sum to more than the
    maximum's own."""
    wide = (code & 127).to(tl.float32) > wide_alone
    narrow = ((code >> 7) & 127).to(tl.float32) > narrow_alone
    return tl.where(bf16_is_wide, wide, narrow), tl.where(bf16_is_wide, narrow, wide)


@triton.jit
def count_again(
    query, key, row_max, codes, first, papers, place, rows, length_q, length_k, strides, sizes, score_unit,
    BLOCK: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """The codes of BLOCK rows of one head that `add_floors` leaves: of rows outside FAST_TIES_FROM and FAST_TIES_BELOW,
    and with 2^14 for those that the paper's rule shifts, which asks for ties of its own.

    In the dQ pass these loops would cost every head registers. Nearly always there is nothing to do here.
    """
    batch, head, kv_head, start_q, start_k = place
    stride_q, stride_k = strides
    _, _, _, _, dim, scale, _, softcap, left, right, _, _ = sizes
    query = at_head(query, batch, head, start_q, stride_q)
    key = at_head(key, batch, kv_head, start_k, stride_k)
    dtype: tl.constexpr = query.dtype.element_ty
    seen = (diagonal(length_q, length_k, SPEC.TOP_LEFT), length_k, left, right)
    queries = first + tl.arange(0, BLOCK)
    inside = queries < length_q
    q = load_tile(query, 0, 0, first, BLOCK, stride_q[2], length_q, dim, SPEC, True, False)
    largest = tl.load(row_max + rows + queries, mask=inside, other=0.0)
    wide, narrow = tie_thresholds(largest, dtype)
    ties = tl.zeros((BLOCK,), tl.float32)
    near = tl.zeros((BLOCK,), tl.int32)
    last = tl.minimum(first + BLOCK, length_q) - 1
    low, _, _, high = key_ranges(first, last, seen, BLOCK, SPEC.HAS_LEFT, SPEC.HAS_RIGHT)
    for start in tl.range(low, high, BLOCK):
        k = load_tile(key, 0, 0, start, BLOCK, stride_k[2], length_k, dim, SPEC, True, False)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, SPEC)
        keys = start + tl.arange(0, BLOCK)
        mask = visible(queries[:, None], keys[None, :], seen, SPEC)
        scores = tl.where(mask, scores, float("-inf"))
        ties += count_ties(scores, score_unit, wide, narrow)
        near += tl.sum((largest[:, None] - scores * score_unit <= PAPER_TOLERANCE).to(tl.int32), 1)
    shifted = (near > 1) & (largest != 0.0) & (papers != 0)
    code = code_of_counts(ties) + tl.where(shifted, 16384, 0)
    tl.store(codes + rows + queries, code.to(tl.int16), mask=inside)
