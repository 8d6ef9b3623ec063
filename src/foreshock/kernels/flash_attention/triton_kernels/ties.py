"""Detect tied rows from the two largest scores of each row, by two definitions of a tie."""

import triton
import triton.language as tl

from foreshock.kernels.flash_attention.triton_kernels.blocks import INTERPRET


@triton.jit
def merged(largest, second, other_largest, other_second):
    """Return the largest two of two (largest, second) pairs."""
    return tl.maximum(largest, other_largest), tl.maximum(
        tl.minimum(largest, other_largest), tl.maximum(second, other_second)
    )


@triton.jit
def largest_two(scores):
    """Return the largest and second largest of each row of scores [R, C]; equal if the largest occurs twice."""
    if INTERPRET:  # the reduction below would merge pair by pair in Python
        largest = tl.max(scores, 1)
        at_largest = scores == largest[:, None]
        below = tl.max(tl.where(at_largest, float("-inf"), scores), 1)
        return largest, tl.where(tl.sum(at_largest.to(tl.int32), 1) > 1, largest, below)
    # A thread has both scores of a pair of columns, so a minimum and a maximum order the pair.
    first, second = tl.split(scores.reshape(scores.shape[0], scores.shape[1] // 2, 2))
    return tl.reduce((tl.maximum(first, second), tl.minimum(first, second)), 1, merged)


@triton.jit
def bf16_tie_threshold(row_max):
    """Return the least score that rounds to the same bf16 as the row's maximum."""
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
    """Return the least score that is at most MARGIN below row_max, rounded up to the next fp32 number if needed."""
    near = row_max - MARGIN
    bits = near.to(tl.int32, bitcast=True)
    above = tl.where(bits < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    return tl.where(row_max - near > MARGIN, above, near)  # the difference of two close fp32 numbers is exact


@triton.jit
def tied(row_max, second, dtype: tl.constexpr):
    """Return the rows in which several scores round to one bf16 number, and those in which several P round to 1."""
    # log1p(-eps / 4), rounded down: eps is 2^-7 in bf16 and 2^-10 in fp16.
    margin: tl.constexpr = 0.001955034676939249 if dtype == tl.bfloat16 else 0.0002441704273223877
    return second >= bf16_tie_threshold(row_max), second >= one_tie_threshold(row_max, margin)
