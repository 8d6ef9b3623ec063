"""Counting, per row, the scores that stand at the row's maximum, by two definitions at once."""

import triton
import triton.language as tl

from foreshock.kernels.flash_attention.blocks import INTERPRET

_STEEP: tl.constexpr = tl.constexpr(2.0**100)
"""Any two fp32 scores that differ, times this, differ by more than 1 (but for a difference under 2^-99)."""

_HIGH: tl.constexpr = tl.constexpr(2.0**18)
"""Weight of the narrower definition in the packed count; rows of up to 2^18 keys are counted exactly."""


@triton.jit
def _next_below(x):
    """The largest fp32 number below x (finite)."""
    bits = x.to(tl.int32, bitcast=True)
    below = tl.where(bits < 0, bits + 1, bits - 1)
    return tl.where(x == 0.0, -1e-45, below.to(tl.float32, bitcast=True))


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
def one_tie_threshold(row_max, dtype: tl.constexpr):
    """As `statistics.one_tie_threshold`: the least score whose exp(score - row_max) rounds to 1 in `dtype`."""
    # log1p(-eps / 4): eps is 2^-7 in bf16 and 2^-10 in fp16.
    step: tl.constexpr = -0.0019550348358033506 if dtype == tl.bfloat16 else -0.00024417043217477346
    exact = row_max.to(tl.float64) + step
    near = exact.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    above = tl.where(bits < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    above = tl.where(near == 0.0, 1e-45, above)
    return tl.where(near.to(tl.float64) < exact, above, near)


@triton.jit
def tie_levels(row_max, score_unit, log2_lse, unit, dtype: tl.constexpr):
    """What the counting functions take of each row: thresholds, their factors, and whether bf16's is the wider one."""
    bf16 = bf16_tie_threshold(row_max)
    one = one_tie_threshold(row_max, dtype)
    wide = tl.minimum(bf16, one)
    narrow = tl.maximum(bf16, one)
    # P times its factor is 1 at the threshold, and a shade more, so that a score at the threshold counts.
    wide_factor = tl.exp2(tl.fma(wide / score_unit, -unit, log2_lse)) * (1.0 + 2.0**-21)
    narrow_factor = tl.exp2(tl.fma(narrow / score_unit, -unit, log2_lse)) * (1.0 + 2.0**-21)
    if not INTERPRET:
        wide = 2.0 - _next_below(wide) * _STEEP
        narrow = 2.0 - _next_below(narrow) * _STEEP
    return wide, narrow, wide_factor, narrow_factor, bf16 <= one


@triton.jit
def count_ties(products, score_unit, wide, narrow):
    """Packed count per row of the scores at or above each threshold, exact for any score.

    A comparison runs at half rate on a GPU, so it is done by a saturating multiply-add: 0 below, 1 at or above.
    """
    if INTERPRET:
        scores = products * score_unit
        steps = (scores >= wide[:, None]).to(tl.float32) + (scores >= narrow[:, None]).to(tl.float32) * _HIGH
    else:
        steep = score_unit * _STEEP
        low = tl.inline_asm_elementwise(
            "fma.rn.sat.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [products, steep, wide[:, None]], tl.float32, True, 1
        )
        high = tl.inline_asm_elementwise(
            "fma.rn.sat.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [products, steep, narrow[:, None]], tl.float32, True, 1
        )
        steps = high * _HIGH + low
    return tl.sum(steps, 1)


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
def _several(exact, floors, alone):
    """Whether a row has more than one entry at a threshold: `exact` counted one by one, `floors` the sum of the others'
    integer parts, `alone` the integer part of the maximum's own."""
    return (exact >= 2.0) | ((exact >= 1.0) & (floors >= 1.0)) | (floors > alone)


@triton.jit
def tied(count, wide_floors, narrow_floors, wide_alone, narrow_alone, bf16_is_wide):
    """Rows with several bf16 maxima, and rows with several P that round to 1."""
    narrow = tl.floor(count / _HIGH)
    several_wide = _several(count - narrow * _HIGH, wide_floors, wide_alone) | (narrow >= 2.0)
    several_narrow = _several(narrow, narrow_floors, narrow_alone)
    return tl.where(bf16_is_wide, several_wide, several_narrow), tl.where(bf16_is_wide, several_narrow, several_wide)
