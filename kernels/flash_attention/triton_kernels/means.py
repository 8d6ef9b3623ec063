"""The mean key, or the mean value, of each sequence, for the key heads whose query heads ask (README.md, modes)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch
from foreshock.kernels.flash_attention.triton_kernels.places import at_head, place


@triton.jit
def mean_kernel(
    rows, means, modes, cu_seqlens, strides, kv_heads, group, length, dim,
    FLAG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The mean of some columns of one plane's rows, 0 where it is not finite: it would reach rows that do not see what
    it comes from."""
    batch, kv_head, start, length, _, _ = place(
        tl.program_id(0), kv_heads, cu_seqlens, cu_seqlens, length, length, PACKED
    )
    asked = 0
    for member in range(group):
        asked = asked | (tl.load(modes + kv_head * group + member) & FLAG)
    if asked != 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pointers = at_head(rows, batch, kv_head, start, strides) + columns[None, :]
        local = tl.arange(0, ROWS)[:, None]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, length, ROWS):
            row = first + local
            mask = (row < length) & (columns < dim)[None, :]
            sums += tl.load(pointers + row.to(tl.int64) * strides[2], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / tl.maximum(length, 1)
        mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
        tl.store(means + tl.program_id(0).to(tl.int64) * dim + columns, mean, mask=columns < dim)


def launch_means(
    call: Call, rows: Tensor, flag: Mode, modes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """The mean of `rows` [B, Hkv, Sk, D] over each sequence, fp32 [planes, D], written where a head asks by `flag`;
    None without modes; empty where nobody may ask (centring.refusal), so that what reads it compiles all the same.

    Launched whatever the modes are, which the device alone knows: where no head asks, its programs end at once.
    """
    spec = call.spec
    if modes is None:
        return None
    if spec.softcap > 0 if flag == Mode.CENTRED_KEYS else spec.dropout_p > 0:
        return torch.empty((0, call.dim), dtype=torch.float32, device=rows.device)
    planes, columns = call.sequences * call.kv_heads, min(32, call.block_d)
    means = torch.empty((planes, call.dim), dtype=torch.float32, device=rows.device)
    call.launch(
        ("means", flag),
        (rows, means, modes, cu_seqlens),
        lambda: Launch(
            mean_kernel,
            (planes, triton.cdiv(call.dim, columns), 1),
            (rows.stride(), call.kv_heads, call.heads // call.kv_heads, call.total_k, call.dim),
            {
                "FLAG": int(flag),
                "ROWS": 64 if call.capability == 0 else 512,
                "COLUMNS": columns,
                "PACKED": call.packed,
            },
            {"num_warps": 8},
        ),
    )
    return means
