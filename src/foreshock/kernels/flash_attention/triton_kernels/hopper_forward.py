"""The forward of attention for Hopper in Gluon: the outputs of forward.py, for heads that do not shift rows.

One warp loads tiles by the copy engine. Two groups of four warps take turns: one multiplies while the other computes
its softmax. Within a group, the product of the next scores overlaps the softmax of the last ones, and the first scores
of the next block of queries are multiplied together with the last values of this block, before its output is written.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import spec
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.hopper import DIM
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch, described
from foreshock.kernels.flash_attention.triton_kernels.passes import Outputs

BLOCK: gl.constexpr = gl.constexpr(128)
"""Queries of a block, half of them for each group of warps, and keys of a tile."""
ROWS: gl.constexpr = gl.constexpr(64)
HEAD_DIM: gl.constexpr = gl.constexpr(DIM)
STAGES: gl.constexpr = gl.constexpr(2)
"""Tiles of keys, and of values, in shared memory."""
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
SHIFTED: gl.constexpr = gl.constexpr(int(Mode.PAPER_SOFTMAX))
RESIDUAL_SCALE_FP16: gl.constexpr = gl.constexpr(spec.residual_scale(torch.float16))


@gluon.jit
def place(turn, sizes, modes, CAUSAL: gl.constexpr):
    """Return plane and block of queries of a program's turn, and whether to skip it, because another kernel computes
    heads that shift their rows.

    Under a causal mask, a program takes blocks in pairs: the n-th from the start and the n-th from the end. All pairs
    see the same number of keys, so programs that take every num_programs-th pair finish together.
    """
    blocks, _, heads, _, _, _ = sizes
    if CAUSAL:
        pairs = (blocks + 1) // 2
        item = gl.program_id(0) + (turn // 2) * gl.num_programs(0)
        plane = item // pairs
        pair = item % pairs
        second = turn % 2
        block = pair + (1 - second) * (blocks - 1 - 2 * pair)
        passed = (second == 1) & (2 * pair + 1 == blocks)  # if the number is odd, the middle block pairs with itself
    else:
        item = gl.program_id(0) + turn * gl.num_programs(0)
        plane = item // blocks
        block = item % blocks
        passed = turn < 0
    if modes is not None:
        passed = passed | ((gl.load(modes + plane % heads) & SHIFTED) != 0)
    return plane, block, passed


@gluon.jit
def next_block(turn, sizes, modes, CAUSAL: gl.constexpr):
    """Find the first turn, from this one on, with a block to compute.

    Returns the turn, its plane, block and number of key tiles, and whether there is such a turn.
    """
    _, planes, _, _, _, tiles = sizes
    turn = gl.to_tensor(turn)
    plane, block, passed = place(turn, sizes, modes, CAUSAL)
    while (plane < planes) & passed:
        turn += 1
        plane, block, passed = place(turn, sizes, modes, CAUSAL)
    tiles = gl.to_tensor(tiles)
    if CAUSAL:
        tiles = block + 1
    return turn, plane, block, tiles, plane < planes


@gluon.jit
def rounded_to(x, DTYPE: gl.constexpr):
    """Round x to a 16-bit type, but return fp32. Triton's conversion from bf16 is four times as slow."""
    if gl.float16 == DTYPE:
        return x.to(DTYPE).to(gl.float32)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }""",
        "=r,=r,r,r", [x], gl.float32, True, 2,
    )  # fmt: skip


@gluon.jit
def merged(first, second, other_first, other_second):
    """Return the two largest numbers of two ordered pairs."""
    least = gl.minimum(first, other_first)
    return gl.maximum(first, other_first), gl.maximum(least, gl.maximum(second, other_second))


@gluon.jit
def of_threads(scores, SECOND: gl.constexpr):
    """Return the largest score, or the two largest, that each of a row's four threads has: [rows, 4].

    A thread has pairs of adjacent columns.
    """
    even, odd = gl.split(scores.reshape((ROWS, BLOCK // 8, 4, 2)))
    if SECOND:
        return gl.reduce((gl.maximum(even, odd), gl.minimum(even, odd)), 1, merged)
    else:  # without `else`, the compiler would compile the return below in any case
        return gl.max(gl.maximum(even, odd), 1)


@gluon.jit
def load(descriptors, shared, full, empty, sizes, modes, CAUSAL: gl.constexpr):
    """The loading warp: load each block's queries, then its tiles of keys and values from the last to the first."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = shared
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    _, _, heads, group, _, _ = sizes
    count = 0
    step = 0
    turn, plane, block, tiles, more = next_block(0, sizes, modes, CAUSAL)
    while more:
        batch = plane // heads
        head = plane % heads
        mbarrier.wait(q_empty.index(count & 1), ((count >> 1) & 1) ^ 1)
        mbarrier.expect(q_full.index(count & 1), BLOCK * HEAD_DIM * 2)
        for half in gl.static_range(2):
            first = block * BLOCK + half * ROWS
            tile = q_tiles.index((count & 1) * 2 + half)
            tma.async_copy_global_to_shared(q_desc, [batch, head, first, 0], q_full.index(count & 1), tile)
        for i in range(tiles):
            at = [batch, head // group, (tiles - 1 - i) * BLOCK, 0]
            slot = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), BLOCK * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), BLOCK * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_tiles.index(slot))
            step += 1
        count += 1
        turn, plane, block, tiles, more = next_block(turn + 1, sizes, modes, CAUSAL)


@gluon.jit
def attend(
    HALF: gl.constexpr, o_desc, r_desc, lse, row_max, second, shared, o_tiles, full, empty, turns, sizes, modes, units,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """A group of four warps: compute half of each block's queries.

    second: output of each row's second largest score, which equals the largest one if that occurs twice. units: factors
    from a product of query and key to the exponent of two, and to the score.
    """
    DTYPE: gl.constexpr = o_desc.dtype
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    q_tiles, k_tiles, v_tiles = shared
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    _, _, heads, _, lengths, _ = sizes
    length_q, length_k = lengths
    unit, score_unit = units
    local = gl.arange(0, ROWS, layout=by_row)
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, of_scores))
    out = o_tiles.index(HALF)
    step = 0
    count = 0
    turn, plane, block, tiles, more = next_block(0, sizes, modes, CAUSAL)
    mbarrier.wait(q_full.index(0), 0, pred=more)
    mbarrier.wait(k_full.index(0), 0, pred=more)
    mbarrier.wait(turns.index(HALF), 0)
    mine = 1
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
    query = q_tiles.index(HALF).reshape((ROWS, HEAD_DIM))
    keys = k_tiles.index(0).reshape((BLOCK, HEAD_DIM)).permute((1, 0))
    asked = warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF))
    scores = warpgroup_mma_wait(0, deps=[asked])
    mbarrier.arrive(k_empty.index(0), pred=more)
    while more:
        # Tiles are processed from the last one down: only the last one contains the diagonal, or the end of the keys.
        first = block * BLOCK + HALF * ROWS
        start = (tiles - 1) * BLOCK
        if CAUSAL:
            # Inline assembly hides the value: otherwise the compiler keeps each column's index in a register.
            limit = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [first - start + local], gl.int32, False, 1)
            scores = gl.where(limit[:, None] >= column[None, :], scores, float("-inf"))
        elif TAIL:
            scores = gl.where((start + column < length_k)[None, :], scores, float("-inf"))
        if second is None:
            largest = gl.max(scores, 1)
        else:
            firsts, seconds = of_threads(scores, True)
            largest = gl.convert_layout(gl.max(firsts, 1), by_row)
        # If all scores of a row are minus infinity, -inf - -inf would be NaN.
        shift = gl.where(largest == float("-inf"), 0.0, largest * unit)
        p = gl.exp2(gl.fma(scores, unit, -shift[:, None]))
        total = gl.sum(p, 1)
        before = gl.where(largest == float("-inf"), largest, shift)
        rounded = gl.convert_layout(p.to(DTYPE), of_p)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, of_out)
        query = q_tiles.index((count & 1) * 2 + HALF).reshape((ROWS, HEAD_DIM))
        next_turn, next_plane, following, next_tiles, more = next_block(turn + 1, sizes, modes, CAUSAL)
        for i in range(1, tiles):
            last = step % STAGES
            last_phase = (step // STAGES) & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            mbarrier.wait(turns.index(HALF), mine & 1)
            mine += 1
            nothing = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            keys = k_tiles.index(slot).reshape((BLOCK, HEAD_DIM)).permute((1, 0))
            asked = warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), last_phase)
            added = warpgroup_mma(rounded, v_tiles.index(last).reshape((BLOCK, HEAD_DIM)), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF))
            if r_desc is not None:  # noqa: SIM102
                if i == 1:  # the last block's residual was stored in its query tile; that copy is finished by now
                    tma.store_wait(0)
                    mbarrier.arrive(q_empty.index((count & 1) ^ 1), pred=count > 0)
            scores = warpgroup_mma_wait(1, deps=[asked])
            mbarrier.arrive(k_empty.index(slot))
            if second is None:
                largest = gl.maximum(largest, gl.max(scores, 1))
            else:
                largest = gl.convert_layout(gl.max(gl.maximum(firsts, of_threads(scores, False)), 1), by_row)
            shift = gl.where(largest == float("-inf"), 0.0, largest * unit)
            shrink = gl.exp2(before - shift)
            # `shift` is rounded once and used for every entry and for the rescaling, so its error cancels in P / l.
            p = gl.exp2(gl.fma(scores, unit, -shift[:, None]))
            total = total * shrink + gl.sum(p, 1)
            before = gl.where(largest == float("-inf"), largest, shift)
            if second is not None:
                # No instruction waits for this result, so here it overlaps the exponentials. The compiler reuses the
                # maxima that `largest` needed.
                found = of_threads(scores, True)
                firsts, seconds = merged(firsts, seconds, found[0], found[1])
            after = gl.convert_layout(p.to(DTYPE), of_p)
            # This barrier has already passed. Its branch keeps ptxas from moving the softmax after the wait for the
            # product, which it should overlap.
            mbarrier.wait(v_full.index(last), last_phase)
            acc, rounded = warpgroup_mma_wait(0, deps=[added, rounded])
            mbarrier.arrive(v_empty.index(last))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_out))[:, None]
            rounded = after
        if r_desc is None:
            mbarrier.arrive(q_empty.index(count & 1))
        elif tiles == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((count & 1) ^ 1), pred=count > 0)
        last = step % STAGES
        last_phase = (step // STAGES) & 1
        step += 1
        count += 1
        slot = step % STAGES
        # The first scores of the next block; after the last block, the result is not used.
        mbarrier.wait(q_full.index(count & 1), (count >> 1) & 1, pred=more)
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1, pred=more)
        mbarrier.wait(turns.index(HALF), mine & 1)
        mine += 1
        nothing = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
        keys = k_tiles.index(slot).reshape((BLOCK, HEAD_DIM)).permute((1, 0))
        query = q_tiles.index((count & 1) * 2 + HALF).reshape((ROWS, HEAD_DIM))
        asked = warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        added = warpgroup_mma(rounded, v_tiles.index(last).reshape((BLOCK, HEAD_DIM)), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - HALF))
        scores = warpgroup_mma_wait(1, deps=[asked])
        mbarrier.arrive(k_empty.index(slot), pred=more)
        total = gl.where(total == 0.0, 1.0, total)
        log_sum = gl.where(largest == float("-inf"), largest, (before + gl.log2(total)) * LN2)
        at = plane.to(gl.int64) * length_q + first + local
        gl.store(lse + at, log_sum, mask=first + local < length_q)
        gl.store(row_max + at, largest * score_unit, mask=first + local < length_q)
        if second is not None:
            after_largest = gl.convert_layout(gl.reduce((firsts, seconds), 1, merged)[1], by_row)
            gl.store(second + at, after_largest * score_unit, mask=first + local < length_q)
        mbarrier.wait(v_full.index(last), last_phase)
        acc, rounded = warpgroup_mma_wait(0, deps=[added, rounded])
        mbarrier.arrive(v_empty.index(last))
        exact = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_out))[:, None]
        tma.store_wait(0)
        at_tile = [plane // heads, plane % heads, first, 0]
        if r_desc is not None:
            high = rounded_to(exact, DTYPE)
            lost = exact - high
            if gl.float16 == DTYPE:
                lost *= RESIDUAL_SCALE_FP16
            out.reshape((ROWS, HEAD_DIM)).store(high.to(DTYPE))
            low = q_tiles.index(((count & 1) ^ 1) * 2 + HALF)
            low.reshape((ROWS, HEAD_DIM)).store(lost.to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, at_tile, out)
            tma.async_copy_shared_to_global(r_desc, at_tile, low)
        else:
            out.reshape((ROWS, HEAD_DIM)).store(exact.to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, at_tile, out)
        turn = next_turn
        plane = next_plane
        block = following
        tiles = next_tiles
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("blocks", "planes", "heads", "group", "length_q", "length_k", "tiles"))
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, r_desc, lse, row_max, second, modes,
    blocks, planes, heads, group, length_q, length_k, tiles, unit, score_unit,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Compute every num_programs-th block of queries, or pair of blocks, in each program.

    All warps of a program must read the same modes, or one waits for ever; so modes only change between launches.
    sizes: blocks per plane, planes, heads, query heads per key head, (queries, keys), tiles of keys.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [4, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    o_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, HEAD_DIM], o_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(turns.index(0))
    sizes = (blocks, planes, heads, group, (length_q, length_k), tiles)
    units = (unit, score_unit)
    shared = (q_tiles, k_tiles, v_tiles)
    full = (q_full, k_full, v_full)
    empty = (q_empty, k_empty, v_empty)
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), o_desc, r_desc, lse, row_max, second, shared, o_tiles, full, empty, turns,
                      sizes, modes, units, CAUSAL, TAIL)),
            (attend, (gl.constexpr(1), o_desc, r_desc, lse, row_max, second, shared, o_tiles, full, empty, turns,
                      sizes, modes, units, CAUSAL, TAIL)),
            (load, ((q_desc, k_desc, v_desc), shared, full, empty, sizes, modes, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor of a tensor [B, H, S, D] for tiles [1, 1, rows, columns]."""
    kind = gl.float16 if tensor.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], kind)
    return TensorDescriptor(*described(tensor, rows, columns), layout)


def launch(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    modes: Tensor | None,
) -> None:
    """Launch a forward for which hopper.serves is true; it does not write the outputs of heads that shift their rows.

    inputs are query, key and value; outputs are out, its residual, lse, row_max and second (None: not computed).
    """

    def settle() -> Launch:
        block, rows = BLOCK.value, ROWS.value
        blocks = triton.cdiv(call.longest_q, block)
        planes = call.sequences * call.heads
        causal = call.spec.causal != "none"
        items = planes * ((blocks + 1) // 2 if causal else blocks)
        processors = torch.cuda.get_device_properties(inputs[0].device).multi_processor_count
        groups = (call.heads, call.heads // call.kv_heads)
        lengths = (call.longest_q, call.longest_k)
        tail = not causal and call.longest_k % block > 0
        half, whole = (rows, DIM), (block, DIM)
        return Launch(
            hopper_forward_kernel,
            (min(items, processors), 1, 1),
            (blocks, planes, *groups, *lengths, triton.cdiv(lengths[1], block), call.unit, call.score_unit),
            {"CAUSAL": causal, "TAIL": tail},
            {"num_warps": 4},
            {0: half, 1: whole, 2: whole, 3: half, 4: half},
            descriptor,
        )

    call.launch("hopper forward", (*inputs, *outputs, modes), settle)
