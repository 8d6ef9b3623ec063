"""FlashAttention-2 backward in Triton, in three passes: rows (delta), dQ (counts ties), dK and dV; then the statistics.

No pass uses atomics: every block of rows writes its own partial statistics, and one small kernel adds them up in a
fixed order, so that equal inputs give equal bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.kernels.flash_attention.blocks import (
    INTERPRET,
    cap_scores,
    diagonal,
    in_registers,
    kept,
    key_ranges,
    load_tile,
    sequence,
    store_tile,
    to_operand,
    visible,
)
from foreshock.kernels.flash_attention.counting import count_kernel, merge_kernel, row_kernel
from foreshock.kernels.flash_attention.launch import Call, call_of, launch
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.ties import add_floors, code_of_floors, slow_ties_kernel
from foreshock.kernels.flash_attention.tuning import Config, Configs, configs


@triton.jit
def take_columns(first: tl.constexpr, ROWS: tl.constexpr):
    """The matrix [ROWS, 16] whose product with folded rows adds up their columns first to first + 2."""
    column = tl.arange(0, 16)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    dtype: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    return tl.where((column >= first) & (column < first + 3), 1.0, 0.0).to(dtype)


@triton.jit
def _grad_query(
    acc, wide_floors, narrow_floors, q, grad_out, key, value, batch, kv_head, low, high, queries, log2_lse, delta,
    wide, narrow, start_q, start_k, offset, length_k, stride_k, stride_v, dim, unit,
    score_unit, scale, softcap, left, right,
    keep_scale, seed, plane, threshold,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the keys [low, high) to dQ of one block of queries, and what ties in them to its floors (ties.py)."""
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        v = load_tile(value, batch, kv_head, start, BLOCK_N, stride_v, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, PRESCALED, SOFTCAP)
        grad_p = tl.dot(grad_out, tl.trans(v))
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            mask = visible(queries[:, None], keys[None, :], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(tl.fma(scores, unit, -log2_lse[:, None]))
        if COUNT:
            wide_floors = add_floors(wide_floors, p, wide)
            narrow_floors = add_floors(narrow_floors, p, narrow)
        if DROPOUT:
            keep = kept(seed, plane, start_q + queries[:, None], start_k + keys[None, :], threshold)
            grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
        grad_s = p * (grad_p - delta[:, None])
        if SOFTCAP:
            capped = tl.where(p == 0.0, 0.0, scores / softcap)
            grad_s = grad_s * (1.0 - capped * capped)
        acc = tl.dot(to_operand(grad_s, DTYPE), k, acc)
    return acc, wide_floors, narrow_floors


@triton.jit
def grad_query_kernel(
    query, key, value, grad_out, grad_query, log2_lses, deltas, factors, codes, cu_seqlens_q, cu_seqlens_k, seeds,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs,
    heads, group, length_q, length_k, dim, scale, unit, score_unit, softcap, left, right, keep_scale, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, COUNT: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head; and of every row an int16, how many of its scores tie (ties.py)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    dtype: tl.constexpr = grad_query.dtype.element_ty
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, start_k, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
    first = block * BLOCK_M
    plane = batch * heads + head
    rows = tl.cast(plane, tl.int64) * total_q + start_q
    grad_query += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
    grad_query += tl.cast(start_q, tl.int64) * stride_gs
    if not TMA:
        query += tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
        query += tl.cast(start_q, tl.int64) * stride_qs
        key += tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
        key += tl.cast(start_k, tl.int64) * stride_ks
        value += tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
        value += tl.cast(start_k, tl.int64) * stride_vs
        grad_out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        grad_out += tl.cast(start_q, tl.int64) * stride_os
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    if first < length_q:
        queries = first + tl.arange(0, BLOCK_M)
        inside = queries < length_q
        # A tile is waited for where it is loaded: what is asked for before it arrives meanwhile.
        log2_lse = tl.load(log2_lses + rows + queries, mask=inside, other=float("inf"))
        delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
        wide_factor = delta
        narrow_factor = delta
        if COUNT:
            wide_factor = tl.load(factors + 2 * (rows + queries), mask=inside, other=0.0)
            narrow_factor = tl.load(factors + 2 * (rows + queries) + 1, mask=inside, other=0.0)
        q = load_tile(query, batch, head, first, BLOCK_M, stride_qs, length_q, dim, BLOCK_D, DIM_FULL, True, TMA)
        do = load_tile(grad_out, batch, head, first, BLOCK_M, stride_os, length_q, dim, BLOCK_D, DIM_FULL, True, TMA)
        if IN_REGISTERS:
            q = in_registers(q)
            do = in_registers(do)
        wide_floors = tl.full((BLOCK_M, BLOCK_N // 32, 4), 8388608.0, tl.float32)
        narrow_floors = wide_floors
        offset = diagonal(length_q, length_k, TOP_LEFT)
        last = tl.minimum(first + BLOCK_M, length_q) - 1
        low, full_low, full_high, high = key_ranges(
            first, last, offset, length_k, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if HAS_LEFT:
            acc, wide_floors, narrow_floors = _grad_query(
                acc, wide_floors, narrow_floors, q, do, key, value, batch, kv_head, low, full_low, queries,
                log2_lse, delta,
                wide_factor, narrow_factor, start_q, start_k, offset, length_k, stride_ks, stride_vs,
                dim, unit,
                score_unit, scale, softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_N, BLOCK_D,
                DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, dtype,
            )  # fmt: skip
        acc, wide_floors, narrow_floors = _grad_query(
            acc, wide_floors, narrow_floors, q, do, key, value, batch, kv_head, full_low, full_high, queries,
            log2_lse, delta,
            wide_factor, narrow_factor, start_q, start_k, offset, length_k, stride_ks, stride_vs, dim,
            unit,
            score_unit, scale, softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_N, BLOCK_D,
            DIM_FULL, False, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, dtype,
        )  # fmt: skip
        acc, wide_floors, narrow_floors = _grad_query(
            acc, wide_floors, narrow_floors, q, do, key, value, batch, kv_head, full_high, high, queries,
            log2_lse, delta,
            wide_factor, narrow_factor, start_q, start_k, offset, length_k, stride_ks, stride_vs, dim,
            unit,
            score_unit, scale, softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_N, BLOCK_D,
            DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, dtype,
        )  # fmt: skip
        store_tile(grad_query, acc * scale, first, stride_gs, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
        if COUNT:
            code = code_of_floors(wide_floors, narrow_floors)
            tl.store(codes + rows + queries, code.to(tl.int16), mask=inside)


@triton.jit
def _grad_key(
    grad_k, grad_v, k, v, query, grad_out, folded, batch, head, low, high, keys, log2_lses, deltas, rows, row_plane,
    take_lse, take_delta,
    start_q, start_k, offset, length_q, length_k, stride_q, stride_o, dim, unit, scale, softcap, left, right,
    keep_scale, seed, plane, threshold,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, FOLD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the queries [low, high) of one head to dK and dV of one block of keys. Tiles are [keys, queries]."""
    for start in tl.range(low, high, BLOCK_M):
        q = load_tile(query, batch, head, start, BLOCK_M, stride_q, length_q, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        do = load_tile(grad_out, batch, head, start, BLOCK_M, stride_o, length_q, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        queries = start + tl.arange(0, BLOCK_M)
        scores = cap_scores(tl.dot(k, tl.trans(q)), scale, softcap, PRESCALED, SOFTCAP)
        grad_p = tl.dot(v, tl.trans(do))
        if FOLD:
            # -lse / unit and -delta are added by the matrix unit: no vector of the tile's queries is held in registers.
            # Past the last query these are 0, and so is all that P and dS are multiplied by.
            row_parts = load_tile(folded, row_plane, 0, start, BLOCK_M, 16, length_q, 16, 16, True, MASKED, TMA)
            scores = tl.dot(take_lse, tl.trans(row_parts), scores)
            grad_p = tl.dot(take_delta, tl.trans(row_parts), grad_p)
        else:
            inside = queries < length_q
            # Past the last query P is exp2(-inf) = 0.
            log2_lse = tl.load(log2_lses + rows + queries, mask=inside, other=float("inf"))
            delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
        if MASKED:
            mask = visible(queries[None, :], keys[:, None], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(scores * unit) if FOLD else tl.exp2(tl.fma(scores, unit, -log2_lse[None, :]))
        if DROPOUT:
            keep = kept(seed, plane, start_q + queries[None, :], start_k + keys[:, None], threshold)
            grad_v = tl.dot(to_operand(tl.where(keep, p * keep_scale, 0.0), DTYPE), do, grad_v)
            grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
        else:
            grad_v = tl.dot(to_operand(p, DTYPE), do, grad_v)
        grad_s = p * grad_p if FOLD else p * (grad_p - delta[None, :])
        if SOFTCAP:
            capped = tl.where(p == 0.0, 0.0, scores / softcap)
            grad_s = grad_s * (1.0 - capped * capped)
        grad_k = tl.dot(to_operand(grad_s, DTYPE), q, grad_k)
    return grad_k, grad_v


@triton.jit
def grad_key_kernel(
    query, key, value, grad_out, grad_key, grad_value, folded, log2_lses, deltas, cu_seqlens_q, cu_seqlens_k, seeds,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, stride_wb, stride_wh, stride_ws,
    heads, group, length_q, length_k, dim, scale, unit, score_unit, softcap, left, right, keep_scale, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, over every query head of its group."""
    block = tl.program_id(0)
    kv_heads = heads // group
    index = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    dtype: tl.constexpr = grad_key.dtype.element_ty
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, start_k, length_k = sequence(cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED)
    first = block * BLOCK_N
    grad_key += tl.cast(batch, tl.int64) * stride_gb + tl.cast(kv_head, tl.int64) * stride_gh
    grad_key += tl.cast(start_k, tl.int64) * stride_gs
    grad_value += tl.cast(batch, tl.int64) * stride_wb + tl.cast(kv_head, tl.int64) * stride_wh
    grad_value += tl.cast(start_k, tl.int64) * stride_ws
    if not TMA:
        query += tl.cast(batch, tl.int64) * stride_qb + tl.cast(start_q, tl.int64) * stride_qs
        grad_out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(start_q, tl.int64) * stride_os
        key += tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
        key += tl.cast(start_k, tl.int64) * stride_ks
        value += tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
        value += tl.cast(start_k, tl.int64) * stride_vs
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    if first < length_k:
        keys = first + tl.arange(0, BLOCK_N)
        k = load_tile(key, batch, kv_head, first, BLOCK_N, stride_ks, length_k, dim, BLOCK_D, DIM_FULL, True, TMA)
        v = load_tile(value, batch, kv_head, first, BLOCK_N, stride_vs, length_k, dim, BLOCK_D, DIM_FULL, True, TMA)
        offset = diagonal(length_q, length_k, TOP_LEFT)
        last = tl.minimum(first + BLOCK_N, length_k) - 1
        # Key j is seen by the queries j - offset - right to j - offset + left: the same ranges with sides swapped.
        low, full_low, full_high, high = key_ranges(
            first, last, -offset, length_q, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT
        )
        grad_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        take_lse = take_columns(0, BLOCK_N)
        take_delta = take_columns(3, BLOCK_N)
        for member in tl.range(0, group):
            head = kv_head * group + member
            plane = batch * heads + head
            rows = tl.cast(plane, tl.int64) * total_q + start_q
            query_rows = query
            grad_rows = grad_out
            fold_rows = folded
            if not TMA and FOLD:
                fold_rows = folded + rows * 16
            if not TMA:
                query_rows = query + tl.cast(head, tl.int64) * stride_qh
                grad_rows = grad_out + tl.cast(head, tl.int64) * stride_oh
            if HAS_RIGHT:
                grad_k, grad_v = _grad_key(
                    grad_k, grad_v, k, v, query_rows, grad_rows, fold_rows, batch, head, low, full_low, keys,
                    log2_lses, deltas, rows, plane,
                take_lse, take_delta, start_q, start_k, offset, length_q, length_k, stride_qs, stride_os, dim, unit,
                scale,
                    softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_M, BLOCK_D, DIM_FULL, True,
                    HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, FOLD, dtype,
                )  # fmt: skip
            grad_k, grad_v = _grad_key(
                grad_k, grad_v, k, v, query_rows, grad_rows, fold_rows, batch, head, full_low, full_high, keys,
                log2_lses, deltas, rows, plane,
                take_lse, take_delta, start_q, start_k, offset, length_q, length_k, stride_qs, stride_os, dim, unit,
                scale,
                softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_M, BLOCK_D, DIM_FULL, False,
                HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, FOLD, dtype,
            )  # fmt: skip
            grad_k, grad_v = _grad_key(
                grad_k, grad_v, k, v, query_rows, grad_rows, fold_rows, batch, head, full_high, high, keys, log2_lses,
                deltas, rows, plane,
                take_lse, take_delta, start_q, start_k, offset, length_q, length_k, stride_qs, stride_os, dim, unit,
                scale,
                softcap, left, right, keep_scale, seed, plane, threshold, BLOCK_M, BLOCK_D, DIM_FULL, True,
                HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, FOLD, dtype,
            )  # fmt: skip
        store_tile(grad_key, grad_k * scale, first, stride_gs, length_k, dim, BLOCK_N, BLOCK_D, DIM_FULL)
        store_tile(grad_value, grad_v, first, stride_ws, length_k, dim, BLOCK_N, BLOCK_D, DIM_FULL)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_residual: Tensor,
    lse: Tensor,
    row_max: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the statistics of every row are added to `state` unless it is None."""
    call = call_of(query, key, value, cu_seqlens_q, max_seqlen_q, max_seqlen_k, spec)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if call.blank(*grads):
        if state is not None:
            state[:, Slot.EMPTY_ROWS] += query.shape[0] * query.shape[2]
        return grads
    if grad_out.stride(-1) != 1:  # an expanded gradient, as that of a sum
        grad_out = grad_out.contiguous()
    chosen = configs(call.capability, call.block_d, call.mean_keys)
    tensors = Tensors(
        grad_out, query, key, value, out, out_residual, lse, row_max, state, modes, cu_seqlens_q, cu_seqlens_k,
        dropout_seed,
    )  # fmt: skip
    with torch.cuda.device_of(query):
        launch_backward(call, chosen, tensors, grads)
        if call.packed:
            call.blank_tail(cu_seqlens_q, (grads[0], 0.0))
            call.blank_tail(cu_seqlens_k, (grads[1], 0.0), (grads[2], 0.0))
    return grads


class Tensors(NamedTuple):
    """What the passes read, as `foreshock::attention_backward` describes it (op.py)."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    residual: Tensor | None
    """None in the benchmark's plain variant alone."""
    lse: Tensor
    row_max: Tensor
    state: Tensor | None
    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None


def launch_backward(call: Call, chosen: Configs, given: Tensors, grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """The three passes under given configurations, and the statistics."""
    rows = launch_rows(call, given)
    tiles = tiles_of(call, chosen.grad_query, given)
    launch_grad_query(call, chosen.grad_query, given, rows, grads[0], tiles)
    same = chosen.grad_query[:2] == chosen.grad_key[:2] and chosen.grad_query.tma == chosen.grad_key.tma
    launch_grad_key(call, chosen.grad_key, given, rows, grads[1], grads[2], tiles if same else None)
    if given.state is not None:
        launch_count(call, given, rows, given.state)


class Tiles(NamedTuple):
    """The tensors that a pass takes tile by tile, or their descriptors, which cost the host as much as a launch."""

    tma: bool
    query: Any
    key: Any
    value: Any
    grad_out: Any


def tiles_of(call: Call, config: Config, given: Tensors) -> Tiles:
    """As one configuration cuts them."""
    tma = config.tma and call.takes_descriptors(given.query, given.key, given.value, given.grad_out)
    return Tiles(
        tma,
        call.rows(given.query, config.block_m, tma),
        call.rows(given.key, config.block_n, tma),
        call.rows(given.value, config.block_n, tma),
        call.rows(given.grad_out, config.block_m, tma),
    )


class Rows(NamedTuple):
    """What one pass leaves for the others, of every row [B, H, Sq]."""

    log2_lse: Tensor
    delta: Tensor
    bias: Tensor
    """Delta's, fp32 as the two before it."""
    factors: Tensor | None
    """fp32 [B, H, Sq, 2]: what finds ties (ties.py); None where nothing is counted, as the next two."""
    large: Tensor | None
    """int8 [planes, blocks]: blocks of rows, a few of whose scores are too large for `factors`."""
    codes: Tensor | None
    """int16, from the dQ pass: how many scores tie (ties.py); 2^14 more where the paper's rule shifted."""
    folded: Tensor | None
    """bf16 [B * H, 1, Sq, 16]: -lse / unit and -delta as three summands each; None where they cannot be folded."""


def launch_rows(call: Call, given: Tensors) -> Rows:
    """delta, and what the other passes need of every row."""
    grid = (triton.cdiv(call.longest_q, call.row_block), call.sequences * call.heads, 1)
    lse, switches = given.lse, call.switches
    log2_lse, delta, bias = torch.empty((3, *lse.shape), dtype=torch.float32, device=lse.device).unbind()
    factors = large = codes = None
    if given.state is not None:
        factors = lse.new_empty((*lse.shape, 2))
        large = torch.empty(grid[:2], dtype=torch.int8, device=lse.device)
        codes = torch.empty_like(lse, dtype=torch.int16)
    folded = None
    if call.foldable:
        folded = torch.empty((lse[..., 0].numel(), 1, lse.shape[2], 16), dtype=torch.bfloat16, device=lse.device)
    launch(
        row_kernel,
        grid,
        (
            given.grad_out,
            given.out,
            given.residual,
            lse,
            given.row_max,
            log2_lse,
            delta,
            folded,
            bias,
            factors,
            large,
            given.modes,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        (
            *given.grad_out.stride()[:3],
            *given.out.stride()[:3],
            call.heads,
            call.total_q,
            call.total_k,
            call.dim,
            float(call.unit),
            float(call.score_unit),
        ),
        {
            "ROWS": call.row_block,
            **{name: switches[name] for name in ("BLOCK_D", "DIM_FULL", "PACKED")},
            "HAS_MODES": given.modes is not None,
            "RESIDUAL": given.residual is not None,
            "COUNT": given.state is not None,
            "FOLD": folded is not None,
        },
        {"num_warps": 4},
    )
    return Rows(log2_lse, delta, bias, factors, large, codes, folded)


_COUNT_ROWS = 1024
"""Rows a program of the counting kernel."""


def launch_count(call: Call, given: Tensors, rows: Rows, state: Tensor) -> None:
    """Every statistic of every row, added to the state."""
    query, key = given.query, given.key
    switches = {name: value for name, value in call.switches.items() if name != "BLOCK_D"}
    launch(
        slow_ties_kernel,
        (triton.cdiv(call.longest_q, 256), call.sequences * call.heads, 1),
        (
            query,
            key,
            given.row_max,
            rows.large,
            rows.codes,
            given.modes,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        (*query.stride()[:3], *key.stride()[:3], call.longest_q, *call.sizes),
        {
            "BLOCK_D": call.block_d,
            **switches,
            "HAS_MODES": given.modes is not None,
            "ROWS": call.row_block,
            "BLOCK": 32 if call.capability == 0 else 64,
            "BLOCKS": 8 if call.capability == 0 else 4,
        },
        {"num_warps": 4, "num_stages": 1},
    )
    blocks, planes = triton.cdiv(call.longest_q, _COUNT_ROWS), call.sequences * call.heads
    partial = torch.empty((planes, SLOT_COUNT, blocks), dtype=torch.int64, device=state.device)
    launch(
        count_kernel,
        (blocks, planes, 1),
        (
            given.lse,
            given.row_max,
            rows.delta,
            rows.bias,
            rows.codes,
            given.modes,
            partial,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        (
            call.heads,
            call.total_q,
            call.total_k,
            call.spec.window_left,
            call.right,
            float(call.score_unit),
            float(call.unit),
        ),
        {
            "ROWS": _COUNT_ROWS,
            **{name: call.switches[name] for name in ("TOP_LEFT", "HAS_LEFT", "HAS_RIGHT", "PACKED")},
            "HAS_MODES": given.modes is not None,
            "DTYPE": tl.bfloat16 if given.out.dtype == torch.bfloat16 else tl.float16,
        },
        {"num_warps": 4},
    )
    launch(
        merge_kernel,
        (call.heads, SLOT_COUNT, 1),
        (state, partial, given.cu_seqlens_q),
        (*state.stride(), call.heads, call.sequences, call.total_q, blocks),
        {"PACKED": call.packed, "BLOCK": 512},
        {"num_warps": 4},
    )


def launch_grad_query(
    call: Call, config: Config, given: Tensors, rows: Rows, grad_query: Tensor, tiles: Tiles | None = None
) -> None:
    """dQ, and the flags of every row."""
    grad_out, query, key, value = given[:4]
    tiles = tiles or tiles_of(call, config, given)
    launch(
        grad_query_kernel,
        (triton.cdiv(call.longest_q, config.block_m), call.sequences * call.heads, 1),
        (
            *tiles[1:],
            grad_query,
            rows.log2_lse,
            rows.delta,
            rows.factors,
            rows.codes,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
            given.seed,
        ),
        (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *grad_out.stride()[:3],
            *grad_query.stride()[:3],
            *call.sizes,
        ),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            **call.switches,
            "TMA": tiles.tma,
            "COUNT": given.state is not None,
            "IN_REGISTERS": config.operands_in_registers,
        },
        config.options,
    )


def launch_grad_key(
    call: Call,
    config: Config,
    given: Tensors,
    rows: Rows,
    grad_key: Tensor,
    grad_value: Tensor,
    tiles: Tiles | None = None,
) -> None:
    """dK and dV."""
    grad_out, query, key, value = given[:4]
    tiles = tiles or tiles_of(call, config, given)
    launch(
        grad_key_kernel,
        (triton.cdiv(call.longest_k, config.block_n), call.sequences * call.kv_heads, 1),
        (
            *tiles[1:],
            grad_key,
            grad_value,
            call.rows(rows.folded, config.block_m, tiles.tma, 16) if rows.folded is not None else None,
            rows.log2_lse,
            rows.delta,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
            given.seed,
        ),
        (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *grad_out.stride()[:3],
            *grad_key.stride()[:3],
            *grad_value.stride()[:3],
            *call.sizes,
        ),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            **call.switches,
            "TMA": tiles.tma,
            "FOLD": rows.folded is not None,
        },
        config.options,
    )
