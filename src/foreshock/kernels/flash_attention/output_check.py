"""Bound the distance between an attention's output and its recomputation: the largest one that rounding explains.

O = sum_j P_j v_j is computed again from the same q, k and v. A correct kernel differs from that for four reasons, each
bounded in the Euclidean norm of the row; u is the unit roundoff of the operands' type, rho^2 = sum_j P_j |v_j|^2:

- P is rounded to the operands' type, both by the kernel and here. O is rounded; the kernel may approximate exp by a
  polynomial (FlashAttention 4, 2^-13) or merge O from parts. Each error is at most u sum_j P_j |v_j| <= u rho, so the
  sum of the four is at most 4 u rho.
- Sums over n keys in float32, which a tensor core truncates: at most 2 n 2^-24 rho.
- A weight below the type's normal range loses up to the type's smallest step, 2^-24 in float16: n 2^-24 max_j |v_j|.
- Scores with an error of at most d each change P_j by a factor between e^-2d and e^2d, and
  O' - O = sum_j (P'_j - P_j) (v_j - O), so that |O' - O| <= (e^2d - 1) sum_j P_j |v_j - O| <= (e^2d - 1) sigma with
  sigma^2 = rho^2 - |O|^2. No score exceeds N = scale |q| max_j |k_j|, so sums of D products in float32 give
  d <= (2 D + 32) 2^-24 N; adding a mask and subtracting the row's maximum m give an error proportional to m. A kernel
  that rounds its scores (the product, its scaling, the sum with a mask) adds 3 u |S_j|, and |S_j| <= |m| + ln n + 2
  for all keys except those with negligible total weight. A softcap c adds 2^-10 c (tanh in hardware), or 4 u c.

These are worst cases, not typical ones: if they hold, a correct kernel is never reported, for any number of sampled
rows. So this check needs neither a false-alarm rate nor independent rounding errors; with repeated tokens, rounding
errors are not independent.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec, operand_dtype

_FLOAT32: Final = 2.0**-24
_TF32: Final = 2.0**-11
"""Unit roundoff of TF32, to which PyTorch rounds float32 operands under set_float32_matmul_precision("high")."""


class Allowance(NamedTuple):
    """Coefficients of the bound that are the same for all rows of a call."""

    of_values: float
    """Error of the output, in units of rho."""
    of_norms: float
    """Error of a score, in units of N."""
    of_maximum: float
    """Error of a score, in units of the row's largest |score|."""
    of_scores: float
    """Error of a score, in nats."""
    of_largest_value: float
    """Error of the output, in units of max |v|."""
    at_least: float
    """Constant error of the output."""


def allowance(dtype: torch.dtype, spec: AttentionSpec, head_dim: int, keys: int) -> Allowance | None:
    """Return the allowed rounding error of a call with operands of `dtype` and this number of keys.

    None if the output has no known bound: with dropout, or if the kernel's rounding is unknown.
    """
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
    """Return the distance `away` between outputs and their recomputation as a fraction of the bound; all [...].

    exact: |O| of the recomputation; row_max: largest score; mean_square: rho^2; query_norm: |q|; key_norm, value_norm:
    largest |k| and |v| among the keys that a row may see. Returns 0 if the bound is infinite, and NaN for a row with a
    NaN.
    """
    spread = (mean_square - exact.square()).clamp(min=0.0).sqrt()
    off = allowed.of_norms * abs(scale) * query_norm * key_norm + allowed.of_maximum * row_max.abs() + allowed.of_scores
    bound = allowed.of_values * mean_square.sqrt() + allowed.of_largest_value * value_norm + allowed.at_least
    bound = bound + torch.expm1(2 * off) * spread
    return away / bound
