"""Scale parts of many tensors in place with one launch; each part has its own factor in device memory.

If a part's factor is 1, its elements are neither read nor written: its program only does three loads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False
# ruff: noqa: N803  # Triton names its compile-time arguments in capitals

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreshock.kernels.flash_attention.triton_kernels.blocks import to_operand

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BLOCK = 8192


def table_of(parts: list[Tensor], places: list[int]) -> Tensor:
    """Return the table that `scale` reads, int64 [parts, 6], for parts [R, C] or [C] of tensors.

    Its columns are: address, index of the part's factor, elements, columns, row stride and column stride.
    """
    rows = []
    for part, place in zip(parts, places, strict=True):
        part = part.unsqueeze(0) if part.dim() == 1 else part
        part = part if part.stride(0) >= part.stride(1) else part.t()  # adjacent threads read adjacent memory
        rows.append([part.data_ptr(), place, part.numel(), part.shape[1], *part.stride()])
    return torch.tensor(rows, dtype=torch.int64).to(parts[0].device)


def scale(table: Tensor, factors: Tensor, dtype: torch.dtype, largest: int) -> None:
    """Multiply each part of `table` by its factor, float64 [N]; `largest` is the element count of the largest part.

    The tensors of the table must have this dtype and still exist. Products are computed in float32, or in float64 for
    float64 parts.
    """
    _scale[(len(table), triton.cdiv(largest, _BLOCK))](table, factors, TYPES[dtype], _BLOCK, num_warps=8)


@triton.jit
def _scale(table, factors, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    row = table + tl.program_id(0) * 6
    factor = tl.load(factors + tl.load(row + 1))
    if factor != 1.0:
        part = tl.load(row).to(tl.pointer_type(TYPE))
        elements, columns = tl.load(row + 2), tl.load(row + 3)
        of_row, of_column = tl.load(row + 4), tl.load(row + 5)
        index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        places = part + (index // columns) * of_row + (index % columns) * of_column
        value = tl.load(places, mask=index < elements)
        wide = tl.float64 if tl.float64 == TYPE else tl.float32
        product = value.to(wide) * factor.to(wide)
        if tl.bfloat16 == TYPE:
            product = to_operand(product, TYPE)  # Triton's interpreter would truncate
        tl.store(places, product.to(TYPE), mask=index < elements)
