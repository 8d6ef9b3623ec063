"""The stabilised softmax: by how much a row is shifted, so that no weight of it is exactly 1.

Softmax does not change when a row's scores are all shifted; its rounding does (paper, section 4). README.md says why
the default rule is not the paper's.
"""

import math
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.statistics import several_within

PAPER_TOLERANCE: Final = 1e-3
"""The paper's epsilon: scores this near the row's maximum are maxima too."""

PAPER_BETA: Final = 2.0
"""The paper's beta: the maximum m > 0 of a tied row is replaced by beta * m."""

PAPER_SHIFT_CAP: Final = {torch.bfloat16: 60.0, torch.float16: 0.5}
"""Largest shift under the paper's rule, by operand dtype. Uncapped, exp(-(beta - 1) * m) is 0 in fp32 once m passes 87,
and fp16 has no normal numbers left at m = 10: there the shift stays inside one binade."""


def flagged(modes: Tensor | None, flag: int) -> Tensor | None:
    """The heads whose mode has `flag`, bool [H]; None when it is known that there are none."""
    if modes is None:
        return None
    heads = (modes & flag).bool()
    return None if modes.device.type == "cpu" and not bool(heads.any()) else heads


def row_shift(scores: Tensor, row_max: Tensor, modes: Tensor | None, operand_dtype: torch.dtype) -> Tensor | None:
    """What each head's mode adds to the row maximum before it is subtracted from scores [B, H, Sq, Sk].

    [B, H, Sq, 1], 0 for a row left alone, else positive; None when it is known that no head asks.

    Only on a CPU are the modes looked at: on a device that would be a host synchronisation, so every rule is evaluated.
    """
    stable_heads, paper_heads = (flagged(modes, flag) for flag in (Mode.STABLE_SOFTMAX, Mode.PAPER_SOFTMAX))
    if stable_heads is None and paper_heads is None:
        return None
    amount = torch.zeros_like(row_max)
    if paper_heads is not None:
        tied = several_within(scores, row_max, PAPER_TOLERANCE, torch.empty_like(scores))
        amount = torch.where(tied & paper_heads.view(-1, 1, 1), paper_shift(row_max, operand_dtype), amount)
    if stable_heads is not None:
        amount = torch.where(stable_heads.view(-1, 1, 1), stable_shift(row_max), amount)
    return amount


def stable_shift(row_max: Tensor) -> Tensor:
    """ln(256 / k) for an odd k in [153, 215] hashed from the bits of the row maximum, in row_max's dtype.

    The row's largest weight becomes k / 256: never 1; exact in bf16 and fp16, so that dividing by the unrounded row
    sum is right; odd, so that P V is not exact. Less than a binade, so nothing underflows; not one constant, which
    would round every row's weights the same way (paper, appendix C); as large at row_max = 0 as elsewhere.
    """
    bits = row_max.to(torch.float32).view(torch.int32).to(torch.int64)
    odd = 153 + 2 * (((bits * 0x9E3779B1) & 0xFFFFFFFF) >> 27)
    return math.log(256) - odd.to(row_max.dtype).log()


def paper_shift(row_max: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """The paper's shift (algorithm 3), capped: m becomes beta * m when m > 0, and 0 when m < 0; at m = 0 none."""
    amount = torch.where(row_max > 0, (PAPER_BETA - 1) * row_max, -row_max)
    return amount.clamp(max=PAPER_SHIFT_CAP[operand_dtype])
