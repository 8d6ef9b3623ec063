"""How far an attention's output may be from its recomputation: what rounding explains of each row, and no more.

O = sum_j P_j v_j is computed again from the same q, k and v. A correct kernel differs from that for four reasons, each
bounded in the Euclidean norm of the row; u is the unit roundoff of the operands' type, rho^2 = sum_j P_j |v_j|^2:

- P is rounded to the operands' type, by the kernel and here; O is rounded, and the kernel's exp may be a polynomial
  (FlashAttention 4, 2^-13) or its O be merged of parts. Each is at most u sum_j P_j |v_j| <= u rho: 4 u rho together.
- Sums over n keys in float32, which a tensor core truncates: at most 2 n 2^-24 rho.
- A weight below the type's normal range loses up to its smallest step, in float16 2^-24: n 2^-24 max_j |v_j|.
- Scores that are off by at most d each change P_j by a factor between e^-2d and e^2d, and
  O' - O = sum_j (P'_j - P_j) (v_j - O), so that |O' - O| <= (e^2d - 1) sum_j P_j |v_j - O| <= (e^2d - 1) sigma with
  sigma^2 = rho^2 - |O|^2. With N = scale |q| max_j |k_j|, which no score passes, sums of D products in float32 give
  d <= (2 D + 32) 2^-24 N, and what is added to scores and subtracted from them a part of the row's maximum m. A kernel
  that rounds its scores (their product, its scaling, their sum with a mask) adds 3 u |S_j|, and |S_j| <= |m| + ln n + 2
  for all keys whose weights together are worth a thought. A softcap c adds 2^-10 c (tanh in hardware), or 4 u c.

These are worst cases, not likely ones: where they hold, a correct kernel is never reported, however many rows are
sampled. So no chance of a false alarm has to be chosen, nor any independence of rounding errors be assumed, which
repeated tokens do not have.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec, operand_dtype

_FLOAT32: Final = 2.0**-24
_TF32: Final = 2.0**-11
"""What PyTorch may round float32 operands by, as set_float32_matmul_precision("high") lets it."""


class Allowance(NamedTuple):
    """What a row's bound is made of, beside the row itself."""

    of_values: float
    """part of rho"""
    of_norms: float
    """error of a score, in parts of N"""
    of_maximum: float
    """error of a score, in parts of the row's largest |score|"""
    of_scores: float
    """error of a score, nats"""
    of_largest_value: float
    """part of max |v|"""
    at_least: float


def allowance(dtype: torch.dtype, spec: AttentionSpec, head_dim: int, keys: int) -> Allowance | None:
    """What rounding may do to a call with operands of `dtype` and so many keys; None where nothing is known of how its
    output is computed: with dropout, or by a kernel that rounds in its own way."""
    if spec.dropout_p > 0 or spec.rounds == "unknown":
        return None
    rounded = spec.rounds == "scores" or torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    of_norms, of_maximum, of_scores = (2 * head_dim + 32) * _FLOAT32, 8 * _FLOAT32, 2.0**-14
    if spec.numerics in ("kernel", "paper"):
        operand = operand_dtype(dtype)
        unit = torch.finfo(operand).eps / 2
        smallest = torch.finfo(operand).smallest_normal * torch.finfo(operand).eps
        if rounded:
            of_maximum += 3 * unit
            of_scores += unit * (3 * (math.log(keys) + 2) + 4 * spec.softcap)
    else:
        unit = 2.0**-8 if torch.get_float32_matmul_precision() == "medium" else _TF32
        smallest = 0.0
        of_norms += 2 * unit
    of_scores += 2.0**-10 * spec.softcap
    return Allowance(
        4 * unit + 2 * keys * _FLOAT32, of_norms, of_maximum, of_scores, keys * smallest, head_dim**0.5 * smallest
    )


def distance(
    away: Tensor,
    exact: Tensor,
    row_max: Tensor,
    mean_square: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    value_norm: Tensor,
    scale: float,
    allowed: Allowance,
) -> Tensor:
    """The distance `away` of outputs from their recomputation in parts of what rounding explains; all [...].

    exact: |O| of the recomputation; row_max: of the scores; mean_square: rho^2; query_norm: |q|; key_norm, value_norm:
    the largest of the keys that a row may see. A row whose bound is not finite is at 0, one that holds a NaN at NaN.
    """
    spread = (mean_square - exact.square()).clamp(min=0.0).sqrt()
    off = allowed.of_norms * abs(scale) * query_norm * key_norm + allowed.of_maximum * row_max.abs() + allowed.of_scores
    bound = allowed.of_values * mean_square.sqrt() + allowed.of_largest_value * value_norm + allowed.at_least
    bound = bound + torch.expm1(2 * off) * spread
    return away / bound
