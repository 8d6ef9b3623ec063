"""What the examined batches say together of one head: sizes, signs and directions of its rounding errors.

lab/diagnosis/anatomy.py measures each batch and gives the equations.
"""

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from foreshock.lab.diagnosis.anatomy import Examined

_SHOWN: Final = 3
"""Positions and features that are named."""
_TINY: Final = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnatomy:
    """One head over all examined batches. Shares are of 1; None where it could not be measured."""

    layer: int
    head: int
    numerics: str
    batches: int
    offset: float
    """mean of lse - log n over the examined rows, nats"""
    one_sidedness: float
    """sum of delta_lp - delta_hp over the sum of absolute values, signed"""
    bias_z: float
    """that sum in standard deviations, each batch counting as one draw"""
    top_positions: list[tuple[int, float]]
    """positions that carry most of sum |delta error|, with their share"""
    top_features: list[tuple[int, float]]
    """features of O that add most to the summed error, with their share of all features' absolute sums"""
    tied_rows: float
    """share of rows with several P = 1"""
    tied_share_of_error: float
    """of sum |delta error|, what tied rows carry"""
    weight_error_plain: float | None
    """|dW_Q - truth| over |truth|, root mean square over batches"""
    weight_error_exact: float | None
    """the same with exact delta"""
    key_shift_plain: float
    """|sum of dK| (exactly zero in truth), root mean square over batches"""
    key_shift_exact: float
    delta_share_of_key_shift: float
    """of the squared sum of dK, what is gone with exact delta"""
    similarity: float
    """mean cosine between the directions (PK)[T]^T X[T] of different tokens; of (PK)[T] alone where X is not at hand"""
    first_direction: float
    """share of the largest eigenvalue of the matrix of cosines"""


def head_anatomy(layer: int, head: int, batches: list[Examined]) -> HeadAnatomy:
    """Join what was measured in several batches. Raises ValueError without any."""
    if not batches:
        raise ValueError(f"layer {layer} head {head} was examined in no batch")
    errors = torch.stack([each.delta_error[:, head] for each in batches])
    sums, size = errors.sum((1, 2)), errors.abs().sum().clamp_min(_TINY)
    tied = torch.stack([each.tied[:, head] for each in batches])
    by_feature = torch.stack([each.by_feature[head] for each in batches]).sum(0).abs()
    shift = torch.stack([each.key_shift[:, head] for each in batches]).norm(dim=-1).square().mean(0).sqrt()
    weight = _weight_errors(batches, head)
    cosines = _cosines(batches, head)
    others = cosines[~torch.eye(len(cosines), dtype=torch.bool)]
    return HeadAnatomy(
        layer=layer,
        head=head,
        numerics=batches[0].numerics,
        batches=len(batches),
        offset=float(torch.stack([each.offset[head] for each in batches]).mean()),
        one_sidedness=float(sums.sum() / size),
        bias_z=float(sums.sum() / sums.square().sum().sqrt().clamp_min(_TINY)),
        top_positions=_top(errors.abs().sum((0, 1))),
        top_features=_top(by_feature),
        tied_rows=float(tied.double().mean()),
        tied_share_of_error=float(errors.abs()[tied].sum() / size),
        weight_error_plain=None if weight is None else float(weight[0]),
        weight_error_exact=None if weight is None else float(weight[1]),
        key_shift_plain=float(shift[0]),
        key_shift_exact=float(shift[1]),
        delta_share_of_key_shift=1 - float(shift[1] / shift[0].clamp_min(_TINY)) ** 2,
        similarity=float(others.mean()),
        first_direction=float(torch.linalg.eigvalsh(cosines)[-1] / len(cosines)),
    )


def _top(parts: Tensor) -> list[tuple[int, float]]:
    shares = parts / parts.sum().clamp_min(_TINY)
    return [(place, float(shares[place])) for place in shares.argsort(descending=True)[:_SHOWN].tolist()]


def _weight_errors(batches: list[Examined], head: int) -> Tensor | None:
    """Relative error of dW_Q with delta plain and exact, [2]."""
    shares = [
        each.weight_error[:, head].flatten(1).norm(dim=1) / each.weight_norm[head]
        for each in batches
        if each.weight_error is not None and each.weight_norm is not None
    ]
    return torch.stack(shares).square().mean(0).sqrt() if shares else None


def _cosines(batches: list[Examined], head: int) -> Tensor:
    """Cosines [n, n] between the directions (PK)[T]^T X[T] of the sampled tokens."""

    def cosines(vectors: list[Tensor]) -> Tensor:
        unit = torch.nn.functional.normalize(torch.cat(vectors), dim=1)
        return unit @ unit.T

    mixed = cosines([each.mixed_keys[:, head] for each in batches])
    if any(each.inputs is None for each in batches):
        return mixed
    return mixed * cosines([cast(Tensor, each.inputs) for each in batches])  # <a b^T, c d^T> = <a, c> <b, d>
