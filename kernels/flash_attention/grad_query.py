"""The pass of the backward that makes dQ, counts ties, and mends delta where a head's rows are corrected."""

import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.blocks import (
    CENTRED_KEYS,
    ROW_CORRECTED,
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
    store_tile,
    to_operand,
    visible,
)
from foreshock.kernels.flash_attention.counting import fold
from foreshock.kernels.flash_attention.launch import Call, launch
from foreshock.kernels.flash_attention.passes import RowVectors, Tensors, Tiles, tiles_of
from foreshock.kernels.flash_attention.ties import add_floors, code_of_floors
from foreshock.kernels.flash_attention.tuning import Config


@triton.jit
def _add_keys(
    acc, floors, defect, operands, tensors, low, high, queries, of_rows, seen, chance, strides, numbers,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, COUNT: tl.constexpr, CORRECT: tl.constexpr, CENTRE: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the keys [low, high) to dQ of one block of queries, what ties in them to its floors (ties.py), and to its
    defect, where rows are corrected: P K, and the row sums of dS, of what rounding added to dS, and of P; where keys
    are centred: the row sum of dS as it is multiplied."""
    wide_floors, narrow_floors = floors
    mixed_keys, sum_grad, sum_lost, sum_p = defect
    q, grad_out = operands
    key, value, batch, kv_head = tensors
    log2_lse, delta, wide, narrow = of_rows
    offset, length_k, left, right = seen
    seed, plane, start_q, start_k, threshold = chance
    stride_k, stride_v = strides
    dim, unit, scale, softcap, keep_scale = numbers
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
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
        if CORRECT:
            sum_grad += tl.sum(grad_s, 1)
        if SOFTCAP:
            capped = tl.where(p == 0.0, 0.0, scores / softcap)
            slope = 1.0 - capped * capped
            grad_s = grad_s * slope
            p = p * slope
        rounded = to_operand(grad_s, DTYPE)
        acc = tl.dot(rounded, k, acc)
        if CENTRE:
            sum_lost += tl.sum(rounded.to(tl.float32), 1)
        if CORRECT:
            weights = to_operand(p, DTYPE)
            mixed_keys = tl.dot(weights, k, mixed_keys)
            sum_lost += tl.sum(rounded.to(tl.float32) - grad_s, 1)
            sum_p += tl.sum(weights.to(tl.float32), 1)
    return acc, (wide_floors, narrow_floors), (mixed_keys, sum_grad, sum_lost, sum_p)


@triton.jit
def _block(
    operands, tensors, mean_keys, kv_plane, outputs, first, queries, inside, rows, length_q, of_rows, seen, chance,
    strides, stride_g, numbers,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, COUNT: tl.constexpr, FOLD: tl.constexpr, IN_REGISTERS: tl.constexpr,
    CORRECT: tl.constexpr, CENTRE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, in one of its versions."""
    grad_query, deltas, codes, folded = outputs
    offset, length_k, left, right = seen
    if IN_REGISTERS and not CORRECT:
        q, do = operands
        operands = (in_registers(q), in_registers(do))
    # A second accumulator leaves no registers for operands: they stay in shared memory, for a stage of the pipeline.
    STAGES: tl.constexpr = 2 if IN_REGISTERS and CORRECT else None
    last = tl.minimum(first + BLOCK_M, length_q) - 1
    low, full_low, full_high, high = key_ranges(
        first, last, offset, length_k, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    none = tl.full((BLOCK_M, BLOCK_N // 32, 4), 8388608.0, tl.float32)
    floors = (none, none)
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    defect = (acc, nothing, nothing, nothing)
    if HAS_LEFT:
        acc, floors, defect = _add_keys(
            acc, floors, defect, operands, tensors, low, full_low, queries, of_rows, seen, chance, strides,
            numbers, BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT,
            CORRECT, CENTRE, STAGES, DTYPE,
        )  # fmt: skip
    acc, floors, defect = _add_keys(
        acc, floors, defect, operands, tensors, full_low, full_high, queries, of_rows, seen, chance, strides,
        numbers, BLOCK_N, BLOCK_D, DIM_FULL, False, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT,
        CORRECT, CENTRE, STAGES, DTYPE,
    )  # fmt: skip
    acc, floors, defect = _add_keys(
        acc, floors, defect, operands, tensors, full_high, high, queries, of_rows, seen, chance, strides,
        numbers, BLOCK_N, BLOCK_D, DIM_FULL, True, HAS_LEFT, HAS_RIGHT, PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT,
        CORRECT, CENTRE, STAGES, DTYPE,
    )  # fmt: skip
    if CORRECT:
        mixed_keys, sum_grad, sum_lost, sum_p = defect
        sum_p = tl.where(sum_p == 0.0, 1.0, sum_p)
        # Under a cap the sum is zero before the slope.
        share = sum_grad + sum_lost / sum_p if SOFTCAP else (sum_grad + sum_lost) / sum_p
        acc -= share[:, None] * mixed_keys
        _, delta, _, _ = of_rows
        delta += sum_grad
        tl.store(deltas + rows + queries, delta, mask=inside)
        if FOLD:
            column = tl.arange(0, 16)[None, :]
            pointers = folded + (rows + queries)[:, None] * 16 + column
            mask = inside[:, None] & (column >= 3) & (column < 6)
            tl.store(pointers, fold(-delta, column - 3).to(tl.bfloat16), mask=mask)
    dim, _, scale, _, _ = numbers
    if CENTRE:
        _, _, sum_rounded, _ = defect
        acc -= sum_rounded[:, None] * load_mean(mean_keys, kv_plane, dim, BLOCK_D)[None, :]
    store_tile(grad_query, acc * scale, first, stride_g, length_q, dim, BLOCK_M, BLOCK_D, DIM_FULL)
    if COUNT:
        wide_floors, narrow_floors = floors
        code = code_of_floors(wide_floors, narrow_floors)
        tl.store(codes + rows + queries, code.to(tl.int16), mask=inside)


@triton.jit
def grad_query_kernel(
    query, key, value, grad_out, grad_query, log2_lses, deltas, factors, codes, folded, modes, mean_keys, cu_seqlens_q,
    cu_seqlens_k, seeds,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs,
    heads, group, length_q, length_k, dim, scale, unit, softcap, left, right, keep_scale, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM_FULL: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, COUNT: tl.constexpr,
    FOLD: tl.constexpr, HAS_MODES: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head; and of every row an int16, how many of its scores tie (ties.py)."""
    dtype: tl.constexpr = grad_query.dtype.element_ty
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    total_q = length_q
    batch, head, start_q, length_q, start_k, length_k = place(
        tl.program_id(1), heads, cu_seqlens_q, cu_seqlens_k, length_q, length_k, PACKED
    )
    kv_head = head // group
    plane = batch * heads + head
    rows = tl.cast(plane, tl.int64) * total_q + start_q
    grad_query = at_head(grad_query, batch, head, start_q, stride_gb, stride_gh, stride_gs)
    if not TMA:
        query = at_head(query, batch, head, start_q, stride_qb, stride_qh, stride_qs)
        key = at_head(key, batch, kv_head, start_k, stride_kb, stride_kh, stride_ks)
        value = at_head(value, batch, kv_head, start_k, stride_vb, stride_vh, stride_vs)
        grad_out = at_head(grad_out, batch, head, start_q, stride_ob, stride_oh, stride_os)
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
        operands = (q, do)
        tensors = (key, value, batch, kv_head)
        outputs = (grad_query, deltas, codes, folded)
        of_rows = (log2_lse, delta, wide_factor, narrow_factor)
        seen = (diagonal(length_q, length_k, TOP_LEFT), length_k, left, right)
        chance = (seed, plane, start_q, start_k, threshold)
        strides = (stride_ks, stride_vs)
        numbers = (dim, unit, scale, softcap, keep_scale)
        # Whole versions, chosen once: a branch inside a loop would stop its pipelining.
        kv_plane = tl.program_id(1) // heads * (heads // group) + kv_head
        if HAS_MODES:
            mode = tl.load(modes + head)
            if (mode & ROW_CORRECTED) != 0:
                _block(
                    operands, tensors, mean_keys, kv_plane, outputs, first, queries, inside, rows, length_q, of_rows,
                    seen, chance, strides, stride_gs, numbers, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT,
                    PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, FOLD, IN_REGISTERS, True, False, dtype,
                )  # fmt: skip
            elif asks(mode, CENTRED_KEYS, SOFTCAP):
                _block(
                    operands, tensors, mean_keys, kv_plane, outputs, first, queries, inside, rows, length_q, of_rows,
                    seen, chance, strides, stride_gs, numbers, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT,
                    PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, FOLD, IN_REGISTERS, False, True, dtype,
                )  # fmt: skip
            else:
                _block(
                    operands, tensors, mean_keys, kv_plane, outputs, first, queries, inside, rows, length_q, of_rows,
                    seen, chance, strides, stride_gs, numbers, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT,
                    PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, FOLD, IN_REGISTERS, False, False, dtype,
                )  # fmt: skip
        else:
            _block(
                operands, tensors, mean_keys, kv_plane, outputs, first, queries, inside, rows, length_q, of_rows, seen,
                chance, strides, stride_gs, numbers, BLOCK_M, BLOCK_N, BLOCK_D, DIM_FULL, HAS_LEFT, HAS_RIGHT,
                PRESCALED, SOFTCAP, DROPOUT, TMA, COUNT, FOLD, IN_REGISTERS, False, False, dtype,
            )  # fmt: skip


def launch_grad_query(
    call: Call, config: Config, given: Tensors, rows: RowVectors, grad_query: Tensor, tiles: Tiles | None = None
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
            rows.folded,
            given.modes,
            given.mean_keys,
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
            "FOLD": rows.folded is not None,
            "HAS_MODES": given.modes is not None,
            "IN_REGISTERS": config.operands_in_registers,
        },
        config.options,
    )
