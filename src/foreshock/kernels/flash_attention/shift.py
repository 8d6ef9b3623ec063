"""The paper's stabilised softmax: shift a row with tied maxima, so that none of its weights is exactly 1.

Shifting all scores of a row changes the rounding of softmax, but not softmax itself (paper, section 4).
"""

from typing import Final

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.statistics import several_within

PAPER_TOLERANCE: Final = 1e-3
"""The paper's epsilon: scores this close to the row's maximum count as maxima too."""

PAPER_BETA: Final = 2.0
"""The paper's beta: the maximum m > 0 of a tied row is replaced by beta * m."""

PAPER_SHIFT_CAP: Final = {torch.bfloat16: 60.0, torch.float16: 0.5}
"""Largest shift under the paper's rule, by operand dtype. Without a cap, exp(-(beta - 1) * m) is 0 in fp32 once m
exceeds 87, and below fp16's normal range from m = 10 on; so in fp16 the shift stays within one binade."""


def flagged(modes: Tensor | None, flag: int) -> Tensor | None:
    """Return the heads whose mode has `flag`, bool [H]; None if it is known that there are none."""
    if modes is None:
        return None
    heads = (modes & flag).bool()
    return None if modes.device.type == "cpu" and not bool(heads.any()) else heads


def row_shift(scores: Tensor, row_max: Tensor, modes: Tensor | None, operand_dtype: torch.dtype) -> Tensor | None:
    """Return the shift of each row of scores [B, H, Sq, Sk], which is added to the subtracted row maximum.

    It is [B, H, Sq, 1], positive for shifted rows and 0 for others; None if it is known that no head shifts rows.
    That is only known on a CPU: on a GPU, reading the modes would synchronise with the host, so the rule is evaluated.
    """
    heads = flagged(modes, Mode.PAPER_SOFTMAX)
    if heads is None:
        return None
    tied = several_within(scores, row_max, PAPER_TOLERANCE, torch.empty_like(scores))
    return torch.where(tied & heads.view(-1, 1, 1), paper_shift(row_max, operand_dtype), torch.zeros_like(row_max))


def paper_shift(row_max: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """Return the paper's shift (algorithm 3), capped: m becomes beta * m if m > 0 and 0 if m < 0; 0 if m = 0."""
    amount = torch.where(row_max > 0, (PAPER_BETA - 1) * row_max, -row_max)
    return amount.clamp(max=PAPER_SHIFT_CAP[operand_dtype])
