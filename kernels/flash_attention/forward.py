"""FlashAttention-2 forward in Triton: O, what rounding took from it, log-sum-exp and row maximum."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.blocks import (
    LN2,
    cap_scores,
    diagonal,
    kept,
    key_ranges,
    load_tile,
    sequence,
    store_tile,
    to_operand,
    visible,
)
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.tuning import Config, configs


@triton.jit
def _attend(
    acc, total, row_max, q, key, value, batch, kv_head, low, high, queries, start_q, start_k, offset, length_k,
    stride_k, stride_v, dim, unit, scale, softcap, left, right, seed, plane, threshold,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take the keys [low, high) into the running accumulator, row sum and row maximum."""
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, PRESCALED, SOFTCAP)
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            mask = visible(queries[:, None], keys[None, :], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        # The maximum is subtracted before the factor, so that no fused multiply-add moves the winner's P off 1.
        p = tl.exp2((scores - safe_max[:, None]) * unit)
        shrink = tl.exp2((row_max - safe_max) * unit)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if DROPOUT:
            p = tl.where(kept(seed, plane, start_q + queries[:, None], start_k + keys[None, :], threshold), p, 0.0)
        v = load_tile(value, batch, kv_head, start, BLOCK_N, stride_v, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        acc = tl.dot(to_operand(p, DTYPE), v, acc)
        row_max = new_max
    return acc, total, row_max


@triton.jit
def forward_kernel(
    query, key, value, out, residual, lse, row_max_out, row_sum_out, modes, cu_seqlens_q, cu_seqlens_k, seeds,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    heads, group, length_q, length_k, dim,
    scale, unit, score_unit, softcap, left, right, keep_scale, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, HAS_MODES: tl.constexpr, TMA: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. The blocks that see most keys are started first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    dtype: tl.constexpr = out.dtype.element_ty
    total_q = length_q
    batch = index
    if PACKED:
        batch = 0
    start_q, length_q, start_k, length_k = sequence(
        cu_seqlens_q, cu_seqlens_k, index, length_q, length_k, PACKED
    )
    first = block * BLOCK_M
    plane = batch * heads + head
    rows = tl.cast(plane, tl.int64) * total_q + start_q
    out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
    out += tl.cast(start_q, tl.int64) * stride_os
    if RESIDUAL:
        residual += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        residual += tl.cast(start_q, tl.int64) * stride_os
    if not TMA:
        query += tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
        query += tl.cast(start_q, tl.int64) * stride_qs
        key += tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
        key += tl.cast(start_k, tl.int64) * stride_ks
        value += tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
        value += tl.cast(start_k, tl.int64) * stride_vs
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    if first < length_q:
        q = load_tile(query, batch, head, first, BLOCK_M, stride_qs, length_q, dim, BLOCK_D, DIM_FULL, True, TMA)
        queries = first + tl.arange(0, BLOCK_M)
        offset = diagonal(length_q, length_k, TOP_LEFT)
        last = tl.minimum(first + BLOCK_M, length_q) - 1
        low, full_low, full_high, high = key_ranges(
            first, last, offset, length_k, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if HAS_LEFT:
            acc, total, row_max = _attend(
                acc, total, row_max, q, key, value, batch, kv_head, low, full_low, queries, start_q, start_k, offset,
                length_k, stride_ks, stride_vs, dim, unit, scale, softcap, left, right, seed, plane, threshold,
                BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, dtype,
            )  # fmt: skip
        acc, total, row_max = _attend(
            acc, total, row_max, q, key, value, batch, kv_head, full_low, full_high, queries, start_q, start_k, offset,
            length_k, stride_ks, stride_vs, dim, unit, scale, softcap, left, right, seed, plane, threshold,
            BLOCK_N, BLOCK_D, DIM_FULL, False, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, dtype,
        )  # fmt: skip
        acc, total, row_max = _attend(
            acc, total, row_max, q, key, value, batch, kv_head, full_high, high, queries, start_q, start_k, offset,
            length_k, stride_ks, stride_vs, dim, unit, scale, softcap, left, right, seed, plane, threshold,
            BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, dtype,
        )  # fmt: skip
        exact = acc * (keep_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        store_tile(out, exact, first, stride_os, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
        if RESIDUAL:
            lost = exact - to_operand(exact, dtype).to(tl.float32)
            store_tile(residual, lost, first, stride_os, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
        inside = queries < length_q
        largest = row_max * score_unit
        tl.store(row_max_out + rows + queries, largest, mask=inside)
        tl.store(row_sum_out + rows + queries, total, mask=inside)
        tl.store(lse + rows + queries, largest + tl.log2(total) * LN2, mask=inside)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward of `foreshock::attention_forward`: out, out_residual, lse, row_max, row_sum (arguments: see op.py)."""
    call = Call.of(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, spec)
    out, residual = torch.empty_like(query), torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    row_max, row_sum = torch.empty_like(lse), torch.empty_like(lse)
    if call.blank(out, residual):
        lse.fill_(-math.inf)
        row_max.fill_(-math.inf)
        row_sum.fill_(0.0)
        return out, residual, lse, row_max, row_sum
    config = configs(call.capability, call.block_d).forward
    launch_forward(call, config, query, key, value, out, residual, lse, row_max, row_sum, modes, dropout_seed)
    if call.packed:
        call.blank_tail(cu_seqlens_q, (out, 0.0), (residual, 0.0), (lse, -math.inf), (row_max, -math.inf), (row_sum, 0.0))
    return out, residual, lse, row_max, row_sum


def launch_forward(
    call: Call,
    config: Config,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    residual: Tensor | None,
    lse: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    modes: Tensor | None,
    seed: Tensor | None,
) -> None:
    """One launch under a given configuration; the benchmark calls it to compare configurations."""
    tma = config.tma and call.takes_descriptors(query, key, value)
    grid = (triton.cdiv(call.longest_q, config.block_m), call.sequences * call.heads)
    forward_kernel[grid](
        call.rows(query, config.block_m, tma),
        call.rows(key, config.block_n, tma),
        call.rows(value, config.block_n, tma),
        out,
        residual,
        lse,
        row_max,
        row_sum,
        modes,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        seed,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *out.stride()[:3],
        *call.sizes(),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **call.switches(),
        HAS_MODES=modes is not None,
        TMA=tma,
        RESIDUAL=residual is not None,
        num_warps=config.warps,
        num_stages=config.stages,
    )
