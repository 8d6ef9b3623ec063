"""Convert the fp32 sums of the backward for Hopper (hopper_backward.py) to gradients in the inputs' type."""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels import hopper
from foreshock.kernels.flash_attention.triton_kernels.blocks import ROW_CORRECTED, to_operand
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch

_ROWS: Final = 16


@triton.jit
def round_kernel(sums, grad, modes, rows, heads, head_rows, scale, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Scale and round fp32 sums of the gradient's layout: `rows` rows, of which head_rows at a time belong to a head.

    Corrected heads are skipped, because their dQ is already written.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    taken = row < rows
    if modes is not None:
        mode = tl.load(modes + row // head_rows % heads, mask=taken, other=0)
        taken = taken & ((mode & ROW_CORRECTED) == 0)
    at = row.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    total = tl.load(sums + at, mask=taken[:, None], other=0.0)
    tl.store(grad + at, to_operand(total * scale, grad.dtype.element_ty), mask=taken[:, None])


def launch_rounding(call: Call, name: str, sums: Tensor, grad: Tensor, scale: float, modes: Tensor | None) -> None:
    """Write a gradient with dense rows from sums with the same strides, for heads that `modes` does not correct."""

    def settle() -> Launch:
        rows = sums.numel() // hopper.DIM
        return Launch(
            round_kernel,
            (triton.cdiv(rows, _ROWS), 1, 1),
            (rows, call.heads, max(1, sums.stride(1) // hopper.DIM), scale),
            {"BLOCK": _ROWS, "HEAD_DIM": hopper.DIM},
            {"num_warps": 4},
        )

    call.launch(name, (sums, grad, modes), settle)
