"""What the tensors of one attention call say about its rounding: the measurements of the paper's section 3.3.

delta = rowsum(dO o O) is taken from the rounded O (lp) and from O before its rounding (hp). Its error enters the
gradient of W_Q as a sum of matrices of rank one over the tokens T (equation 2):
dW_Q(lp) - dW_Q(hp) = -scale * sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T].
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import reference
from foreshock.kernels.flash_attention.spec import (
    Arguments,
    AttentionSpec,
    Numerics,
    Saved,
    compute_dtype,
    operand_dtype,
    residual_scale,
)
from foreshock.kernels.flash_attention.statistics import one_margin, several_within
from foreshock.kernels.flash_attention.visibility import hide
from foreshock.lab.training.capture import AttentionCall

_MOST_SCORES: Final = 2**24
"""Scores that are looked at in one batch: whole sequences up to this many, at least one."""
_TOKENS: Final = 24
"""Tokens of a batch whose directions (PK)[T]^T X[T] are compared with each other."""


@dataclass(frozen=True, slots=True)
class Examined:
    """One batch of one layer; float64 on the CPU. H query heads, n sampled tokens."""

    origin: str
    numerics: str
    as_run: str
    """the numerics that the model itself asked for"""
    offset: Tensor
    """mean of lse - log n, [H]"""
    largest_score: Tensor
    """largest |score|, [H]"""
    common_score: Tensor
    """mean over rows of the mean of a row's scores, which softmax cannot see, [H]"""
    common_rms: Tensor
    """root mean square over rows of the same, [H]"""
    output_error: Tensor
    """|O - its float64 truth| over |truth|, [H]"""
    delta_error: Tensor
    """delta_lp - delta_hp, [B, H, S]"""
    by_feature: Tensor
    """sum over rows of dO * (O_lp - O_hp), [H, D]: what each feature of O adds to the summed error"""
    tied: Tensor
    """rows with several P = 1, bool [B, H, S]"""
    weight_error: Tensor | None
    """dW_Q less its float64 truth, with delta plain and exact, [2, H, D, E]; None where X or W_Q are not at hand"""
    weight_norm: Tensor | None
    """Frobenius norm of the true dW_Q, [H]"""
    key_shift: Tensor
    """sum of dK over all keys with delta plain and exact, [2, H, D] (of the head's key head); the truth is zero"""
    mixed_keys: Tensor
    """(PK)[T] of the sampled tokens, [n, H, D]"""
    inputs: Tensor | None
    """X[T] of the sampled tokens, [n, E]"""


def examine(call: AttentionCall, origin: str, numerics: Numerics | None = None) -> Examined:
    """Measure one call after its backward. `numerics` None: the call's own, or the kernel's for wide operands.

    The forward is done again from Q, K, V, on as many sequences as fit. Raises ValueError for a call without dO, with
    dropout, or of packed sequences.
    """
    where = f"layer {call.layer} ({call.name})"
    if call.grad_out is None:
        raise ValueError(f"{where} saw no backward: the loss does not depend on it, or its parameters are frozen")
    if call.packed or call.spec.dropout_p > 0:
        raise ValueError(f"{where} has packed sequences or dropout, whose rows cannot be taken apart; diagnose without")
    own: Numerics = call.spec.numerics if call.spec.numerics in ("kernel", "paper") else "kernel"
    spec = replace(call.spec, numerics=numerics or own)
    heads, length = call.query.shape[1:3]
    kept = max(1, _MOST_SCORES // (heads * length * call.key.shape[2]))
    operand = operand_dtype(call.query.dtype)
    query, key, value, grad = (x[:kept].detach().to(operand) for x in (call.query, call.key, call.value, call.grad_out))
    true = replace(spec, numerics="float64")
    given = Arguments(None, None, None, length, key.shape[2], None, spec)
    exact = given._replace(spec=true)
    saved = Saved(query, key, value, *reference.attention_forward(query, key, value, given))
    out, residual, lse, row_max = saved[3:7]
    grad_query, grad_key = _gradients(grad, saved, given)
    wide = query.double(), key.double(), value.double()
    true_forward = reference.attention_forward(*wide, exact)
    true_query, _ = _gradients(grad.double(), Saved(*wide, *true_forward), exact)
    mixed = reference.attention_forward(wide[0], wide[1], wide[1], exact)[0]

    error = -residual.double() / residual_scale(residual.dtype)
    product = grad.double() * error
    tied, visible_keys, common, largest = _rows(query, key, row_max, spec)
    off = (out.double() - true_forward[0]).square().sum((0, 2, 3)) / true_forward[0].square().sum((0, 2, 3))
    group = heads // key.shape[1]
    shift = grad_key.double().sum((1, 3)).repeat_interleave(group, 1)
    x = _projected_inputs(call)
    x = None if x is None else x[:kept].detach().double()
    weight_error = weight_norm = None
    if x is not None:
        true_weight = torch.einsum("bhsd,bse->hde", true_query[0], x)
        weight_error = torch.einsum("mbhsd,bse->mhde", grad_query.double(), x) - true_weight
        weight_norm = true_weight.flatten(1).norm(dim=1).cpu()
    picks = torch.randperm(len(query) * length, generator=torch.Generator().manual_seed(0))[:_TOKENS].to(query.device)
    return Examined(
        origin=origin,
        numerics=spec.numerics,
        as_run=call.spec.numerics,
        offset=(lse.double() - visible_keys.double().log()).mean((0, 2)).cpu(),
        largest_score=largest.cpu(),
        common_score=common.mean((0, 2)).cpu(),
        common_rms=common.square().mean((0, 2)).sqrt().cpu(),
        output_error=off.sqrt().cpu(),
        delta_error=product.sum(-1).cpu(),
        by_feature=product.sum((0, 2)).cpu(),
        tied=tied.cpu(),
        weight_error=None if weight_error is None else weight_error.cpu(),
        weight_norm=weight_norm,
        key_shift=shift.cpu(),
        mixed_keys=mixed.transpose(1, 2).flatten(0, 1)[picks].cpu(),
        inputs=None if x is None else x.flatten(0, 1)[picks].cpu(),
    )


def broken_part(call: AttentionCall) -> str | None:
    """What of a call is not finite, in words; None where all is."""
    parts = {
        "what enters attention is": (call.query, call.key, call.value),
        "what attention gives is": (call.out,),
        "the gradient that reaches attention is": (call.grad_out,),
    }
    for words, tensors in parts.items():
        if any(x is not None and not bool(x.isfinite().all()) for x in tensors):
            return f"{words} not finite"
    return None


def _gradients(grad: Tensor, saved: Saved, given: Arguments) -> tuple[Tensor, Tensor]:
    """dQ and dK with delta plain and exact, stacked: [2, B, H, S, D] and [2, B, Hkv, S, D]."""
    found = []
    for mode in (Mode.PLAIN, Mode.EXACT_DELTA):
        modes = torch.full((grad.shape[1],), int(mode), dtype=torch.int32, device=grad.device)
        found.append(reference.attention_backward(grad, saved, None, given._replace(modes=modes)))
    return torch.stack([each[0] for each in found]), torch.stack([each[1] for each in found])


def _rows(query: Tensor, key: Tensor, row_max: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows with several P = exp(S - max) that round to 1 in the operands' dtype, bool [B, H, S]; keys that rows see;
    the mean score of each row, [B, H, S]; the largest |score|, [H]."""
    dtype = compute_dtype(spec.numerics)
    scores = spec.scale * (query.to(dtype) @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).to(dtype).mT)
    if spec.softcap > 0:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.numerics == "paper":
        scores = scores.to(query.dtype).to(dtype)
    visible_keys = hide(scores, spec, None, None)
    seen = scores.masked_fill(scores.isneginf(), 0.0).double()
    common, largest = seen.sum(-1) / visible_keys.clamp_min(1), seen.abs().amax((0, 2, 3))
    tied = several_within(scores, row_max.unsqueeze(-1), one_margin(query.dtype), torch.empty_like(scores))
    return tied.squeeze(-1), visible_keys, common, largest


def _projected_inputs(call: AttentionCall) -> Tensor | None:
    """X, if queries are W_Q X (plus a bias) at every position: no rotary, no norm between. None otherwise."""
    x = call.inputs
    if x is None or not x.requires_grad or x.shape[:2] != (call.query.shape[0], call.query.shape[2]):
        return None
    first, last = (_row_of_weight(call.query, x, place) for place in (0, -1))
    if first is None or last is None:
        return None
    return x if torch.allclose(first, last, rtol=1e-3, atol=1e-3 * float(first.abs().max())) else None


def _row_of_weight(query: Tensor, x: Tensor, place: int) -> Tensor | None:
    """How the summed query features at one position depend on the input there, [E]; None where they do not."""
    given = torch.zeros_like(query)
    given[-1, :, place] = 1.0
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(query, x, given, retain_graph=True, allow_unused=True)
    return None if grads[0] is None else grads[0][-1, place].double()
