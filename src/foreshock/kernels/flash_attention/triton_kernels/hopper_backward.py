"""The backward of attention for Hopper in Gluon: computes in one pass what grad_query.py and grad_key.py do in two.

Each program computes dK and dV of a block of keys, and adds its part of dQ to fp32 sums in device memory. That takes
five products instead of the seven of the two Triton passes. One warp loads tiles by the copy engine. Two groups of four
warps process 64 keys each; each computes half of dQ's columns, for which it needs the dS of both groups.

A program processes some of the query heads that share a key head, one after the other (`hopper.members_of`). If these
are not all, it adds dK and dV to fp32 sums too. The order of these additions varies, so equal inputs may give results
that differ in their last bits.

dQ of heads with corrected rows is not written here: Triton's pass computes it first, and corrects delta for this pass.
"""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels import hopper
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch, described
from foreshock.kernels.flash_attention.triton_kernels.passes import Grads, RowVectors, Tensors
from foreshock.kernels.flash_attention.triton_kernels.rounding import launch_rounding

DIM: gl.constexpr = gl.constexpr(hopper.DIM)
KEYS: gl.constexpr = gl.constexpr(hopper.BLOCK // 2)
"""Keys of a group of warps: half of a program's block."""
QUERIES: gl.constexpr = gl.constexpr(64)
"""Queries of a tile."""
STAGES: gl.constexpr = gl.constexpr(2)
"""Tiles of queries, of the gradient of O and of dS in shared memory."""


@builtin
def add_to_global(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile to device memory by the copy engine. Triton 3.6 has this operation, but Gluon does not expose it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def place_of(sizes):
    """Return sequence, first query head and block of keys of this program, in the order of places.turn."""
    blocks, planes, section, _, heads, _, members = sizes
    program = gl.program_id(0)
    start = program // (section * blocks) * section
    width = gl.minimum(section, planes - start)
    program -= start * blocks
    head = (start + program % width) * members
    return head // heads, head % heads, program // width


@gluon.jit
def tiles_of(block, sizes, CAUSAL: gl.constexpr):
    """Return the first tile of queries of a block of keys, and the number of tiles. Each block starts at a different
    tile, so that concurrent programs do not add to the same dQ."""
    _, _, _, tiles, _, _, _ = sizes
    first = block * (2 * KEYS // QUERIES)
    count = gl.to_tensor(tiles)
    if CAUSAL:
        count = tiles - first
    return first, count


@gluon.jit
def load(descriptors, shared, full, empty, sizes, CAUSAL: gl.constexpr):
    """The loading warp: load a block of keys and values, then tiles of queries with -lse and -delta, and of dO."""
    q_desc, k_desc, v_desc, g_desc, r_desc = descriptors
    q_tiles, k_tiles, v_tiles, g_tiles, r_tiles = shared
    kv_full, q_full, g_full, _ = full
    _, _, _, tiles, heads, group, members = sizes
    batch, head, block = place_of(sizes)
    kv_head = head // group
    mbarrier.expect(kv_full, 4 * KEYS * DIM * 2)
    for half in gl.static_range(2):
        at = [batch, kv_head, (2 * block + half) * KEYS, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_full, k_tiles.index(half))
        tma.async_copy_global_to_shared(v_desc, at, kv_full, v_tiles.index(half))
    first, count = tiles_of(block, sizes, CAUSAL)
    step = 0
    for member in range(head, head + members):
        for i in range(count):
            row = (first + i) % tiles * QUERIES
            slot = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), QUERIES * DIM * 2 + QUERIES * 16 * 2)
            at = [batch, member, row, 0]
            tma.async_copy_global_to_shared(q_desc, at, q_full.index(slot), q_tiles.index(slot))
            at_rows = [batch * heads + member, 0, row, 0]
            tma.async_copy_global_to_shared(r_desc, at_rows, q_full.index(slot), r_tiles.index(slot))
            mbarrier.expect(g_full.index(slot), QUERIES * DIM * 2)
            tma.async_copy_global_to_shared(g_desc, at, g_full.index(slot), g_tiles.index(slot))
            step += 1


@gluon.jit
def take_columns(FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the matrix [KEYS, 16] whose product with folded rows is the sum of their columns FIRST to FIRST + 2."""
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([KEYS, 16], gl.int32, LAYOUT)
    return gl.where((column >= FIRST) & (column < FIRST + 3), 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def hidden_zero(step):
    """Return a 0 that the compiler cannot predict, so that data indexed by it do not stay in registers in the loop."""
    return gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [step], gl.int32, False, 1)


@gluon.jit
def ask_scores(take, k_tile, q_tile, r_tile):
    """Start the two products of S^T - lse, in units of 1 / unit, or of dP^T - delta, given values and dO."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    nothing = gl.zeros([KEYS, QUERIES], gl.float32, of_scores)
    rows = r_tile.reshape((QUERIES, 16)).permute((1, 0))
    asked = warpgroup_mma(take, rows, nothing, use_acc=False, is_async=True)
    queries = q_tile.reshape((QUERIES, DIM)).permute((1, 0))
    return warpgroup_mma(k_tile.reshape((KEYS, DIM)), queries, asked, is_async=True)


@gluon.jit
def ask_grad_query(ds_tiles, slot, k_tiles, zero, HALF: gl.constexpr):
    """Start the two products, one for each group's keys, of half of dQ's columns."""
    of_query: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16])
    nothing = gl.zeros([QUERIES, DIM // 2], gl.float32, of_query)
    k = k_tiles.index(zero).reshape((KEYS, DIM)).slice(HALF * (DIM // 2), DIM // 2, 1)
    asked = warpgroup_mma(ds_tiles.index(slot * 2).permute((1, 0)), k, nothing, use_acc=False, is_async=True)
    k = k_tiles.index(zero + 1).reshape((KEYS, DIM)).slice(HALF * (DIM // 2), DIM // 2, 1)
    return warpgroup_mma(ds_tiles.index(slot * 2 + 1).permute((1, 0)), k, asked, is_async=True)


@gluon.jit
def ask_grads(p, dp, dv, dk, q_tiles, g_tiles, ds_tiles, ds_full, slot, HALF: gl.constexpr):
    """Write dS to shared memory and start the products of dV and dK; return the products and their operands, which are
    in registers.

    The old dS at this place is no longer needed: this group read it two steps ago, and the other group read it before
    it wrote its dS of the last step, for which this group has waited.
    """
    of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_grad, 2)
    weights = gl.convert_layout(p.to(q_tiles.dtype), of_p)
    ds = (p * dp).to(q_tiles.dtype)
    ds_tiles.index(slot * 2 + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))
    rounded = gl.convert_layout(ds, of_p)
    added = warpgroup_mma(weights, g_tiles.index(slot).reshape((QUERIES, DIM)), dv, is_async=True)
    adding = warpgroup_mma(rounded, q_tiles.index(slot).reshape((QUERIES, DIM)), dk, is_async=True)
    return added, adding, weights, rounded


@gluon.jit
def add_grad(desc, at, grad, tile):
    """Add dK or dV of a group of warps to the fp32 sums that several programs share.

    One half of the columns follows the other through `tile` [1, 1, KEYS, DIM // 2], which the copy engine may still
    read from.
    """
    left, right = grad.reshape((KEYS, 2, DIM // 2)).permute((0, 2, 1)).split()
    batch, head, row = at
    tma.store_wait(0)
    tile.reshape((KEYS, DIM // 2)).store(left)
    fence_async_shared()
    add_to_global(desc, [batch, head, row, 0], tile)
    tma.store_wait(0)
    tile.reshape((KEYS, DIM // 2)).store(right)
    fence_async_shared()
    add_to_global(desc, [batch, head, row, DIM // 2], tile)


@gluon.jit
def weights_of(scores, turn, key, unit, CAUSAL: gl.constexpr):
    """Return P^T of the turn-th tile, counted from the block's first."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    if CAUSAL:
        column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, of_scores))
        # Inline assembly hides the value: otherwise the compiler keeps each column's index in a register. A branch that
        # masks only the two tiles that need it makes ptxas spill.
        limit = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [key - turn * QUERIES], gl.int32, False, 1)
        scores = gl.where(column[None, :] >= limit[:, None], scores, float("-inf"))
    return gl.exp2(scores * unit)


@gluon.jit
def attend(
    HALF: gl.constexpr, outputs, shared, own, full, empty, sizes, units, length, CAUSAL: gl.constexpr,
    TAIL: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """A group of four warps: compute 64 keys. units: the factor from a score to its exponent of two, and the scale."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    of_take: gl.constexpr = gl.DotOperandLayout(0, of_scores, 2)
    dq_desc, dk_desc, dv_desc = outputs
    q_tiles, k_tiles, v_tiles, g_tiles, r_tiles = shared
    ds_tiles, dq_tiles = own
    kv_full, q_full, g_full, ds_full = full
    _, _, _, tiles, _, group, members = sizes
    unit, scale = units
    batch, head, block = place_of(sizes)
    first, count = tiles_of(block, sizes, CAUSAL)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, of_scores)) + HALF * KEYS
    take_lse = take_columns(0, of_take)
    take_delta = take_columns(3, of_take)
    if TAIL:
        # Keys after the last one do not subtract lse and delta: their P is 1 for any lse, and their dS is 0.
        row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, of_take)) + (2 * block + HALF) * KEYS
        nothing = gl.zeros([KEYS, 16], gl.bfloat16, of_take)
        take_lse = gl.where((row < length)[:, None], take_lse, nothing)
        take_delta = gl.where((row < length)[:, None], take_delta, nothing)
    dk = gl.zeros([KEYS, DIM], gl.float32, of_grad)
    dv = gl.zeros([KEYS, DIM], gl.float32, of_grad)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    asked = ask_scores(take_lse, k_tiles.index(HALF), q_tiles.index(0), r_tiles.index(0))
    mbarrier.wait(g_full.index(0), 0)
    asked_p = ask_scores(take_delta, v_tiles.index(HALF), g_tiles.index(0), r_tiles.index(0))
    scores = warpgroup_mma_wait(2, deps=[asked])
    p = weights_of(scores, 0, key, unit, CAUSAL)
    dp = warpgroup_mma_wait(0, deps=[asked_p])
    turn = 0
    total = members * count
    for step in range(total - 1):
        # No product is in flight here. P and dP belong to this step; those of the next step are computed below.
        zero = hidden_zero(step)
        slot = step % STAGES
        phase = (step // STAGES) & 1
        after = (step + 1) % STAGES
        next_phase = ((step + 1) // STAGES) & 1
        added, adding, weights, rounded = ask_grads(p, dp, dv, dk, q_tiles, g_tiles, ds_tiles, ds_full, slot, HALF)
        at = [batch, head, (first + turn) % tiles * QUERIES, HALF * (DIM // 2)]
        turn += 1
        if turn == count:
            turn = 0
            head += 1
        # The next scores are started before the wait for the other group's dS, so only dP does not overlap.
        mbarrier.wait(q_full.index(after), next_phase)
        asked = ask_scores(take_lse, k_tiles.index(zero + HALF), q_tiles.index(after), r_tiles.index(after))
        dv, dk, weights, rounded = warpgroup_mma_wait(2, deps=[added, adding, weights, rounded])
        mbarrier.arrive(empty.index(slot))
        mbarrier.wait(ds_full.index(slot), phase)
        asked_query = ask_grad_query(ds_tiles, slot, k_tiles, zero, HALF)
        scores = warpgroup_mma_wait(2, deps=[asked])
        p = weights_of(scores, turn, key, unit, CAUSAL)
        # This barrier has already passed. Its branch keeps ptxas from moving exp2 after the wait for the product, which
        # it should overlap.
        mbarrier.wait(ds_full.index(slot), phase)
        dq = warpgroup_mma_wait(0, deps=[asked_query])
        tma.store_wait(0)
        dq_tile = dq_tiles.index(zero + HALF)
        dq_tile.reshape((QUERIES, DIM // 2)).store(dq)
        fence_async_shared()
        add_to_global(dq_desc, at, dq_tile)
        mbarrier.wait(g_full.index(after), next_phase)
        asked_p = ask_scores(take_delta, v_tiles.index(zero + HALF), g_tiles.index(after), r_tiles.index(after))
        dp = warpgroup_mma_wait(0, deps=[asked_p])
    slot = (total - 1) % STAGES
    phase = ((total - 1) // STAGES) & 1
    added, adding, weights, rounded = ask_grads(p, dp, dv, dk, q_tiles, g_tiles, ds_tiles, ds_full, slot, HALF)
    mbarrier.wait(ds_full.index(slot), phase)
    asked_query = ask_grad_query(ds_tiles, slot, k_tiles, hidden_zero(total), HALF)
    dv, weights = warpgroup_mma_wait(3, deps=[added, weights])
    out = v_tiles.index(HALF)  # this group's values are not needed any more
    at = [batch, head // group, (2 * block + HALF) * KEYS, 0]
    if not SHARED:
        out.reshape((KEYS, DIM)).store(dv.to(q_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, at, out)
    dq, dk, rounded = warpgroup_mma_wait(0, deps=[asked_query, adding, rounded])
    tma.store_wait(0)
    dq_tile = dq_tiles.index(HALF)
    dq_tile.reshape((QUERIES, DIM // 2)).store(dq)
    if not SHARED:
        out.reshape((KEYS, DIM)).store((dk * scale).to(q_tiles.dtype))
    fence_async_shared()
    add_to_global(dq_desc, [batch, head, (first + turn) % tiles * QUERIES, HALF * (DIM // 2)], dq_tile)
    if SHARED:
        add_grad(dv_desc, at[:3], dv, dq_tile)
        add_grad(dk_desc, at[:3], dk * scale, dq_tile)
    else:
        tma.async_copy_shared_to_global(dk_desc, at, out)
    tma.store_wait(0)


@gluon.jit
def barriers(ARRIVALS: gl.constexpr):
    """Create a barrier for each tile in shared memory."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize=("blocks", "planes", "section", "tiles", "heads", "group", "members"))
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, g_desc, r_desc, dq_desc, dk_desc, dv_desc,
    blocks, planes, section, tiles, heads, group, members, unit, scale,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Process 128 keys and the query heads of a key head that this program takes.

    sizes: blocks per plane, planes, planes per section, tiles of queries, query heads, query heads per key head, query
    heads per program. TAIL: the last block of keys is not full, and there is no causal mask to hide its missing keys.
    SHARED: dK and dV are fp32 sums to which several programs add.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, QUERIES, DIM], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, KEYS, DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, KEYS, DIM], v_desc.layout)
    g_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, QUERIES, DIM], g_desc.layout)
    r_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, QUERIES, 16], r_desc.layout)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * 2, KEYS, QUERIES], of_ds)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, QUERIES, DIM // 2], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    full = (kv_full, barriers(1), barriers(1), barriers(2))
    empty = barriers(2)
    fence_async_shared()
    sizes = (blocks, planes, section, tiles, heads, group, members)
    shared = (q_tiles, k_tiles, v_tiles, g_tiles, r_tiles)
    outputs = (dq_desc, dk_desc, dv_desc)
    own = (ds_tiles, dq_tiles)
    units = (unit, scale)
    loads = (q_desc, k_desc, v_desc, g_desc, r_desc)
    length = gl.constexpr(0)
    if TAIL:
        length = k_desc.shape[2]
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), outputs, shared, own, full, empty, sizes, units, length, CAUSAL, TAIL, SHARED)),
            (attend, (gl.constexpr(1), outputs, shared, own, full, empty, sizes, units, length, CAUSAL, TAIL, SHARED)),
            (load, (loads, shared, full, empty, sizes, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


def tiles(*, shared: bool) -> dict[int, tuple[int, int]]:
    """Return the tile (rows, columns) of the copy engine for q, k, v, dO, folded rows, dQ, dK and dV, by index."""
    return {place: (64, columns) for place, columns in enumerate((128, 128, 128, 128, 16, 64, *_GRADS[shared]))}


_GRADS: Final = {False: (128, 128), True: (64, 64)}
_KINDS: Final = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor of a tensor [B, H, S, D] for tiles [1, 1, rows, columns]."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _KINDS[tensor.dtype])
    return TensorDescriptor(*described(tensor, rows, columns), layout)


def launch(call: Call, given: Tensors, rows: RowVectors, grads: Grads) -> None:
    """Launch a backward for which hopper.takes_backward is true: dK, dV, and dQ of heads without row correction.

    The sums of dQ temporarily take 4 bytes per element; so do those of dK and dV if several programs share them.
    """
    group, members = call.heads // call.kv_heads, hopper.members_of(call, grads[0].device)
    shared = members < group
    # The sums are dense and have the strides of their gradients.
    sums = [torch.zeros_like(grad, dtype=torch.float32) for grad in (grads if shared else grads[:1])]

    def settle() -> Launch:
        planes = call.sequences * call.heads // members
        order = call.order(triton.cdiv(call.longest_k, hopper.BLOCK), planes, call.longest_q)
        numbers = (*order, triton.cdiv(call.longest_q, QUERIES.value), call.heads, group, members)
        causal = call.spec.causal != "none"
        return Launch(
            hopper_backward_kernel,
            (order[0] * order[1], 1, 1),
            (*numbers, float(call.unit), float(call.spec.scale)),
            {"CAUSAL": causal, "TAIL": not causal and call.longest_k % hopper.BLOCK > 0, "SHARED": shared},
            {"num_warps": 4},
            tiles(shared=shared),
            descriptor,
        )

    call.launch(("hopper backward", members), (*given.operands, rows.folded, *sums, *grads[len(sums) :]), settle)
    launch_rounding(call, "hopper dQ", sums[0], grads[0], float(call.spec.scale), given.modes)
    for name, total, grad in zip(("hopper dK", "hopper dV"), sums[1:], grads[1:], strict=False):
        launch_rounding(call, name, total, grad, 1.0, None)
