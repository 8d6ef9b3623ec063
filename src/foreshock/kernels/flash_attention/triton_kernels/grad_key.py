"""The pass of the backward that computes dK and dV."""

import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    INTERPRET,
    cap_scores,
    kept,
    load_columns,
    load_seed,
    load_tile,
    store_tile,
    to_operand,
)
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.passes import RowVectors, Tensors, settled
from foreshock.kernels.flash_attention.triton_kernels.places import at_head, diagonal, key_ranges, place, turn, visible
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config


@triton.jit
def take_columns(first: tl.constexpr, ROWS: tl.constexpr):
    """Return the matrix [ROWS, 16] whose product with folded rows is the sum of their columns first to first + 2."""
    column = tl.arange(0, 16)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    dtype: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    return tl.where((column >= first) & (column < first + 3), 1.0, 0.0).to(dtype)


@triton.jit
def _add_queries(
    grads, k, v, tensors, takes, low, high, keys, length_q, seen, chance, strides, numbers,
    MASKED: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr, FOLD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the queries [low, high) of one head to dK and dV of one block of keys. Tiles are [keys, queries]."""
    grad_k, grad_v = grads
    query, grad_out, folded, log2_lses, deltas, batch, head, rows = tensors
    take_lse, take_delta = takes
    seed, plane, start_q, start_k, threshold = chance
    stride_q, stride_o = strides
    dim, unit, scale, softcap, keep_scale = numbers
    BLOCK_M: tl.constexpr = TILE.block_m
    for start in tl.range(low, high, BLOCK_M):
        q = load_tile(query, batch, head, start, BLOCK_M, stride_q, length_q, dim, SPEC, MASKED, TILE.tma)
        do = load_tile(grad_out, batch, head, start, BLOCK_M, stride_o, length_q, dim, SPEC, MASKED, TILE.tma)
        queries = start + tl.arange(0, BLOCK_M)
        scores = cap_scores(tl.dot(k, tl.trans(q)), scale, softcap, SPEC)
        grad_p = tl.dot(v, tl.trans(do))
        if FOLD:
            # The matrix unit adds -lse / unit and -delta, so that no vector of the tile's queries takes registers.
            # After the last query these are 0, and so are the rows by which P and dS are multiplied.
            row_parts = load_columns(folded, plane, 0, start, BLOCK_M, 8, length_q, 8, 16, False, MASKED, TILE.tma)
            scores = tl.dot(take_lse, tl.trans(row_parts), scores)
            grad_p = tl.dot(take_delta, tl.trans(row_parts), grad_p)
        else:
            inside = queries < length_q
            # After the last query, P is exp2(-inf) = 0.
            log2_lse = tl.load(log2_lses + rows + queries, mask=inside, other=float("inf"))
            delta = tl.load(deltas + rows + queries, mask=inside, other=0.0)
        if MASKED:
            scores = tl.where(visible(queries[None, :], keys[:, None], seen, SPEC), scores, float("-inf"))
        p = tl.exp2(scores * unit) if FOLD else tl.exp2(tl.fma(scores, unit, -log2_lse[None, :]))
        if SPEC.DROPOUT:
            keep = kept(seed, plane, start_q + queries[None, :], start_k + keys[:, None], threshold)
            grad_v = tl.dot(to_operand(tl.where(keep, p * keep_scale, 0.0), DTYPE), do, grad_v)
            grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
        else:
            grad_v = tl.dot(to_operand(p, DTYPE), do, grad_v)
        grad_s = p * grad_p if FOLD else p * (grad_p - delta[None, :])
        if SPEC.SOFTCAP:
            capped = tl.where(p == 0.0, 0.0, scores / softcap)
            grad_s = grad_s * (1.0 - capped * capped)
        grad_k = tl.dot(to_operand(grad_s, DTYPE), q, grad_k)
    return grad_k, grad_v


@triton.jit
def grad_key_kernel(
    query, key, value, grad_out, grad_key, grad_value, folded, log2_lses, deltas, cu_seqlens_q, cu_seqlens_k, seeds,
    strides, sizes, order, SPEC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one block of keys of one key head, over all query heads of its group."""
    dtype: tl.constexpr = grad_key.dtype.element_ty
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    block, which = turn(order)
    first = block * BLOCK_N
    stride_q, stride_k, stride_v, stride_o, stride_g, stride_w = strides
    heads, group, total_q, total_k, dim, scale, unit, softcap, left, right, keep_scale, threshold = sizes
    batch, kv_head, start_q, length_q, start_k, length_k = place(
        which, heads // group, cu_seqlens_q, cu_seqlens_k, total_q, total_k, SPEC.PACKED
    )
    grad_key = at_head(grad_key, batch, kv_head, start_k, stride_g)
    grad_value = at_head(grad_value, batch, kv_head, start_k, stride_w)
    if not TILE.tma:
        query = at_head(query, batch, 0, start_q, stride_q)
        grad_out = at_head(grad_out, batch, 0, start_q, stride_o)
        key = at_head(key, batch, kv_head, start_k, stride_k)
        value = at_head(value, batch, kv_head, start_k, stride_v)
    seed = load_seed(seeds)
    if first < length_k:
        k = load_tile(key, batch, kv_head, first, BLOCK_N, stride_k[2], length_k, dim, SPEC, True, TILE.tma)
        v = load_tile(value, batch, kv_head, first, BLOCK_N, stride_v[2], length_k, dim, SPEC, True, TILE.tma)
        keys = first + tl.arange(0, BLOCK_N)
        offset = diagonal(length_q, length_k, SPEC.TOP_LEFT)
        last = tl.minimum(first + BLOCK_N, length_k) - 1
        # The queries j - offset - right to j - offset + left see key j: the same ranges with swapped sides.
        low, full_low, full_high, high = key_ranges(
            first, last, (-offset, length_q, right, left), TILE.block_m, SPEC.HAS_RIGHT, SPEC.HAS_LEFT
        )
        grads = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_D), tl.float32))
        takes = (take_columns(0, BLOCK_N), take_columns(3, BLOCK_N))
        seen = (offset, length_k, left, right)
        row_strides = (stride_q[2], stride_o[2])
        numbers = (dim, unit, scale, softcap, keep_scale)
        FOLD: tl.constexpr = folded is not None
        for member in tl.range(0, group):
            head = kv_head * group + member
            plane = batch * heads + head
            rows = tl.cast(plane, tl.int64) * total_q + start_q
            query_rows = query
            grad_rows = grad_out
            fold_rows = deltas  # a placeholder: tuples in loops cannot contain None
            if FOLD:
                fold_rows = folded if TILE.tma else folded + rows * 8
            if not TILE.tma:
                query_rows = query + tl.cast(head, tl.int64) * stride_q[1]
                grad_rows = grad_out + tl.cast(head, tl.int64) * stride_o[1]
            tensors = (query_rows, grad_rows, fold_rows, log2_lses, deltas, batch, head, rows)
            chance = (seed, plane, start_q, start_k, threshold)
            if SPEC.HAS_RIGHT:
                grads = _add_queries(
                    grads, k, v, tensors, takes, low, full_low, keys, length_q, seen, chance, row_strides, numbers,
                    True, SPEC, TILE, FOLD, dtype,
                )  # fmt: skip
            grads = _add_queries(
                grads, k, v, tensors, takes, full_low, full_high, keys, length_q, seen, chance, row_strides, numbers,
                False, SPEC, TILE, FOLD, dtype,
            )  # fmt: skip
            grads = _add_queries(
                grads, k, v, tensors, takes, full_high, high, keys, length_q, seen, chance, row_strides, numbers,
                True, SPEC, TILE, FOLD, dtype,
            )  # fmt: skip
        grad_k, grad_v = grads
        store_tile(grad_key, grad_k * scale, first, stride_g[2], length_k, dim, BLOCK_N, SPEC)
        store_tile(grad_value, grad_v, first, stride_w[2], length_k, dim, BLOCK_N, SPEC)


def launch_grad_key(call: Call, config: Config, given: Tensors, rows: RowVectors, grads: tuple[Tensor, Tensor]) -> None:
    """Launch the pass for dK and dV."""

    def settle() -> Launch:
        tile = settled(call, config, given)
        tiles = call.tiles(tile, (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
        if tile.tma and rows.folded is not None:
            tiles[6] = (tile.block_m, 16)  # columns after the eighth are read as 0
        order = call.order(triton.cdiv(call.longest_k, tile.block_n), call.sequences * call.kv_heads, call.longest_q)
        return Launch(
            grad_key_kernel,
            (order[0] * order[1], 1, 1),
            ((*given.strides, grads[0].stride(), grads[1].stride()), call.sizes, order),
            {"SPEC": call.compiled, "TILE": tile},
            tile.options,
            tiles,
        )

    packed = (given.cu_seqlens_q, given.cu_seqlens_k, given.seed)
    call.launch(("dK dV", config), (*given.operands, *grads, rows.folded, rows.log2_lse, rows.delta, *packed), settle)
