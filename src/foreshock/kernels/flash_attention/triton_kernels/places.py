"""Device functions that map a program to its batch entry, head and sequence, and to the keys that its queries see."""

import triton
import triton.language as tl


@triton.jit
def turn(order):
    """Return block and plane of this program in a one-dimensional grid.

    order: blocks per plane, planes, planes per section. Sections run one after another; within a section, the first
    blocks of all planes run before the second blocks (Call.order says why).
    """
    blocks, planes, section = order
    program = tl.program_id(0)
    start = program // (section * blocks) * section
    width = tl.minimum(section, planes - start)
    program -= start * blocks
    return program // width, start + program % width


@triton.jit
def one_head(plane, sizes, cu_seqlens_q, cu_seqlens_k, SPEC: tl.constexpr):
    """Locate a plane, which is one query head of one sequence.

    Returns (batch entry, head, key head), its plane and first row in [B, H, Sq], and as in `place` the first row and
    length of its queries and keys.
    """
    heads, group, total_q, total_k = sizes[0], sizes[1], sizes[2], sizes[3]
    batch, head, start_q, length_q, start_k, length_k = place(
        plane, heads, cu_seqlens_q, cu_seqlens_k, total_q, total_k, SPEC.PACKED
    )
    plane = batch * heads + head
    rows = tl.cast(plane, tl.int64) * total_q + start_q
    return (batch, head, head // group), plane, rows, start_q, length_q, start_k, length_k


@triton.jit
def place(plane, planes, cu_seqlens_q, cu_seqlens_k, length_q, length_k, PACKED: tl.constexpr):
    """Return batch entry and head of plane `plane`, with `planes` per sequence, and the first row and length of the
    queries and keys of its sequence."""
    index = plane // planes
    batch = 0 if PACKED else index
    start_q, length_q, start_k, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
    return batch, plane % planes, start_q, length_q, start_k, length_k


@triton.jit
def sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED: tl.constexpr):
    """Return first row and length of the queries and keys of sequence `index`; the whole tensors unless PACKED."""
    start_q = 0
    start_k = 0
    if PACKED:
        start_q = tl.load(cu_seqlens_q + index)
        start_k = tl.load(cu_seqlens_k + index)
        length_q = tl.load(cu_seqlens_q + index + 1) - start_q
        length_k = tl.load(cu_seqlens_k + index + 1) - start_k
    return start_q, length_q, start_k, length_k


@triton.jit
def at_head(pointer, batch, head, start, strides):
    """Move `pointer` to a tensor [B, H, S, D] to row `start` of one head."""
    pointer += tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return pointer + tl.cast(start, tl.int64) * strides[2]


@triton.jit
def diagonal(length_q, length_k, TOP_LEFT: tl.constexpr):
    """Return the key on the diagonal of query 0."""
    if TOP_LEFT:
        return 0
    return length_k - length_q


@triton.jit
def key_ranges(first, last, seen, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return the keys that queries [first, last] see, as (low, full_low, full_high, high).

    Keys outside [low, high) are hidden from all queries; keys in [full_low, full_high) are visible to all queries. The
    first three are whole multiples of BLOCK apart, so that a loop in steps of BLOCK can run over each part.
    """
    offset, length_k, left, right = seen
    low = 0
    full_low = 0
    high = length_k
    full_high = length_k
    if HAS_RIGHT:
        high = tl.maximum(tl.minimum(high, last + offset + right + 1), 0)
        full_high = tl.maximum(tl.minimum(full_high, first + offset + right + 1), 0)
    full_high = full_high // BLOCK * BLOCK
    if HAS_LEFT:
        low = tl.maximum(first + offset - left, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(last + offset - left, 0), BLOCK) * BLOCK
        full_low = tl.minimum(full_low, tl.maximum(tl.cdiv(high, BLOCK) * BLOCK, low))
        full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@triton.jit
def visible(queries, keys, seen, SPEC: tl.constexpr):
    """Return which queries see which keys; the indices `queries` and `keys` broadcast against each other."""
    offset, length_k, left, right = seen
    # Both conditions in one bound, so that each entry needs only one comparison.
    last = length_k - 1
    if SPEC.HAS_RIGHT:
        last = tl.minimum(last, queries + (offset + right))
    mask = keys <= last
    if SPEC.HAS_LEFT:
        mask = mask & (keys >= queries + (offset - left))
    return mask
