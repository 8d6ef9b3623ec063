"""Attention in plain PyTorch: the reference for tests of the kernels, and the implementation if no kernel is available.

Scores are materialised, so memory grows with Sq * Sk. Matrix products run in fp32 on values rounded as the numerics
say (a bf16 product on a CPU rounds differently from a tensor core's). README.md derives the formulas.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.dropout import kept
from foreshock.kernels.flash_attention.shift import flagged, row_shift
from foreshock.kernels.flash_attention.spec import (
    Arguments,
    AttentionSpec,
    Saved,
    compute_dtype,
    operand_dtype,
    residual_dtype,
    residual_scale,
)
from foreshock.kernels.flash_attention.statistics import (
    Rows,
    accumulate,
    one_margin,
    several_in_bf16,
    several_within,
)
from foreshock.kernels.flash_attention.visibility import hide


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, given: Arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, out_residual, lse and row_max, as `foreshock::attention_forward` (op.py) describes them.

    The second largest scores are an empty tensor [0], because the backward below counts ties from all scores.
    """
    modes, cu_seqlens_q, cu_seqlens_k, _, _, dropout_seed, spec = given
    operand, residual = operand_dtype(query.dtype), residual_dtype(query.dtype, spec.numerics)
    if query.numel() == 0 or key.numel() == 0:
        row_max = torch.full(query.shape[:-1], -math.inf, dtype=compute_dtype(spec.numerics), device=query.device)
        shape = query.shape if spec.residual else torch.Size([0])
        kept_residual = query.new_zeros(shape, dtype=residual)
        return query.new_zeros(query.shape), kept_residual, row_max, row_max.clone(), row_max.new_empty(0)
    wide = compute_dtype(spec.numerics)
    queries, keys, values = (_of_heads(x, query.shape[1], wide) for x in (query, key, value))
    scores = _scores(queries, keys, operand, spec, cu_seqlens_q, cu_seqlens_k).scores
    row_max = scores.amax(-1, keepdim=True)
    shift = row_shift(scores, row_max, modes, operand)
    subtracted = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key has weights 0, not NaN
    if shift is not None:
        subtracted = subtracted + shift
    weights = _exp(scores.sub_(subtracted))
    row_sum = weights.sum(-1, keepdim=True)
    keep = None if dropout_seed is None else kept(dropout_seed, weights.shape, spec.dropout_p)

    def output(multiplied: Tensor, row_sum: Tensor, unnormalised_dtype: torch.dtype) -> Tensor:
        dropped = multiplied if keep is None else multiplied * keep
        divisor = row_sum.masked_fill(row_sum == 0, 1.0) * (1 - spec.dropout_p)
        return _round(_product(dropped, values), unnormalised_dtype) / divisor

    if spec.numerics in ("float64", "float32"):
        exact = output(weights, row_sum, wide)
        out = exact.to(query.dtype)
    elif spec.numerics == "kernel":
        exact = output(_round(weights, operand), row_sum, wide)
        out = exact.to(operand)
    else:
        exact = output(weights, row_sum, wide)
        rounded = _round(weights, operand)
        row_sum = _round(rounded.sum(-1, keepdim=True), operand)
        out = output(rounded, row_sum, operand).to(operand)
    lse, row_max = (subtracted + row_sum.log()).squeeze(-1), row_max.squeeze(-1)
    out_residual = out.new_empty(0, dtype=residual)
    if spec.residual:
        lost = exact - _round(out.to(wide), operand)
        out_residual = (lost * residual_scale(residual)).to(residual)
    return out.to(query.dtype), out_residual, lse, row_max, lse.new_empty(0)


def _exact_delta(modes: Tensor | None, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return the heads whose delta is computed from O before its rounding, bool [H, 1] or [1]."""
    if spec.numerics in ("float64", "float32"):
        return torch.ones(1, dtype=torch.bool, device=device)
    if modes is None:
        return torch.zeros(1, dtype=torch.bool, device=device)
    return (modes & Mode.EXACT_DELTA).bool().view(-1, 1)


def attention_backward(
    grad_out: Tensor, saved: Saved, state: Tensor | None, arguments: Arguments, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; add the statistics of every row to `state` unless it is None.

    grad_lse: the gradient of the log-sum-exp [B, H, Sq]; None means zero.
    """
    (query, key, value, _, _, lse, row_max, _), modes, spec = saved, arguments.modes, arguments.spec
    if query.numel() == 0 or key.numel() == 0:
        if state is not None:
            nothing, never = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.bool)
            keys = torch.zeros((), device=lse.device)
            accumulate(state, Rows(row_max, lse, never, never, never, keys, nothing, nothing))
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    given = _score_gradient(grad_out, saved, state, arguments, grad_lse)
    operand = operand_dtype(query.dtype) if spec.numerics in ("kernel", "paper") else lse.dtype
    score_grad = _round(given.sloped(given.score_grad), operand)
    grad_query = _product(score_grad, given.keys, spec.scale)
    if (corrected := flagged(modes, Mode.ROW_CORRECTED)) is not None:
        heads, defect = corrected.view(-1, 1, 1), given.score_grad.sum(-1, keepdim=True) - given.row_sum
        without_error = _product(score_grad, given.keys) - _row_error(given, score_grad, operand)
        grad_query = torch.where(heads, spec.scale * without_error, grad_query)
        without = given.sloped(given.score_grad - given.weights * defect)
        score_grad = torch.where(heads, _round(without, operand), score_grad)
    grad_key = _product(score_grad.mT, given.queries, spec.scale)
    grad_value = _product(_round(given.dropped, operand).mT, given.grads, 1 / (1 - spec.dropout_p))
    return (
        grad_query.to(query.dtype),
        _of_key_heads(grad_key, key).to(key.dtype),
        _of_key_heads(grad_value, value).to(value.dtype),
    )


def _row_error(given: "_ScoreGradient", rounded: Tensor, operand: torch.dtype) -> Tensor:
    """Return the error of dQ from the error of delta and the rounding of dS, along the row's mean key, [B, H, Sq, D].

    The weights are rounded as in the products and divided by their own sum, so that a vector that all keys share
    cancels exactly.
    """
    weights = _round(given.sloped(given.weights), operand)
    row_sum = weights.sum(-1, keepdim=True)
    row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    defect = given.score_grad.sum(-1, keepdim=True) - given.row_sum
    lost = (rounded - given.sloped(given.score_grad)).sum(-1, keepdim=True)
    # With a softcap, dS sums to zero before the slope: the defect is spread as P times the slope, which sums to less.
    share = (defect + lost) / row_sum if given.slope is None else defect + lost / row_sum
    return share * _product(weights, given.keys)


class _ScoreGradient(NamedTuple):
    weights: Tensor
    """P recomputed from the log-sum-exp, [B, H, Sq, Sk]."""
    dropped: Tensor
    """P with dropped entries set to 0 (not yet divided by 1 - dropout_p)."""
    score_grad: Tensor
    """dS = P * (dP - delta) before the slope of a soft cap, neither scaled nor rounded, [B, H, Sq, Sk]."""
    slope: Tensor | None
    """Derivative of the soft cap at every score."""
    queries: Tensor
    keys: Tensor
    grads: Tensor
    """Operands of the remaining products, as the two fields above, [B, H, S, D]."""
    row_sum: Tensor | float
    """Exact sum of a row of dS: the gradient of its log-sum-exp, [B, H, Sq, 1] or 0."""

    def sloped(self, x: Tensor) -> Tensor:
        return x if self.slope is None else x * self.slope


def _score_gradient(
    grad_out: Tensor, saved: Saved, state: Tensor | None, arguments: Arguments, grad_lse: Tensor | None
) -> _ScoreGradient:
    """First half of the backward: count the statistics and return the factors of dV, dQ and dK."""
    query, key, value, out, out_residual, lse, row_max, _ = saved
    modes, cu_seqlens_q, cu_seqlens_k, _, _, dropout_seed, spec = arguments
    operand, wide = operand_dtype(query.dtype), lse.dtype
    queries, keys, values, grads = (_of_heads(x, query.shape[1], wide) for x in (query, key, value, grad_out))
    delta_bias = -(grads * out_residual.to(wide)).sum(-1) / residual_scale(out_residual.dtype)
    delta_lp = (grads * _round(out, operand).to(wide)).sum(-1)
    delta_hp = delta_lp - delta_bias
    scores, slope, visible_keys = _scores(queries, keys, operand, spec, cu_seqlens_q, cu_seqlens_k)
    if state is not None:
        maximum, scratch = row_max.unsqueeze(-1), torch.empty_like(scores)
        tied_bf16 = several_in_bf16(scores, maximum)
        tied_one = several_within(scores, maximum, one_margin(operand), scratch)
        shift = row_shift(scores, maximum, modes, operand)
        shifted = torch.zeros_like(tied_one) if shift is None else shift > 0
        tied_bf16, tied_one, shifted = (rows.squeeze(-1) for rows in (tied_bf16, tied_one, shifted))
        ties = (tied_bf16, tied_one, shifted)
        finite = out.abs().amax(-1) < math.inf
        accumulate(state, Rows(row_max, lse, *ties, visible_keys, delta_hp, delta_bias, computed_finite=finite))

    weights = _exp(scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)))
    delta = torch.where(_exact_delta(modes, spec, query.device), delta_hp, delta_lp)
    row_sum: Tensor | float = 0.0
    if grad_lse is not None:  # d lse_i / d S_ij = P_ij; a row that sees no key has none
        row_sum = grad_lse.to(wide).masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
        delta = delta - row_sum.squeeze(-1)
    if dropout_seed is None:
        start = -delta.flatten(0, 1).unsqueeze(-1)
        score_grad = torch.baddbmm(start, grads.flatten(0, 1), values.mT.flatten(0, 1)).view(weights.shape)
        score_grad.mul_(weights)
        dropped = weights
    else:
        keep = kept(dropout_seed, weights.shape, spec.dropout_p)
        weight_grad = _product(grads, values.mT, 1 / (1 - spec.dropout_p))
        score_grad = weights * (weight_grad * keep - delta.unsqueeze(-1))
        dropped = weights * keep
    return _ScoreGradient(weights, dropped, score_grad, slope, queries, keys, grads, row_sum)


class _Scores(NamedTuple):
    scores: Tensor
    """Input of the softmax, [B, H, Sq, Sk]; -inf for keys that a query does not see."""
    cap_slope: Tensor | None
    """Derivative of the soft cap at every score, [B, H, Sq, Sk]."""
    visible_keys: Tensor
    """Number of keys that each query sees, [Sq] or []."""


def _scores(
    queries: Tensor,
    keys: Tensor,
    operand: torch.dtype,
    spec: AttentionSpec,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> _Scores:
    scores = _product(queries, keys.mT, spec.scale)
    cap_slope = None
    if spec.softcap > 0:
        squashed = scores.div_(spec.softcap).tanh_()
        cap_slope = 1 - squashed.square()
        scores = squashed * spec.softcap
    if spec.numerics == "paper":
        scores = _round(scores, operand)
    visible_keys = hide(scores, spec, cu_seqlens_q, cu_seqlens_k)
    return _Scores(scores, cap_slope, visible_keys)


def _of_heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Repeat every key head of [B, Hkv, S, D] for each of its query heads: contiguous [B, H, S, D] of `dtype`."""
    return x.to(dtype).repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x.to(dtype).contiguous()


def _of_key_heads(x: Tensor, like: Tensor) -> Tensor:
    """Sum [B, H, S, D] over the query heads of each key head of `like` [B, Hkv, S, D]."""
    return x if x.shape[1] == like.shape[1] else x.view(x.shape[0], like.shape[1], -1, *x.shape[2:]).sum(2)


def _exp(x: Tensor) -> Tensor:
    """exp of x, in place. In fp32 it uses exp2, as the kernels do: on a CPU, torch.exp becomes ten times slower when
    it underflows, but torch.exp2 does not."""
    return x.exp_() if x.dtype == torch.float64 else x.mul_(math.log2(math.e)).exp2_()


def _product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Compute scale * left @ right of [B, H, ., .] in one pass."""
    flat = torch.baddbmm(left.new_zeros(1, 1, 1), left.flatten(0, 1), right.flatten(0, 1), beta=0, alpha=scale)
    return flat.view(*left.shape[:2], *flat.shape[1:])


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to `dtype`, but keep its own dtype."""
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)
