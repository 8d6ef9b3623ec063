"""FlashAttention-2 forward in Triton: O, its rounding residual, log-sum-exp and the two largest scores of each row."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.known_modes import known_modes, snapshot
from foreshock.kernels.flash_attention.launch import Call, call_of, on_device
from foreshock.kernels.flash_attention.shift import PAPER_SHIFT_CAP
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels import hopper
from foreshock.kernels.flash_attention.triton_kernels.blocks import (
    LN2,
    LOG2E,
    PAPER_SOFTMAX,
    PAPER_TOLERANCE,
    RESIDUAL_SCALE_FP16,
    cap_scores,
    in_registers,
    kept,
    load_seed,
    load_tile,
    store_tile,
    to_operand,
)
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.passes import Outputs
from foreshock.kernels.flash_attention.triton_kernels.places import (
    at_head,
    diagonal,
    key_ranges,
    one_head,
    turn,
    visible,
)
from foreshock.kernels.flash_attention.triton_kernels.ties import largest_two, merged
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config, configs

PAPER_CAP_BF16: tl.constexpr = tl.constexpr(PAPER_SHIFT_CAP[torch.bfloat16])
PAPER_CAP_FP16: tl.constexpr = tl.constexpr(PAPER_SHIFT_CAP[torch.float16])


@triton.jit
def _attend(
    running, shift, q, tensors, low, high, queries, seen, chance, strides, numbers,
    MASKED: tl.constexpr, SHIFT: tl.constexpr, SECOND: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the keys [low, high) to the running accumulator, row sum, largest and, if SECOND, second largest score."""
    acc, total, row_max, second, before = running
    key, value, batch, kv_head = tensors
    _, length_k, _, _ = seen
    seed, plane, start_q, start_k, threshold = chance
    stride_k, stride_v = strides
    dim, unit, scale, softcap, _, _ = numbers
    BLOCK_N: tl.constexpr = TILE.block_n
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, SPEC, MASKED, TILE.tma)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, SPEC)
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            scores = tl.where(visible(queries[:, None], keys[None, :], seen, SPEC), scores, float("-inf"))
        if SECOND:
            largest, next_largest = largest_two(scores)
            new_max, second = merged(row_max, second, largest, next_largest)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max * unit)
        if SHIFT:
            subtracted += shift
        # `subtracted` is rounded once and used for every entry and the rescaling, so its error cancels in P / l.
        p = tl.exp2(tl.fma(scores, unit, -subtracted[:, None]))
        shrink = tl.exp2(before - subtracted)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        rounded = to_operand(p, DTYPE)
        if SPEC.DROPOUT:
            keep = kept(seed, plane, start_q + queries[:, None], start_k + keys[None, :], threshold)
            rounded = tl.where(keep, rounded, 0.0)
        v = load_tile(value, batch, kv_head, start, BLOCK_N, stride_v, length_k, dim, SPEC, MASKED, TILE.tma)
        acc = tl.dot(rounded, v, acc)
        row_max = new_max
        # Not 0 before the first visible key: exp2(0 - subtracted) would overflow if the first scores are very negative.
        before = tl.where(new_max == float("-inf"), new_max, subtracted)
    return acc, total, row_max, second, before


@triton.jit
def _paper_shift(
    q, tensors, low, high, queries, seen, stride_k, numbers,
    SPEC: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the paper's shift of each row as an exponent of two, in an extra pass over the row's scores."""
    key, _, batch, kv_head = tensors
    _, length_k, _, _ = seen
    dim, _, scale, softcap, score_unit, _ = numbers
    BLOCK_N: tl.constexpr = TILE.block_n
    largest = tl.full(queries.shape, float("-inf"), tl.float32)
    second = largest
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(key, batch, kv_head, start, BLOCK_N, stride_k, length_k, dim, SPEC, True, TILE.tma)
        scores = cap_scores(tl.dot(q, tl.trans(k)), scale, softcap, SPEC) * score_unit
        mask = visible(queries[:, None], (start + tl.arange(0, BLOCK_N))[None, :], seen, SPEC)
        here, next_here = largest_two(tl.where(mask, scores, float("-inf")))
        largest, second = merged(largest, second, here, next_here)
    # m becomes 2 m when m > 0 and 0 when m < 0: a shift by |m|, capped.
    cap: tl.constexpr = PAPER_CAP_BF16 if tl.bfloat16 == DTYPE else PAPER_CAP_FP16
    return tl.where(largest - second <= PAPER_TOLERANCE, tl.minimum(tl.abs(largest), cap), 0.0) * LOG2E


@triton.jit
def _block(
    q, tensors, outputs, first, rows, length_q, seen, chance, strides, stride_o, numbers,
    SHIFT: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the whole forward of one block of queries, with or without shift."""
    out, residual, lse, row_max_out, second_out = outputs
    SECOND: tl.constexpr = second_out is not None
    dim, _, _, _, score_unit, keep_scale = numbers
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    queries = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, length_q) - 1
    low, full_low, full_high, high = key_ranges(first, last, seen, TILE.block_n, SPEC.HAS_LEFT, SPEC.HAS_RIGHT)
    total = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    running = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32), total, row_max, row_max, row_max)
    shift = total
    if SHIFT:
        shift = _paper_shift(q, tensors, low, high, queries, seen, strides[0], numbers, SPEC, TILE, DTYPE)
    if SPEC.HAS_LEFT:
        running = _attend(
            running, shift, q, tensors, low, full_low, queries, seen, chance, strides, numbers, True, SHIFT,
            SECOND, SPEC, TILE, DTYPE,
        )  # fmt: skip
    running = _attend(
        running, shift, q, tensors, full_low, full_high, queries, seen, chance, strides, numbers, False, SHIFT,
        SECOND, SPEC, TILE, DTYPE,
    )  # fmt: skip
    acc, total, row_max, second, before = _attend(
        running, shift, q, tensors, full_high, high, queries, seen, chance, strides, numbers, True, SHIFT,
        SECOND, SPEC, TILE, DTYPE,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    exact = acc * (keep_scale / total)[:, None]
    store_tile(out, exact, first, stride_o, length_q, dim, BLOCK_M, SPEC)
    inside = queries < length_q
    tl.store(row_max_out + rows + queries, row_max * score_unit, mask=inside)
    if SECOND:
        tl.store(second_out + rows + queries, second * score_unit, mask=inside)
    log_sum = (before + tl.log2(total)) * LN2
    tl.store(lse + rows + queries, tl.where(row_max == float("-inf"), row_max, log_sum), mask=inside)
    if residual is not None:
        lost = exact - to_operand(exact, DTYPE).to(tl.float32)
        if tl.float16 == DTYPE:
            lost *= RESIDUAL_SCALE_FP16
        store_tile(residual, lost, first, stride_o, length_q, dim, BLOCK_M, SPEC)


@triton.jit
def forward_kernel(
    query, key, value, out, residual, lse, row_max_out, second_out, modes, cu_seqlens_q, cu_seqlens_k,
    seeds, strides, sizes, score_unit, order, SPEC: tl.constexpr, TILE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head. Blocks that see the most keys start first.

    SHIFTED: whether to compute the heads that shift their rows, or all others. One kernel with both versions would
    need the sum of their shared memory, so that a multiprocessor could run only one program instead of three.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    block, which = turn(order)
    first = (order[0] - 1 - block) * TILE.block_m
    stride_q, stride_k, stride_v, stride_o = strides
    _, _, _, _, dim, scale, unit, softcap, left, right, keep_scale, threshold = sizes
    place, plane, rows, start_q, length_q, start_k, length_k = one_head(which, sizes, cu_seqlens_q, cu_seqlens_k, SPEC)
    batch, head, kv_head = place
    out = at_head(out, batch, head, start_q, stride_o)
    if residual is not None:
        residual = at_head(residual, batch, head, start_q, stride_o)
    if not TILE.tma:
        query = at_head(query, batch, head, start_q, stride_q)
        key = at_head(key, batch, kv_head, start_k, stride_k)
        value = at_head(value, batch, kv_head, start_k, stride_v)
    seed = load_seed(seeds)
    taken = first < length_q
    if modes is not None:
        taken = taken & (((tl.load(modes + head) & PAPER_SOFTMAX) != 0) == SHIFTED)
    if taken:
        q = load_tile(query, batch, head, first, TILE.block_m, stride_q[2], length_q, dim, SPEC, True, TILE.tma)
        if TILE.operands_in_registers:
            q = in_registers(q)
        tensors = (key, value, batch, kv_head)
        outputs = (out, residual, lse, row_max_out, second_out)
        seen = (diagonal(length_q, length_k, SPEC.TOP_LEFT), length_k, left, right)
        chance = (seed, plane, start_q, start_k, threshold)
        key_strides = (stride_k[2], stride_v[2])
        numbers = (dim, unit, scale, softcap, score_unit, keep_scale)
        _block(
            q, tensors, outputs, first, rows, length_q, seen, chance, key_strides, stride_o[2], numbers, SHIFTED, SPEC,
            TILE, dtype,
        )  # fmt: skip


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, given: Arguments, *, counted: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, out_residual, lse, row_max and second, as `foreshock::attention_forward` (arguments: see op.py).

    counted: whether the backward will count statistics, for which it needs `second`.
    """
    call = call_of(query, key, value, given)
    out = torch.empty_like(query)
    residual = torch.empty_like(query) if given.spec.residual else None
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    row_max = torch.empty_like(lse)
    second = torch.empty_like(lse) if counted and residual is not None else None
    kept = [lse.new_empty(0) if one is None else one for one in (residual, second)]
    if call.blank(out, kept[0]):
        for rows in (lse, row_max, kept[1]):
            rows.fill_(-math.inf)
        return out, kept[0], lse, row_max, kept[1]
    outputs = (out, residual, lse, row_max, second)
    with on_device(query):
        launch_fastest(call, (query, key, value), outputs, given)
        if call.packed:
            fills = ((out, 0.0), (kept[0], 0.0), *((rows, -math.inf) for rows in (lse, row_max, kept[1])))
            call.blank_rest(given.cu_seqlens_q, call.longest_q, *(fill for fill in fills if fill[0].numel()))
    return out, kept[0], lse, row_max, kept[1]


def launch_fastest(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    given: Arguments,
) -> None:
    """Launch the heads that do not shift their rows, with Hopper's kernel if it supports the call (hopper.py), and
    then the heads that do, unless the host knows that there are none."""
    config = configs(call.capability, call.block_d, call.mean_keys).forward
    shifts = known_modes(given.modes).some_shifted
    given = given._replace(modes=snapshot(given.modes) if shifts else None)
    if not hopper.launched(call, inputs, outputs, given.modes):
        launch_forward(call, config, inputs, outputs, given)
    if shifts:
        launch_forward(call, config, inputs, outputs, given, shifted=True)


def launch_forward(
    call: Call,
    config: Config,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    given: Arguments,
    *,
    shifted: bool = False,
) -> None:
    """Launch once under a given configuration; the benchmark uses this to compare configurations.

    inputs are query, key and value. shifted: compute the heads that shift their rows by `given.modes`, or all others.
    """
    query, key, value = inputs

    def settle() -> Launch:
        tile = config.fitted(call.takes_descriptors(*inputs))
        strides = (query.stride(), key.stride(), value.stride(), outputs[0].stride())
        order = call.order(triton.cdiv(call.longest_q, tile.block_m), call.sequences * call.heads, call.longest_k)
        return Launch(
            forward_kernel,
            (order[0] * order[1], 1, 1),
            (strides, call.sizes, float(call.score_unit), order),
            {"SPEC": call.compiled, "TILE": tile, "SHIFTED": shifted},
            tile.options,
            call.tiles(tile, (tile.block_m, tile.block_n, tile.block_n)),
        )

    others = (given.modes, given.cu_seqlens_q, given.cu_seqlens_k, given.seed)
    name = "forward of shifted heads" if shifted else "forward"
    call.launch((name, config), (*inputs, *outputs, *others), settle)
