"""FlashAttention-2 backward in Triton, in three passes: rows (delta), dQ (counts ties), dK and dV; then the statistics.

No pass uses atomics: every block of rows writes its own partial statistics, and one small kernel adds them up in a
fixed order, so that equal inputs give equal bits; it then adds each sum to the state at once, by an atomic, so that
backwards of several streams may count into one state. The dQ
pass comes before the dK, dV pass, for which it mends delta where a head's rows are corrected.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.kernels.flash_attention.counting import count_kernel, merge_kernel, row_kernel
from foreshock.kernels.flash_attention.grad_key import launch_grad_key
from foreshock.kernels.flash_attention.grad_query import launch_grad_query
from foreshock.kernels.flash_attention.launch import Call, call_of, on_device
from foreshock.kernels.flash_attention.launcher import Launch
from foreshock.kernels.flash_attention.means import launch_means
from foreshock.kernels.flash_attention.passes import RowVectors, Tensors
from foreshock.kernels.flash_attention.spec import Arguments, Saved
from foreshock.kernels.flash_attention.ties import slow_ties_kernel
from foreshock.kernels.flash_attention.tuning import Configs, configs


def attention_backward(
    grad_out: Tensor, saved: Saved, state: Tensor | None, given: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the statistics of every row are added to `state` unless it is None."""
    query, key, value = saved[:3]
    call = call_of(query, key, value, given, grad_out, *saved[3:], state)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if call.blank(*grads):
        if state is not None:
            state[:, Slot.EMPTY_ROWS] += query.shape[0] * query.shape[2]
        return grads
    if grad_out.stride(-1) != 1:  # an expanded gradient, as that of a sum
        grad_out = grad_out.contiguous()
    chosen = configs(call.capability, call.block_d, call.mean_keys)
    with on_device(query):
        means = launch_means(call, key, Mode.CENTRED_KEYS, given.modes, given.cu_seqlens_k)
        packed = (given.cu_seqlens_q, given.cu_seqlens_k)
        tensors = Tensors(grad_out, *saved, state, given.modes, *packed, given.seed, means)
        launch_backward(call, chosen, tensors, grads)
        if call.packed:
            call.blank_rest(given.cu_seqlens_q, call.longest_q, (grads[0], 0.0))
            call.blank_rest(given.cu_seqlens_k, call.longest_k, (grads[1], 0.0), (grads[2], 0.0))
    return grads


def launch_backward(call: Call, chosen: Configs, given: Tensors, grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """The three passes under given configurations, and the statistics."""
    rows = launch_rows(call, given)
    launch_grad_query(call, chosen.grad_query, given, rows, grads[0])
    launch_grad_key(call, chosen.grad_key, given, rows, grads[1:])
    if given.state is not None:
        launch_count(call, given, rows, given.state)


def launch_rows(call: Call, given: Tensors) -> RowVectors:
    """delta, and what the other passes need of every row."""
    grid = (triton.cdiv(call.longest_q, call.row_block), call.sequences * call.heads, 1)
    lse = given.lse
    log2_lse, delta, bias = torch.empty((3, *lse.shape), dtype=torch.float32, device=lse.device).unbind()
    common = None
    factors = large = codes = None
    if given.state is not None:
        factors = lse.new_empty((*lse.shape, 2))
        large = torch.empty(grid[:2], dtype=torch.int8, device=lse.device)
        codes = torch.empty_like(lse, dtype=torch.int16)
        common = torch.empty_like(lse) if given.modes is not None else None
    folded = None
    if call.foldable:
        folded = torch.empty((lse[..., 0].numel(), 1, lse.shape[2], 8), dtype=torch.bfloat16, device=lse.device)
    call.launch(
        "rows",
        (
            given.grad_out,
            given.out,
            given.residual,
            given.query,
            lse,
            given.row_max,
            log2_lse,
            delta,
            folded,
            bias,
            common,
            factors,
            large,
            given.modes,
            given.mean_keys,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        lambda: Launch(
            row_kernel,
            grid,
            (
                (given.grad_out.stride(), given.out.stride(), given.query.stride()),
                (*call.planes, call.dim, float(call.spec.scale), float(call.unit), float(call.score_unit)),
            ),
            {"SPEC": call.compiled, "ROWS": call.row_block},
            {"num_warps": 4},
        ),
    )
    return RowVectors(log2_lse, delta, bias, common, factors, large, codes, folded)


_COUNT_ROWS = 1024
"""Rows a program of the counting kernel."""


def launch_count(call: Call, given: Tensors, rows: RowVectors, state: Tensor) -> None:
    """Every statistic of every row, added to the state."""
    query, key = given.query, given.key
    spec, unit = call.spec, float(call.score_unit)
    sight = (spec.window_left, spec.right)
    call.launch(
        "slow ties",
        (
            query,
            key,
            given.row_max,
            rows.common,
            rows.large,
            rows.codes,
            given.modes,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        lambda: Launch(
            slow_ties_kernel,
            (triton.cdiv(call.longest_q, 256), call.sequences * call.heads, 1),
            (
                (query.stride(), key.stride()),
                call.longest_q,
                (*call.planes, call.dim, float(spec.scale), float(spec.softcap), *sight, unit),
            ),
            {
                "SPEC": call.compiled,
                "ROWS": call.row_block,
                "BLOCK": 32 if call.capability == 0 else 64,
                "BLOCKS": 8 if call.capability == 0 else 4,
            },
            {"num_warps": 4, "num_stages": 1},
        ),
    )
    blocks, planes = triton.cdiv(call.longest_q, _COUNT_ROWS), call.sequences * call.heads
    partial = torch.empty((planes, SLOT_COUNT, blocks), dtype=torch.int64, device=state.device)
    call.launch(
        "count",
        (
            given.lse,
            given.row_max,
            rows.delta,
            rows.bias,
            rows.common,
            rows.codes,
            given.modes,
            partial,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
        ),
        lambda: Launch(
            count_kernel,
            (blocks, planes, 1),
            ((*call.planes, *sight, unit, float(call.unit)),),
            {
                "SPEC": call.compiled,
                "ROWS": _COUNT_ROWS,
                "DTYPE": tl.bfloat16 if given.out.dtype == torch.bfloat16 else tl.float16,
            },
            {"num_warps": 4},
        ),
    )
    call.launch(
        "merge",
        (state, partial, given.cu_seqlens_q),
        lambda: Launch(
            merge_kernel,
            (call.heads, SLOT_COUNT, 1),
            (*state.stride(), call.heads, call.sequences, call.total_q, blocks),
            {"PACKED": call.packed, "BLOCK": 512},
            {"num_warps": 4},
        ),
    )
