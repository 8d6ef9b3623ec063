"""The pass of the backward that computes dQ, and corrects delta of heads whose rows are corrected."""

import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    ROW_CORRECTED,
    add_rows,
    cap_scores,
    in_registers,
    kept,
    load_seed,
    load_tile,
    no_sums,
    row_sums,
    store_tile,
    to_operand,
)
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.passes import RowVectors, Tensors, settled
from foreshock.kernels.flash_attention.triton_kernels.places import (
    at_head,
    diagonal,
    key_ranges,
    one_head,
    turn,
    visible,
)
from foreshock.kernels.flash_attention.triton_kernels.rows import fold
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config


@triton.jit
def _add_keys(
    acc, defect, operands, tensors, low, high, queries, of_rows, seen, chance, strides, numbers,
    MASKED: tl.constexpr, CORRECT: tl.constexpr, STAGES: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the keys [low, high) to dQ of one block of queries, and to its `defect` if rows are corrected.

    The defect consists of P K and of row sums: of dS before and after the slope of a softcap, and of rounded dS and P.
    """
    mixed_keys, sum_grad, sum_sloped, sum_rounded, sum_p = defect
    q, grad_out = operands
    key, value, batch, kv_head = tensors
    log2_lse, delta, _ = of_rows
    _, length_k, _, _ = seen
    seed, plane, start_q, start_k, threshold = chance
    stride_k, stride_v = strides
    dim, unit, scale, softcap, keep_scale = numbers
    BLOCK_N: tl.constexpr = TILE.block_n
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, SPEC, MASKED, TILE.tma)
        v = load_tile(value, batch, kv_head, start, BLOCK_N, stride_v, length_k, dim, SPEC, MASKED, TILE.tma)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, SPEC)
        grad_p = tl.dot(grad_out, tl.trans(v))
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            scores = tl.where(visible(queries[:, None], keys[None, :], seen, SPEC), scores, float("-inf"))
        p = tl.exp2(tl.fma(scores, unit, -log2_lse[:, None]))
        if SPEC.DROPOUT:
            keep = kept(seed, plane, start_q + queries[:, None], start_k + keys[None, :], threshold)
            grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
        grad_s = p * (grad_p - delta[:, None])
        if CORRECT:
            sum_grad += tl.sum(grad_s, 1)
        if SPEC.SOFTCAP:
            capped = tl.where(p == 0.0, 0.0, scores / softcap)
            slope = 1.0 - capped * capped
            grad_s = grad_s * slope
            p = p * slope
        rounded = to_operand(grad_s, DTYPE)
        acc = tl.dot(rounded, k, acc)
        if CORRECT:
            sum_rounded = add_rows(sum_rounded, rounded)
            weights = to_operand(p, DTYPE)
            mixed_keys = tl.dot(weights, k, mixed_keys)
            sum_p = add_rows(sum_p, weights)
            if SPEC.SOFTCAP:
                sum_sloped += tl.sum(grad_s, 1)
    return acc, (mixed_keys, sum_grad, sum_sloped, sum_rounded, sum_p)


@triton.jit
def _block(
    operands, tensors, outputs, first, inside, rows, length_q, of_rows, seen, chance, strides, stride_g, numbers,
    CORRECT: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one block of queries, with or without row correction."""
    grad_query, deltas, folded = outputs
    _, delta, row_sum = of_rows
    dim, _, scale, _, _ = numbers
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    queries = first + tl.arange(0, BLOCK_M)
    if TILE.operands_in_registers and not CORRECT:
        q, do = operands
        operands = (in_registers(q), in_registers(do))
    # With row correction, a second accumulator takes the registers: operands stay in shared memory, with fewer stages.
    STAGES: tl.constexpr = 2 if TILE.operands_in_registers and CORRECT else None
    last = tl.minimum(first + BLOCK_M, length_q) - 1
    low, full_low, full_high, high = key_ranges(first, last, seen, TILE.block_n, SPEC.HAS_LEFT, SPEC.HAS_RIGHT)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    sums = no_sums(BLOCK_M)
    defect = (acc, nothing, nothing, sums, sums)
    if SPEC.HAS_LEFT:
        acc, defect = _add_keys(
            acc, defect, operands, tensors, low, full_low, queries, of_rows, seen, chance, strides, numbers,
            True, CORRECT, STAGES, SPEC, TILE, DTYPE,
        )  # fmt: skip
    acc, defect = _add_keys(
        acc, defect, operands, tensors, full_low, full_high, queries, of_rows, seen, chance, strides, numbers,
        False, CORRECT, STAGES, SPEC, TILE, DTYPE,
    )  # fmt: skip
    acc, defect = _add_keys(
        acc, defect, operands, tensors, full_high, high, queries, of_rows, seen, chance, strides, numbers,
        True, CORRECT, STAGES, SPEC, TILE, DTYPE,
    )  # fmt: skip
    if CORRECT:
        mixed_keys, sum_grad, sum_sloped, sum_rounded, sum_p = defect
        sum_rounded = row_sums(sum_rounded)
        sum_p = row_sums(sum_p)
        sum_p = tl.where(sum_p == 0.0, 1.0, sum_p)
        sum_grad -= row_sum
        # With a softcap, dS sums to zero before the slope.
        share = (sum_rounded - row_sum) / sum_p
        if SPEC.SOFTCAP:
            share = sum_grad + (sum_rounded - sum_sloped) / sum_p
        acc -= share[:, None] * mixed_keys
        delta += sum_grad
        tl.store(deltas + rows + queries, delta, mask=inside)
        if folded is not None:
            column = tl.arange(0, 16)[None, :]
            pointers = folded + (rows + queries)[:, None] * 8 + column
            mask = inside[:, None] & (column >= 3) & (column < 6)
            tl.store(pointers, fold(-delta, column - 3).to(tl.bfloat16), mask=mask)
    store_tile(grad_query, acc * scale, first, stride_g, length_q, dim, BLOCK_M, SPEC)


@triton.jit
def grad_query_kernel(
    query, key, value, grad_out, grad_query, grad_lses, log2_lses, deltas, folded, modes, cu_seqlens_q, cu_seqlens_k,
    seeds, strides, sizes, order, SPEC: tl.constexpr, TILE: tl.constexpr, CORRECTED_ONLY: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one block of queries of one head. CORRECTED_ONLY: skip heads whose rows are not corrected."""
    dtype: tl.constexpr = grad_query.dtype.element_ty
    BLOCK_M: tl.constexpr = TILE.block_m
    block, which = turn(order)
    first = (order[0] - 1 - block) * BLOCK_M
    stride_q, stride_k, stride_v, stride_o, stride_g = strides
    _, _, _, _, dim, scale, unit, softcap, left, right, keep_scale, threshold = sizes
    place, plane, rows, start_q, length_q, start_k, length_k = one_head(which, sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    batch, head, kv_head = place
    grad_query = at_head(grad_query, batch, head, start_q, stride_g)
    if not TILE.tma:
        query = at_head(query, batch, head, start_q, stride_q)
        key = at_head(key, batch, kv_head, start_k, stride_k)
        value = at_head(value, batch, kv_head, start_k, stride_v)
        grad_out = at_head(grad_out, batch, head, start_q, stride_o)
    seed = load_seed(seeds)
    taken = first < length_q
    if CORRECTED_ONLY:
        taken = taken & ((tl.load(modes + head) & ROW_CORRECTED) != 0)
    if taken:
        queries = first + tl.arange(0, BLOCK_M)
        inside = queries < length_q
        # A tile's load waits until the tile arrives, so start the other loads before it.
        log2_lse = tl.load(log2_lses + rows + queries, mask=inside, other=float("inf"))
        delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
        q = load_tile(query, batch, head, first, BLOCK_M, stride_q[2], length_q, dim, SPEC, True, TILE.tma)
        do = load_tile(grad_out, batch, head, first, BLOCK_M, stride_o[2], length_q, dim, SPEC, True, TILE.tma)
        operands = (q, do)
        tensors = (key, value, batch, kv_head)
        outputs = (grad_query, deltas, folded)
        row_sum = 0.0
        if grad_lses is not None:
            row_sum = tl.load(grad_lses + rows + queries, mask=inside, other=0.0)
            row_sum = tl.where(log2_lse < 1e30, row_sum, 0.0)
        of_rows = (log2_lse, delta, row_sum)
        seen = (diagonal(length_q, length_k, SPEC.TOP_LEFT), length_k, left, right)
        chance = (seed, plane, start_q, start_k, threshold)
        key_strides = (stride_k[2], stride_v[2])
        numbers = (dim, unit, scale, softcap, keep_scale)
        # Choose between whole versions, because a branch inside a loop would disable its pipelining.
        if modes is not None:
            mode = tl.load(modes + head)
            if (mode & ROW_CORRECTED) != 0:
                _block(
                    operands, tensors, outputs, first, inside, rows, length_q, of_rows, seen, chance,
                    key_strides, stride_g[2], numbers, True, SPEC, TILE, dtype,
                )  # fmt: skip
            elif not CORRECTED_ONLY:
                _block(
                    operands, tensors, outputs, first, inside, rows, length_q, of_rows, seen, chance,
                    key_strides, stride_g[2], numbers, False, SPEC, TILE, dtype,
                )  # fmt: skip
        else:
            _block(
                operands, tensors, outputs, first, inside, rows, length_q, of_rows, seen, chance, key_strides,
                stride_g[2], numbers, False, SPEC, TILE, dtype,
            )  # fmt: skip


def launch_grad_query(
    call: Call, config: Config, given: Tensors, rows: RowVectors, grad_query: Tensor, *, corrected_only: bool = False
) -> None:
    """Launch the pass for dQ and corrected deltas; corrected_only: only for heads whose rows `given.modes` corrects."""

    def settle() -> Launch:
        tile = settled(call, config, given)
        order = call.order(triton.cdiv(call.longest_q, tile.block_m), call.sequences * call.heads, call.longest_k)
        return Launch(
            grad_query_kernel,
            (order[0] * order[1], 1, 1),
            ((*given.strides, grad_query.stride()), call.sizes, order),
            {"SPEC": call.compiled, "TILE": tile, "CORRECTED_ONLY": corrected_only},
            tile.options,
            call.tiles(tile, (tile.block_m, tile.block_n, tile.block_n, tile.block_m)),
        )

    vectors = (
        given.grad_lse,
        rows.log2_lse,
        rows.delta,
        rows.folded,
        given.modes,
    )
    packed = (given.cu_seqlens_q, given.cu_seqlens_k, given.seed)
    name = "dQ of corrected heads" if corrected_only else "dQ"
    call.launch((name, config), (*given.operands, grad_query, *vectors, *packed), settle)
