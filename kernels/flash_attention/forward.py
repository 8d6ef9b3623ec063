"""FlashAttention-2 forward in Triton: O, what rounding took from it, log-sum-exp and row maximum."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.blocks import (
    CENTRED_VALUES,
    INTERPRET,
    LN2,
    LOG2E,
    PAPER_SOFTMAX,
    PAPER_TOLERANCE,
    RESIDUAL_SCALE_FP16,
    asks,
    at_head,
    cap_scores,
    diagonal,
    in_registers,
    kept,
    key_ranges,
    load_mean,
    load_tile,
    place,
    served_shift,
    store_tile,
    to_operand,
    visible,
)
from foreshock.kernels.flash_attention.launch import Call, call_of, launch
from foreshock.kernels.flash_attention.means import launch_means
from foreshock.kernels.flash_attention.shift import PAPER_SHIFT_CAP
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.tuning import Config, configs

PAPER_CAP_BF16: tl.constexpr = tl.constexpr(PAPER_SHIFT_CAP[torch.bfloat16])
PAPER_CAP_FP16: tl.constexpr = tl.constexpr(PAPER_SHIFT_CAP[torch.float16])


@triton.jit
def stable_shift(row_max):
    """As `shift.stable_shift`, in powers of two."""
    bits = row_max.to(tl.uint32, bitcast=True)
    odd = (153 + 2 * ((bits * 0x9E3779B1) >> 27)).to(tl.float32)
    if INTERPRET:
        return 8.0 - tl.log2(odd)
    # Within 2^-22, which leaves exp2 of it nearer to odd / 256 than to any other 16-bit number.
    log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [odd], tl.float32, True, 1)
    return 8.0 - log2


@triton.jit
def _attend(
    running, shift, q, key, value, batch, kv_head, low, high, queries, seen, chance, strides, dim, unit, scale,
    softcap, score_unit,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, SHIFT: tl.constexpr, CENTRE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take the keys [low, high) into the running accumulator, row sum and row maximum."""
    acc, total, row_max, before, missing = running
    paper, paper_shift = shift
    offset, length_k, left, right = seen
    seed, plane, start_q, start_k, threshold = chance
    stride_k, stride_v = strides
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, PRESCALED, SOFTCAP)
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            mask = visible(queries[:, None], keys[None, :], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max * unit)
        if SHIFT:
            subtracted += tl.where(paper, paper_shift, stable_shift(new_max * score_unit))
        # One rounding, and the same `subtracted` for every entry and for the rescaling: what it lost cancels in P / l.
        p = tl.exp2(tl.fma(scores, unit, -subtracted[:, None]))
        shrink = tl.exp2(before - subtracted)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        rounded = to_operand(p, DTYPE)
        if CENTRE:
            missing = missing * shrink + tl.sum(p - rounded.to(tl.float32), 1)
        if DROPOUT:
            keep = kept(seed, plane, start_q + queries[:, None], start_k + keys[None, :], threshold)
            rounded = tl.where(keep, rounded, 0.0)
        v = load_tile(value, batch, kv_head, start, BLOCK_N, stride_v, length_k, dim, BLOCK_D, DIM_FULL, MASKED, TMA)
        acc = tl.dot(rounded, v, acc)
        row_max = new_max
        # Not 0 while nothing was seen: exp2(0 - subtracted) overflows when the first scores lie far below zero.
        before = tl.where(new_max == float("-inf"), new_max, subtracted)
    return acc, total, row_max, before, missing


@triton.jit
def _paper_shift(
    q, key, batch, kv_head, low, high, queries, offset, length_k, stride_k, dim, scale, softcap, left, right,
    score_unit,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The paper's shift of each row in powers of two, from two passes over its scores: maximum, then ties."""
    largest = tl.full(queries.shape, float("-inf"), tl.float32)
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, BLOCK_D, DIM_FULL, True, TMA)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, PRESCALED, SOFTCAP) * score_unit
        keys = start + tl.arange(0, BLOCK_N)
        mask = visible(queries[:, None], keys[None, :], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        largest = tl.maximum(largest, tl.max(tl.where(mask, scores, float("-inf")), 1))
    count = tl.zeros(queries.shape, tl.int32)
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, BLOCK_D, DIM_FULL, True, TMA)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, PRESCALED, SOFTCAP) * score_unit
        keys = start + tl.arange(0, BLOCK_N)
        mask = visible(queries[:, None], keys[None, :], offset, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        count += tl.sum((mask & (largest[:, None] - scores <= PAPER_TOLERANCE)).to(tl.int32), 1)
    # m becomes 2 m when m > 0 and 0 when m < 0: a shift by |m|, capped.
    cap: tl.constexpr = PAPER_CAP_BF16 if tl.bfloat16 == DTYPE else PAPER_CAP_FP16
    return tl.where(count > 1, tl.minimum(tl.abs(largest), cap), 0.0) * LOG2E


@triton.jit
def _block(
    q, key, value, outputs, mean, mode, batch, kv_head, first, rows, length_q, seen, chance, strides, stride_o, dim,
    unit, scale, score_unit, softcap, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
    CENTRE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The whole forward of one block of queries, in one of its versions."""
    out, residual, lse, row_max_out = outputs
    offset, length_k, left, right = seen
    queries = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, length_q) - 1
    low, full_low, full_high, high = key_ranges(
        first, last, offset, length_k, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    total = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    running = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32), total, row_max, row_max, total)
    shift = (False, total)
    if SHIFT:
        paper = (mode & PAPER_SOFTMAX) != 0
        paper_shift = _paper_shift(
            q, key, batch, kv_head, low, tl.where(paper, high, low), queries, offset, length_k, strides[0], dim, scale,
            softcap, left, right, score_unit, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, TMA,
            DTYPE,
        )  # fmt: skip
        shift = (paper, paper_shift)
    if HAS_LEFT:
        running = _attend(
            running, shift, q, key, value, batch, kv_head, low, full_low, queries, seen, chance, strides, dim,
            unit, scale, softcap, score_unit, BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED,
            SOFTCAP, DROPOUT, TMA, SHIFT, CENTRE, DTYPE,
        )  # fmt: skip
    running = _attend(
        running, shift, q, key, value, batch, kv_head, full_low, full_high, queries, seen, chance, strides, dim,
        unit, scale, softcap, score_unit, BLOCK_N, BLOCK_D, DIM_FULL, False, HAS_LEFT, HAS_RIGHT, PRESCALED,
        SOFTCAP, DROPOUT, TMA, SHIFT, CENTRE, DTYPE,
    )  # fmt: skip
    acc, total, row_max, before, missing = _attend(
        running, shift, q, key, value, batch, kv_head, full_high, high, queries, seen, chance, strides, dim,
        unit, scale, softcap, score_unit, BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED,
        SOFTCAP, DROPOUT, TMA, SHIFT, CENTRE, DTYPE,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    if CENTRE:
        # Rows of P sum to 1 in truth: of the mean value is missing what rounding took from the row's sum.
        acc += missing[:, None] * mean[None, :]
    exact = acc * (keep_scale / total)[:, None]
    store_tile(out, exact, first, stride_o, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
    if RESIDUAL:
        lost = exact - to_operand(exact, DTYPE).to(tl.float32)
        if tl.float16 == DTYPE:
            lost *= RESIDUAL_SCALE_FP16
        store_tile(residual, lost, first, stride_o, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
    inside = queries < length_q
    tl.store(row_max_out + rows + queries, row_max * score_unit, mask=inside)
    log_sum = (before + tl.log2(total)) * LN2
    tl.store(lse + rows + queries, tl.where(row_max == float("-inf"), row_max, log_sum), mask=inside)


@triton.jit
def forward_kernel(
    query, key, value, out, residual, lse, row_max_out, modes, mean_values, cu_seqlens_q, cu_seqlens_k, seeds,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    heads, group, length_q, length_k, dim, scale, unit, softcap, left, right, keep_scale, threshold, score_unit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, HAS_MODES: tl.constexpr, TMA: tl.constexpr,
    RESIDUAL: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. The blocks that see most keys are started first."""
    dtype: tl.constexpr = out.dtype.element_ty
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    total_q = length_q
    batch, head, start_q, length_q, start_k, length_k = place(
        tl.program_id(1), heads, cu_seqlens_q, cu_seqlens_k, length_q, length_k, PACKED
    )
    kv_head = head // group
    plane = batch * heads + head
    rows = tl.cast(plane, tl.int64) * total_q + start_q
    out = at_head(out, batch, head, start_q, stride_ob, stride_oh, stride_os)
    if RESIDUAL:
        residual = at_head(residual, batch, head, start_q, stride_ob, stride_oh, stride_os)
    if not TMA:
        query = at_head(query, batch, head, start_q, stride_qb, stride_qh, stride_qs)
        key = at_head(key, batch, kv_head, start_k, stride_kb, stride_kh, stride_ks)
        value = at_head(value, batch, kv_head, start_k, stride_vb, stride_vh, stride_vs)
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    if first < length_q:
        q = load_tile(query, batch, head, first, BLOCK_M, stride_qs, length_q, dim, BLOCK_D, DIM_FULL, True, TMA)
        if IN_REGISTERS:
            q = in_registers(q)
        outputs = (out, residual, lse, row_max_out)
        seen = (diagonal(length_q, length_k, TOP_LEFT), length_k, left, right)
        chance = (seed, plane, start_q, start_k, threshold)
        strides = (stride_ks, stride_vs)
        # Whole versions, chosen once: a branch inside a loop would stop its pipelining.
        mode = 0
        if HAS_MODES:
            mode = tl.load(modes + head)
            if asks(mode, CENTRED_VALUES, DROPOUT):
                mean = load_mean(mean_values, tl.program_id(1) // heads * (heads // group) + kv_head, dim, BLOCK_D)
                _block(
                    q, key, value, outputs, mean, mode, batch, kv_head, first, rows, length_q, seen, chance, strides,
                    stride_os, dim, unit, scale, score_unit, softcap, keep_scale, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL,
                    HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, RESIDUAL, False, True, dtype,
                )  # fmt: skip
            elif served_shift(mode) != 0:
                _block(
                    q, key, value, outputs, 0.0, mode, batch, kv_head,
                    first, rows, length_q, seen, chance, strides, stride_os, dim, unit, scale, score_unit, softcap,
                    keep_scale, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT,
                    TMA, RESIDUAL, True, False, dtype,
                )  # fmt: skip
            else:
                _block(
                    q, key, value, outputs, 0.0, mode, batch, kv_head,
                    first, rows, length_q, seen, chance, strides, stride_os, dim, unit, scale, score_unit, softcap,
                    keep_scale, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT,
                    TMA, RESIDUAL, False, False, dtype,
                )  # fmt: skip
        else:
            _block(
                q, key, value, outputs, 0.0, mode, batch, kv_head,
                first, rows, length_q, seen, chance, strides, stride_os, dim, unit, scale, score_unit, softcap,
                keep_scale, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT,
                TMA, RESIDUAL, False, False, dtype,
            )  # fmt: skip


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of `foreshock::attention_forward`: out, out_residual, lse, row_max (arguments: see op.py)."""
    call = call_of(query, key, value, cu_seqlens_q, max_seqlen_q, max_seqlen_k, spec)
    out, residual = torch.empty_like(query), torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    row_max = torch.empty_like(lse)
    if call.blank(out, residual):
        lse.fill_(-math.inf)
        row_max.fill_(-math.inf)
        return out, residual, lse, row_max
    config = configs(call.capability, call.block_d, call.mean_keys).forward
    with torch.cuda.device_of(query):
        launch_forward(
            call,
            config,
            query,
            key,
            value,
            out,
            residual,
            lse,
            row_max,
            modes,
            cu_seqlens_q,
            cu_seqlens_k,
            dropout_seed,
        )
        if call.packed:
            call.blank_tail(cu_seqlens_q, (out, 0.0), (residual, 0.0), (lse, -math.inf), (row_max, -math.inf))
    return out, residual, lse, row_max


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
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
) -> None:
    """One launch under a given configuration; the benchmark calls it to compare configurations."""
    tma = config.tma and call.takes_descriptors(query, key, value)
    launch(
        forward_kernel,
        (triton.cdiv(call.longest_q, config.block_m), call.sequences * call.heads, 1),
        (
            call.rows(query, config.block_m, tma),
            call.rows(key, config.block_n, tma),
            call.rows(value, config.block_n, tma),
            out,
            residual,
            lse,
            row_max,
            modes,
            launch_means(call, value, Mode.CENTRED_VALUES, modes, cu_seqlens_k),
            cu_seqlens_q,
            cu_seqlens_k,
            seed,
        ),
        (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            *call.sizes,
            float(call.score_unit),
        ),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            **call.switches,
            "HAS_MODES": modes is not None,
            "TMA": tma,
            "RESIDUAL": residual is not None,
            "IN_REGISTERS": config.operands_in_registers,
        },
        config.options,
    )
