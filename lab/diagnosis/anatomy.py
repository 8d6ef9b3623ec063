"""What the tensors of one attention call say about its rounding: the measurements of the paper's section 3.3.

delta = rowsum(dO o O) is taken from the rounded O (lp) and from O before its rounding (hp). Its error enters the
gradient of W_Q as a sum of matrices of rank one over the tokens T (equation 2):
dW_Q(lp) - dW_Q(hp) = -scale * sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T].
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final, cast

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
_MOST_TOKENS: Final = 1024
"""Tokens that are compared in all: every second, third, ... of them where there are more."""


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
    agreement: Tensor
    """mean over rows of sign(dO) * sign(O_lp - O_hp), [H, D]"""
    tied: Tensor
    """rows with several P = 1, bool [B, H, S]"""
    outward: Tensor
    """sum of (O_lp - O_hp) * sign(O) over that of |O_lp - O_hp|, in rows that are not tied and in those that are,
    [2, H]; above 0 O is rounded away from zero; NaN without such rows"""
    weight_error: Tensor | None
    """dW_Q less its float64 truth, with delta plain and exact, [2, H, D, E]; None where X or W_Q are not at hand"""
    weight_norm: Tensor | None
    """Frobenius norm of the true dW_Q, [H]"""
    by_equation: Tensor | None
    """equation 2's dW_Q(lp) - dW_Q(hp), [H, D, E]"""
    key_shift: Tensor
    """sum of dK over all keys with delta plain and exact, [2, H, D] (of the head's key head); the truth is zero"""
    mean_key: Tensor
    """mean of K over all tokens, [H, D] (of the head's key head)"""
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
    out, residual, lse, row_max, _ = reference.attention_forward(query, key, value, given)
    grad_query, grad_key = _gradients(grad, Saved(query, key, value, out, residual, lse, row_max), given)
    wide = query.double(), key.double(), value.double()
    true_forward = reference.attention_forward(*wide, exact)
    true_query, _ = _gradients(grad.double(), Saved(*wide, *true_forward[:4]), exact)
    mixed = reference.attention_forward(wide[0], wide[1], wide[1], exact)[0]

    error = -residual.double() / residual_scale(residual.dtype)
    product = grad.double() * error
    tied, visible_keys, common, largest = _rows(query, key, row_max, spec)
    off = (out.double() - true_forward[0]).square().sum((0, 2, 3)) / true_forward[0].square().sum((0, 2, 3))
    group = heads // key.shape[1]
    shift = grad_key.double().sum((1, 3)).repeat_interleave(group, 1)
    x = _projected_inputs(call)
    x = None if x is None else x[:kept].detach().double()
    weight_error = weight_norm = by_equation = None
    if x is not None:
        true_weight = torch.einsum("bhsd,bse->hde", true_query[0], x)
        weight_error = torch.einsum("mbhsd,bse->mhde", grad_query.double(), x) - true_weight
        weight_norm = true_weight.flatten(1).norm(dim=1).cpu()
        scaled = -spec.scale * product.sum(-1, keepdim=True) * mixed
        by_equation = torch.einsum("bhsd,bse->hde", scaled, x).cpu()
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
        agreement=product.sign().mean((0, 2)).cpu(),
        tied=tied.cpu(),
        outward=_outward(error, out.double(), tied).cpu(),
        weight_error=None if weight_error is None else weight_error.cpu(),
        weight_norm=weight_norm,
        by_equation=by_equation,
        key_shift=shift.cpu(),
        mean_key=wide[1].mean((0, 2)).repeat_interleave(group, 0).cpu(),
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


def _outward(error: Tensor, out: Tensor, tied: Tensor) -> Tensor:
    shares = []
    for rows in (~tied, tied):
        chosen = error * rows.unsqueeze(-1)
        shares.append((chosen * out.sign()).sum((0, 2, 3)) / chosen.abs().sum((0, 2, 3)))
    return torch.stack(shares)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnatomy:
    """One head over all examined batches. Shares are of 1; None where it could not be measured."""

    layer: int
    head: int
    numerics: str
    batches: int
    rows: int
    positions: int
    """tokens of a sequence"""
    features: int
    """head dim"""
    offset: float
    """mean of lse - log n over the examined rows, nats"""
    bias_sum: float
    """sum of delta_lp - delta_hp"""
    one_sidedness: float
    """|sum| over sum of absolute values"""
    bias_z: float
    """sum in standard deviations, each batch counting as one draw"""
    same_sign_batches: float
    """share of the batches whose sum has the sign of the whole"""
    top_positions: list[tuple[int, float]]
    """positions that carry most of sum |delta error|, with their share"""
    top_features: list[tuple[int, float, float]]
    """features of O that add most to the summed error: feature, its share of all features' absolute sums, and the mean
    sign of dO (O_lp - O_hp)"""
    tied_rows: float
    tied_share_of_error: float
    """of sum |delta error|, what tied rows carry"""
    outward_untied: float | None
    outward_tied: float | None
    weight_error_plain: float | None
    """|dW_Q - truth| over |truth|, root mean square over batches"""
    weight_error_exact: float | None
    weight_coherence_plain: float | None
    """|sum of errors|^2 over the sum of |error|^2: 1 where errors of different batches are unrelated, `batches` where
    they are the same"""
    weight_coherence_exact: float | None
    weight_error_rank_one: float | None
    """of the summed error's energy, what its first singular direction holds"""
    equation_2: tuple[float, float] | None
    """cosine between equation 2 and the difference that was found, and its length relative to it"""
    key_shift_plain: float
    """|sum of dK| (exactly zero in truth), root mean square over batches"""
    key_shift_exact: float
    key_shift_coherence_plain: float
    key_shift_coherence_exact: float
    push_plain: float
    """how surely descent moves all keys further along their mean: -(sum of dK) . mean key, the mean over batches in
    standard errors; the truth is zero"""
    push_exact: float
    similarity: float | None
    """mean cosine between the directions (PK)[T]^T X[T] of different tokens of one origin"""
    similarity_across: float | None
    """the same between tokens of different origins (checkpoints)"""
    similarity_mixed_keys: float
    similarity_inputs: float | None
    spectrum: list[float]
    """eigenvalues of the matrix of cosines over their sum, the largest eight"""

    @property
    def delta_share_of_weight_error(self) -> float | None:
        """Of the squared error of dW_Q, what is gone with exact delta."""
        if self.weight_error_plain is None or self.weight_error_exact is None:
            return None
        return 1 - (self.weight_error_exact / max(self.weight_error_plain, 1e-300)) ** 2

    @property
    def delta_share_of_key_shift(self) -> float:
        """Of the squared sum of dK, what is gone with exact delta."""
        return 1 - (self.key_shift_exact / max(self.key_shift_plain, 1e-300)) ** 2


def head_anatomy(layer: int, head: int, batches: list[Examined]) -> HeadAnatomy:
    """Join what was measured in several batches. Raises ValueError without any."""
    if not batches:
        raise ValueError(f"layer {layer} head {head} was examined in no batch")
    errors = torch.stack([each.delta_error[:, head] for each in batches])
    sums, size = errors.sum((1, 2)), errors.abs().sum()
    by_position = errors.abs().sum((0, 1)) / size.clamp_min(1e-300)
    by_feature = torch.stack([each.by_feature[head] for each in batches]).sum(0)
    agreement = torch.stack([each.agreement[head] for each in batches]).mean(0)
    feature_size = by_feature.abs().sum().clamp_min(1e-300)
    tied = torch.stack([each.tied[:, head] for each in batches])
    outward = torch.stack([each.outward[:, head] for each in batches]).nanmean(0)
    shift = torch.stack([each.key_shift[:, head] for each in batches])
    push = -torch.einsum("nmd,nd->nm", shift, torch.stack([each.mean_key[head] for each in batches]))
    cosines, origins, mixed, inputs = cosines_of(batches, head)
    positions = by_position.argsort(descending=True)[:5].tolist()
    features = by_feature.abs().argsort(descending=True)[:5].tolist()
    weights = _weights(batches, head)
    return HeadAnatomy(
        layer=layer,
        head=head,
        numerics=batches[0].numerics,
        batches=len(batches),
        rows=errors.numel(),
        positions=errors.shape[-1],
        features=len(by_feature),
        offset=float(torch.stack([each.offset[head] for each in batches]).mean()),
        bias_sum=float(sums.sum()),
        one_sidedness=float(sums.sum().abs() / size.clamp_min(1e-300)),
        bias_z=float(sums.sum() / sums.square().sum().sqrt().clamp_min(1e-300)),
        same_sign_batches=float((sums.sign() == sums.sum().sign()).double().mean()),
        top_positions=[(place, float(by_position[place])) for place in positions],
        top_features=[
            (place, float(by_feature[place].abs() / feature_size), float(agreement[place])) for place in features
        ],
        tied_rows=float(tied.double().mean()),
        tied_share_of_error=float(errors.abs()[tied].sum() / size.clamp_min(1e-300)),
        outward_untied=_number(outward[0]),
        outward_tied=_number(outward[1]),
        key_shift_plain=float(shift[:, 0].norm(dim=-1).square().mean().sqrt()),
        key_shift_exact=float(shift[:, 1].norm(dim=-1).square().mean().sqrt()),
        key_shift_coherence_plain=_coherence(shift[:, 0]),
        key_shift_coherence_exact=_coherence(shift[:, 1]),
        push_plain=_sureness(push[:, 0]),
        push_exact=_sureness(push[:, 1]),
        similarity=None if cosines is None else _mean(cosines, origins[:, None] == origins),
        similarity_across=None if cosines is None else _number(_mean(cosines, origins[:, None] != origins)),
        similarity_mixed_keys=_mean(mixed, torch.ones_like(mixed, dtype=torch.bool)),
        similarity_inputs=None if inputs is None else _mean(inputs, torch.ones_like(inputs, dtype=torch.bool)),
        spectrum=_spectrum(mixed if cosines is None else cosines),
        **weights,
    )


def _weights(batches: list[Examined], head: int) -> dict[str, Any]:
    found = [
        (each.weight_error[:, head], each.weight_norm[head], each.by_equation[head])
        for each in batches
        if each.weight_error is not None and each.weight_norm is not None and each.by_equation is not None
    ]
    names = ("weight_error_plain", "weight_error_exact", "weight_coherence_plain", "weight_coherence_exact",
             "weight_error_rank_one", "equation_2")  # fmt: skip
    if not found:
        return dict.fromkeys(names)
    error, norm, said = (torch.stack(list(each)) for each in zip(*found, strict=True))
    relative = (error.flatten(2).norm(dim=2) / norm[:, None]).square().mean(0).sqrt()
    difference, energy = error[:, 0] - error[:, 1], torch.linalg.svdvals(error[:, 0].sum(0)).square()
    length = difference.norm().clamp_min(1e-300)
    cosine = (difference * said).sum() / (length * said.norm().clamp_min(1e-300))
    numbers = (
        float(relative[0]),
        float(relative[1]),
        _coherence(error[:, 0]),
        _coherence(error[:, 1]),
        float(energy[0] / energy.sum().clamp_min(1e-300)),
        (float(cosine), float(said.norm() / length)),
    )
    return dict(zip(names, numbers, strict=True))


def cosines_of(batches: list[Examined], head: int) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Cosines [n, n] between the directions (PK)[T]^T X[T] of the sampled tokens, None where X is not at hand; the
    origin of each token, [n]; the cosines between their PK and between their X alone."""
    numbers = {origin: number for number, origin in enumerate(dict.fromkeys(each.origin for each in batches))}
    origins = torch.cat([torch.full((len(each.mixed_keys),), numbers[each.origin]) for each in batches])
    every = -(-len(origins) // _MOST_TOKENS)

    def cosines(vectors: list[Tensor]) -> Tensor:
        unit = torch.nn.functional.normalize(torch.cat(vectors)[::every], dim=1)
        return unit @ unit.T

    origins, mixed = origins[::every], cosines([each.mixed_keys[:, head] for each in batches])
    if any(each.inputs is None for each in batches):
        return None, origins, mixed, None
    inputs = cosines([cast(Tensor, each.inputs) for each in batches])
    return mixed * inputs, origins, mixed, inputs  # <a b^T, c d^T> = <a, c> <b, d>


def _coherence(errors: Tensor) -> float:
    """|sum|^2 over sum of |.|^2, along the first dimension."""
    return float(errors.sum(0).square().sum() / errors.square().sum().clamp_min(1e-300))


def _sureness(draws: Tensor) -> float:
    """The mean in standard errors; NaN for less than two draws."""
    return float(draws.mean() / (draws.std() / math.sqrt(len(draws))).clamp_min(1e-300)) if len(draws) > 1 else math.nan


def _mean(cosines: Tensor, pairs: Tensor) -> float:
    """Mean over the pairs of different tokens; NaN where there is none."""
    return float(cosines[pairs & ~torch.eye(len(cosines), dtype=torch.bool)].mean())


def _spectrum(cosines: Tensor) -> list[float]:
    values = torch.linalg.eigvalsh(cosines).flip(0)
    return [float(value) for value in values[:8] / values.sum()]


def _number(value: Tensor | float) -> float | None:
    return None if math.isnan(float(value)) else float(value)
