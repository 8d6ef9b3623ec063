"""Attention in plain PyTorch: the truth that every kernel is tested against, and the path where there is no kernel.

Scores are materialised, so memory grows with Sq * Sk. Matrix products run in fp32 on values rounded as the numerics
say (a bf16 product on a CPU rounds differently from a tensor core's). README.md derives what is computed here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.dropout import kept
from foreshock.kernels.flash_attention.shift import row_shift
from foreshock.kernels.flash_attention.spec import (
    AttentionSpec,
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, out_residual, lse and row_max, as `foreshock::attention_forward` (op.py) describes them."""
    operand, residual = operand_dtype(query.dtype), residual_dtype(query.dtype, spec.numerics)
    if query.numel() == 0 or key.numel() == 0:
        row_max = torch.full(query.shape[:-1], -math.inf, dtype=compute_dtype(spec.numerics), device=query.device)
        return query.new_zeros(query.shape), query.new_zeros(query.shape, dtype=residual), row_max, row_max.clone()
    wide, kv_heads = compute_dtype(spec.numerics), key.shape[1]
    queries, keys, values = (_grouped(x, kv_heads, wide) for x in (query, key, value))
    scores = _scores(queries, keys, query.shape, operand, spec, cu_seqlens_q, cu_seqlens_k).scores
    row_max = scores.amax(-1, keepdim=True)
    shift = row_shift(scores, row_max, modes, operand)
    subtracted = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key has weights 0, not NaN
    if shift is not None:
        subtracted = subtracted + shift
    weights = _exp(scores.sub_(subtracted))
    row_sum = weights.sum(-1, keepdim=True)
    keep = None if dropout_seed is None else kept(dropout_seed, weights.shape, spec.dropout_p)

    def output(weights: Tensor, row_sum: Tensor, unnormalised_dtype: torch.dtype) -> Tensor:
        dropped = weights if keep is None else weights * keep
        product = _product(dropped.view(len(values), -1, values.shape[1]), values).view(query.shape)
        divisor = row_sum.masked_fill(row_sum == 0, 1.0) * (1 - spec.dropout_p)
        return _round(product, unnormalised_dtype) / divisor

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
    lse = subtracted + row_sum.log()
    lost = exact - _round(out.to(wide), operand)
    out_residual = (lost * residual_scale(residual)).to(residual)
    return out.to(query.dtype), out_residual, lse.squeeze(-1), row_max.squeeze(-1)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_residual: Tensor,
    lse: Tensor,
    row_max: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the statistics of every row are added to `state` unless it is None."""
    if query.numel() == 0 or key.numel() == 0:
        if state is not None:
            nothing, never = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.bool)
            keys = torch.zeros((), device=lse.device)
            accumulate(state, Rows(row_max, lse, never, never, never, keys, nothing, nothing))
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    weights, score_grad, queries, keys, grads = _score_gradient(
        grad_out, query, key, value, out, out_residual, lse, row_max, state, modes, cu_seqlens_q, cu_seqlens_k,
        dropout_seed, spec,
    )  # fmt: skip
    if spec.numerics in ("kernel", "paper"):
        operand = operand_dtype(query.dtype)
        weights, score_grad = _round(weights, operand), _round(score_grad, operand)
    weights, score_grad = (x.view(len(keys), -1, key.shape[2]) for x in (weights, score_grad))
    grad_query = _product(score_grad, keys, spec.scale)
    grad_key = _product(score_grad.mT, queries, spec.scale)
    grad_value = _product(weights.mT, grads, 1 / (1 - spec.dropout_p))
    return (
        grad_query.view(query.shape).to(query.dtype),
        grad_key.view(key.shape).to(key.dtype),
        grad_value.view(value.shape).to(value.dtype),
    )


def row_sum_defect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, modes: Tensor | None, spec: AttentionSpec
) -> tuple[float, float]:
    """Root mean square of the row sums of dS, which exact arithmetic makes 0: before and after dS itself is rounded."""
    lengths = query.shape[2], key.shape[2]
    outputs = attention_forward(query, key, value, modes, None, None, *lengths, None, spec)
    score_grad = _score_gradient(grad_out, query, key, value, *outputs, None, modes, None, None, None, spec).score_grad
    before, after = (
        x.to(torch.float64).sum(-1).square().mean().sqrt().item()
        for x in (score_grad, _round(score_grad, operand_dtype(query.dtype)))
    )
    return before, after


class _ScoreGradient(NamedTuple):
    weights: Tensor
    """P recomputed from the log-sum-exp, 0 where dropped (not yet divided by 1 - dropout_p), [B, H, Sq, Sk]."""
    score_grad: Tensor
    """dS = P * (dP - delta), neither scaled nor rounded to the operand dtype, [B, H, Sq, Sk]."""
    queries: Tensor
    keys: Tensor
    grads: Tensor
    """The operands of what is left to do, as `_grouped` gives them."""


def _score_gradient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_residual: Tensor,
    lse: Tensor,
    row_max: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> _ScoreGradient:
    """The first half of the backward, with the statistics: what dV, dQ and dK are then products of."""
    operand, kv_heads, wide = operand_dtype(query.dtype), key.shape[1], lse.dtype
    grad = grad_out.contiguous().to(wide)
    delta_bias = -(grad * out_residual.to(wide)).sum(-1) / residual_scale(out_residual.dtype)
    delta_lp = (grad * _round(out, operand).to(wide)).sum(-1)
    delta_hp = delta_lp - delta_bias

    queries, keys, values, grads = (_grouped(x, kv_heads, wide) for x in (query, key, value, grad))
    scores, cap_slope, visible_keys = _scores(queries, keys, query.shape, operand, spec, cu_seqlens_q, cu_seqlens_k)
    if state is not None:
        maximum, scratch = row_max.unsqueeze(-1), torch.empty_like(scores)
        tied_bf16 = several_in_bf16(scores, maximum)
        tied_one = several_within(scores, maximum, one_margin(operand), scratch)
        shift = row_shift(scores, maximum, modes, operand)
        shifted = torch.zeros_like(tied_one) if shift is None else shift > 0
        tied_bf16, tied_one, shifted = (rows.squeeze(-1) for rows in (tied_bf16, tied_one, shifted))
        accumulate(state, Rows(row_max, lse, tied_bf16, tied_one, shifted, visible_keys, delta_hp, delta_bias))

    weights = _exp(scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)))
    if spec.numerics in ("float64", "float32"):
        delta = delta_hp
    elif modes is None:
        delta = delta_lp
    else:
        delta = torch.where((modes & Mode.EXACT_DELTA).bool().view(-1, 1), delta_hp, delta_lp)
    if dropout_seed is None:
        score_grad = torch.baddbmm(-delta.view(*grads.shape[:2], 1), grads, values.mT).view(weights.shape)
        score_grad.mul_(weights)
        dropped = weights
    else:
        keep = kept(dropout_seed, weights.shape, spec.dropout_p)
        weight_grad = _product(grads, values.mT, 1 / (1 - spec.dropout_p)).view(weights.shape)
        score_grad = weights * (weight_grad * keep - delta.unsqueeze(-1))
        dropped = weights * keep
    if cap_slope is not None:
        score_grad.mul_(cap_slope)
    return _ScoreGradient(dropped, score_grad, queries, keys, grads)


class _Scores(NamedTuple):
    scores: Tensor
    """What enters the softmax, [B, H, Sq, Sk]; -inf where a query does not see a key."""
    cap_slope: Tensor | None
    """Derivative of the soft cap at every score, [B, H, Sq, Sk]."""
    visible_keys: Tensor
    """Keys that each query sees, [Sq] or []."""


def _scores(
    queries: Tensor,
    keys: Tensor,
    query_shape: torch.Size,
    operand: torch.dtype,
    spec: AttentionSpec,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> _Scores:
    scores = _product(queries, keys.mT, spec.scale).view(*query_shape[:3], keys.shape[1])
    cap_slope = None
    if spec.softcap > 0:
        squashed = scores.div_(spec.softcap).tanh_()
        cap_slope = 1 - squashed.square()
        scores = squashed * spec.softcap
    if spec.numerics == "paper":
        scores = _round(scores, operand)
    visible_keys = hide(scores, spec, cu_seqlens_q, cu_seqlens_k)
    return _Scores(scores, cap_slope, visible_keys)


def _grouped(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, H, S, D] as contiguous [B * Hkv, H / Hkv * S, D]: query heads that share a key head become rows of it."""
    return x.contiguous().to(dtype).view(x.shape[0] * kv_heads, -1, x.shape[3])


def _exp(x: Tensor) -> Tensor:
    """exp of x, in place. In fp32 by way of exp2, as kernels do: on a CPU torch's exp slows down tenfold where it
    underflows, and its exp2 does not."""
    return x.exp_() if x.dtype == torch.float64 else x.mul_(math.log2(math.e)).exp2_()


def _product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """scale * left @ right, batched, in one pass."""
    return torch.baddbmm(left.new_zeros(1, 1, 1), left, right, beta=0, alpha=scale)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`, kept in its own."""
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)
