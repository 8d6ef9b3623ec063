"""The prototype of the forward of attention for Hopper in Gluon, which hopper_forward.py measures its successor beside.

One warp loads tiles by the copy engine. Two groups of four warps take turns: one multiplies while the other computes
its softmax, and within a group the next scores are multiplied under the softmax of the last. It serves full and causal
attention in bf16 whose length is a multiple of 128, and stores O and the log-sum-exp; no statistic, no mode.
"""

import math
from typing import Final

import torch
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

BLOCK: Final = 128
"""Queries of a program, half of them for each group of warps, and keys of a tile."""
LN2: gl.constexpr = gl.constexpr(math.log(2))


@gluon.jit
def tile_of(program, SEQ: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """Head, block of queries and number of key tiles; under a causal mask a head's longest blocks come first."""
    blocks: gl.constexpr = SEQ // BLOCK
    head = program // blocks
    block = program % blocks
    if CAUSAL:
        block = blocks - 1 - block
        return head, block, block + 1
    return head, block, block * 0 + blocks


@gluon.jit
def load(
    descriptors, shared, full, empty, programs,
    SEQ: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that loads: each block's queries, then its tiles of keys and values from the last one down."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = shared
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    program = gl.program_id(0)
    step = 0
    turn = 0
    while program < programs:
        head, block, tiles = tile_of(program, SEQ, BLOCK, CAUSAL)
        first_key = (head // GROUP) * SEQ
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, BLOCK * DIM * 2)
        for half in gl.static_range(2):
            first = head * SEQ + block * BLOCK + half * (BLOCK // 2)
            tma.async_copy_global_to_shared(q_desc, [first, 0], q_full, q_tiles.index(half))
        for i in range(tiles):
            row = first_key + (tiles - 1 - i) * BLOCK
            slot = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), BLOCK * DIM * 2)
            tma.async_copy_global_to_shared(k_desc, [row, 0], k_full.index(slot), k_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), BLOCK * DIM * 2)
            tma.async_copy_global_to_shared(v_desc, [row, 0], v_full.index(slot), v_tiles.index(slot))
            step += 1
        turn += 1
        program += gl.num_programs(0)


@gluon.jit
def attend(
    HALF: gl.constexpr, o_desc, lse, shared, o_tiles, full, empty, turns, programs, unit,
    SEQ: gl.constexpr, BLOCK: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A group of four warps: half of each block's queries. `unit` turns a score into powers of two."""
    ROWS: gl.constexpr = BLOCK // 2
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    q_tiles, k_tiles, v_tiles = shared
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    query = q_tiles.index(HALF)
    out = o_tiles.index(HALF)
    program = gl.program_id(0)
    step = 0
    mine = 0
    turn = 0
    while program < programs:
        head, block, tiles = tile_of(program, SEQ, BLOCK, CAUSAL)
        first = block * BLOCK + HALF * ROWS
        mbarrier.wait(q_full, turn & 1)
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        mbarrier.wait(turns.index(HALF), mine & 1)
        mine += 1
        nothing = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
        asked = warpgroup_mma(query, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - HALF))
        scores = warpgroup_mma_wait(0, deps=[asked])
        mbarrier.arrive(k_empty.index(slot))
        if CAUSAL:  # tiles are as long as blocks: the first that is looked at holds the diagonal, and no other does
            rows = first + gl.arange(0, ROWS, layout=by_row)
            keys = (tiles - 1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, of_scores))
            scores = gl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
        largest = gl.max(scores, 1)
        p = gl.exp2(scores * unit - (largest * unit)[:, None])
        total = gl.sum(p, 1)
        rounded = gl.convert_layout(p.to(gl.bfloat16), of_p)
        acc = gl.zeros([ROWS, DIM], gl.float32, of_out)
        for _ in range(1, tiles):
            last = slot
            last_phase = (step // STAGES) & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            mbarrier.wait(turns.index(HALF), mine & 1)
            mine += 1
            nothing = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            asked = warpgroup_mma(query, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), last_phase)
            added = warpgroup_mma(rounded, v_tiles.index(last), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF))
            scores = warpgroup_mma_wait(1, deps=[asked])
            mbarrier.arrive(k_empty.index(slot))
            before = largest * unit
            largest = gl.maximum(largest, gl.max(scores, 1))
            shift = largest * unit
            shrink = gl.exp2(before - shift)
            p = gl.exp2(scores * unit - shift[:, None])
            total = total * shrink + gl.sum(p, 1)
            after = gl.convert_layout(p.to(gl.bfloat16), of_p)
            # It has been waited for, and passes at once. Its branch keeps ptxas from moving the softmax behind the wait
            # for the product that it is to run beside.
            mbarrier.wait(v_full.index(last), last_phase)
            acc, rounded = warpgroup_mma_wait(0, deps=[added, rounded])
            mbarrier.arrive(v_empty.index(last))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_out))[:, None]
            rounded = after
        mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
        added = warpgroup_mma(rounded, v_tiles.index(slot), acc, is_async=True)
        log_sum = (largest * unit + gl.log2(total)) * LN2
        acc, rounded = warpgroup_mma_wait(0, deps=[added, rounded])
        mbarrier.arrive(v_empty.index(slot))
        mbarrier.arrive(q_empty)
        step += 1
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_out))[:, None]
        tma.store_wait(0)
        out.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [head * SEQ + first, 0], out)
        gl.store(lse + head * SEQ + first + gl.arange(0, ROWS, layout=by_row), log_sum)
        turn += 1
        program += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, programs, unit,
    SEQ: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """O and the log-sum-exp of [heads * SEQ, DIM]; each program takes every num_programs-th block of queries."""
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK // 2, DIM], q_desc.layout)
    o_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK // 2, DIM], o_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(turns.index(0))
    shared = (q_tiles, k_tiles, v_tiles)
    full = (q_full, k_full, v_full)
    empty = (q_empty, k_empty, v_empty)
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), o_desc, lse, shared, o_tiles, full, empty, turns, programs, unit,
                      SEQ, BLOCK, DIM, STAGES, CAUSAL)),
            (attend, (gl.constexpr(1), o_desc, lse, shared, o_tiles, full, empty, turns, programs, unit,
                      SEQ, BLOCK, DIM, STAGES, CAUSAL)),
            (load, ((q_desc, k_desc, v_desc), shared, full, empty, programs, SEQ, GROUP, BLOCK, DIM, STAGES, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """O [B, H, S, D] and the log-sum-exp [B, H, S] in nats, of contiguous bf16; S a multiple of 128, D 64 or 128."""
    batch, heads, length, dim = query.shape
    if length % BLOCK or dim not in (64, 128) or key.shape[2] != length:
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)}: S must be a multiple of {BLOCK}, D 64, 128"
        )
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
        return TensorDescriptor.from_tensor(tensor.view(-1, dim), [rows, dim], layout)

    programs = batch * heads * (length // BLOCK)
    grid = (min(programs, torch.cuda.get_device_properties(query.device).multi_processor_count),)
    forward_kernel[grid](
        descriptor(query, BLOCK // 2), descriptor(key, BLOCK), descriptor(value, BLOCK), descriptor(out, BLOCK // 2),
        lse, programs, 1 / (math.sqrt(dim) * math.log(2)), length, heads // key.shape[1], BLOCK, dim, 2, causal,
        num_warps=4,
    )  # fmt: skip
    return out, lse
