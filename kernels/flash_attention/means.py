"""The mean key and the mean value of each sequence, for the key heads whose query heads ask (README.md, modes)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.blocks import (
    CENTRED_KEYS,
    CENTRED_VALUES,
    at_head,
    place,
    served_centring,
    to_operand,
)
from foreshock.kernels.flash_attention.launch import Call, launch


@triton.jit
def mean_kernel(
    key, value, means, modes, cu_seqlens_k,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, kv_heads, group, length_k, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The mean of some columns of the keys, or of the values, of one plane, rounded to their type, in fp32.

    Rounded, because any vector may be taken from every key, and of two 16-bit numbers the difference is exact where the
    common part is the larger. 0 where it is not finite: it would reach rows that do not see what it comes from.
    """
    batch, kv_head, _, _, start, length = place(
        tl.program_id(0), kv_heads, cu_seqlens_k, cu_seqlens_k, length_k, length_k, PACKED
    )
    of_values = tl.program_id(2)
    asked = 0
    for member in range(0, group):
        asked = asked | served_centring(tl.load(modes + kv_head * group + member), SOFTCAP, DROPOUT)
    if (asked & (CENTRED_VALUES if of_values else CENTRED_KEYS)) != 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        source = at_head(key, batch, kv_head, start, stride_kb, stride_kh, stride_ks)
        stride = stride_ks
        if of_values:
            source = at_head(value, batch, kv_head, start, stride_vb, stride_vh, stride_vs)
            stride = stride_vs
        local = tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, length, ROWS):
            rows = first + local
            pointers = source + rows[:, None].to(tl.int64) * stride + columns[None, :]
            mask = (rows < length)[:, None] & (columns < dim)[None, :]
            sums += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / tl.maximum(length, 1)
        mean = to_operand(mean, key.dtype.element_ty).to(tl.float32)
        mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
        means += (tl.program_id(0).to(tl.int64) * 2 + of_values) * dim
        tl.store(means + columns, mean, mask=columns < dim)


def launch_means(
    call: Call, key: Tensor, value: Tensor, modes: Tensor | None, cu_seqlens_k: Tensor | None
) -> Tensor | None:
    """What each plane's keys and values lose, fp32 [planes, 2, D], written where a head asks; None without modes.

    Launched whatever the modes are, which the device alone knows: where no head asks, its programs end at once.
    """
    if modes is None:
        return None
    planes = call.sequences * call.kv_heads
    means = torch.empty((planes, 2, call.dim), dtype=torch.float32, device=key.device)
    columns = min(32, call.block_d)
    launch(
        mean_kernel,
        (planes, triton.cdiv(call.dim, columns), 2),
        (key, value, means, modes, cu_seqlens_k),
        (
            *key.stride()[:3],
            *value.stride()[:3],
            call.kv_heads,
            call.heads // call.kv_heads,
            call.total_k,
            call.dim,
        ),
        {
            "ROWS": 64 if call.capability == 0 else 512,
            "COLUMNS": columns,
            **{name: call.switches[name] for name in ("SOFTCAP", "DROPOUT", "PACKED")},
        },
        {"num_warps": 8},
    )
    return means
