"""The paper's stabilised softmax: by how much a row with tied maxima is shifted, so that no weight of it is exactly 1.

Softmax does not change when a row's scores are all shifted; its rounding does (paper, section 4).
"""

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

    Only on a CPU are the modes looked at: on a device that would be a host synchronisation, so the rule is evaluated.
    """
    heads = flagged(modes, Mode.PAPER_SOFTMAX)
    if heads is None:
        return None
    tied = several_within(scores, row_max, PAPER_TOLERANCE, torch.empty_like(scores))
    return torch.where(tied & heads.view(-1, 1, 1), paper_shift(row_max, operand_dtype), torch.zeros_like(row_max))


def paper_shift(row_max: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """The paper's shift (algorithm 3), capped: m becomes beta * m when m > 0, and 0 when m < 0; at m = 0 none."""
    amount = torch.where(row_max > 0, (PAPER_BETA - 1) * row_max, -row_max)
    return amount.clamp(max=PAPER_SHIFT_CAP[operand_dtype])
