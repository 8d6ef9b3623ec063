"""What the examined batches say together of one head: sizes, signs and directions of its rounding errors.

lab/diagnosis/anatomy.py measures each batch and gives the equations.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from foreshock.lab.diagnosis.anatomy import Examined

_MOST_TOKENS: Final = 1024
"""Tokens that are compared in all: every second, third, ... of them where there are more."""


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
