"""Errors of dW_Q and of the row sums of dS by rounding, in each mode, against float64, by the size of a common key.

The reference computes them. Queries, keys and values are independent noise; all queries and keys share a direction,
which makes the offset, and all values share another. dW_Q = sum over tokens of dq_t x_t^T for random inputs x.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import AttentionSpec, Numerics, reference
from foreshock.kernels.flash_attention.shift import flagged
from foreshock.kernels.flash_attention.spec import Arguments, Saved, operand_dtype


class RowError(NamedTuple):
    """The errors of one mode."""

    weight: float
    """Norm of the error of dW_Q over its norm."""
    row_sum: float
    """Root mean square of the row sums of dS after rounding, as multiplied for dK; 0 in exact arithmetic."""
    key_sum: float
    """Norm of dK summed over tokens, which trains a key bias, over the norm of dK; 0 in exact arithmetic."""


def problem(offset: float, seed: int = 0, length: int = 256, dim: int = 64, shared_value: float = 2.0) -> list[Tensor]:
    """query, key, value, gradient [2, 1, length, dim] in bf16, and the inputs x [2, length, 128]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (2, 1, length, dim)
    common = draw(dim)
    common = common / common.norm()
    query = draw(*shape) + 4 * common
    key = draw(*shape) + common * offset * math.sqrt(dim) / 4
    value = draw(*shape) + shared_value * draw(dim)
    return [*(x.bfloat16() for x in (query, key, value, draw(*shape))), draw(2, length, 128)]


def row_error(inputs: list[Tensor], mode: Mode, numerics: Numerics) -> RowError:
    """The errors of one mode with a causal mask, against float64."""
    query, key, value, grad = inputs[:4]
    modes = torch.full((query.shape[1],), int(mode), dtype=torch.int32)
    spec = AttentionSpec(query.shape[3] ** -0.5, "top_left", numerics=numerics)
    grad_query, grad_key = _gradients(inputs, modes, spec)
    weight, key_sum = _against_truth(inputs, grad_query, grad_key)
    return RowError(weight, row_sum_defect(grad, query, key, value, modes, spec)[1], key_sum)


def _gradients(inputs: list[Tensor], modes: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """dQ and dK of the reference."""
    query, key, value, grad = inputs[:4]
    given = Arguments(modes, None, None, query.shape[2], key.shape[2], None, spec)
    saved = Saved(query, key, value, *reference.attention_forward(query, key, value, given))
    grad_query, grad_key, _ = reference.attention_backward(grad, saved, None, given)
    return grad_query, grad_key


def _against_truth(inputs: list[Tensor], grad_query: Tensor, grad_key: Tensor) -> tuple[float, float]:
    """The error of dW_Q, and dK summed over tokens, both relative."""
    exact = AttentionSpec(inputs[0].shape[3] ** -0.5, "top_left", numerics="float64")
    modes = torch.zeros(inputs[0].shape[1], dtype=torch.int32)
    truth, _ = _gradients([x.double() for x in inputs], modes, exact)
    wanted, given = (torch.einsum("bhsd,bse->de", dq.double(), inputs[4].double()) for dq in (truth, grad_query))
    grad_key = grad_key.double()
    key_sum = grad_key.sum((0, 1, 2)).norm() / grad_key.norm()
    return ((given - wanted).norm() / wanted.norm()).item(), key_sum.item()


def mean_error(offset: float, mode: Mode, numerics: Numerics, seeds: int = 4) -> RowError:
    """The mean over `seeds` seeds."""
    found = [row_error(problem(offset, seed), mode, numerics) for seed in range(seeds)]
    return RowError(*(sum(column) / seeds for column in zip(*found, strict=True)))


def row_sum_defect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, modes: Tensor | None, spec: AttentionSpec
) -> tuple[float, float]:
    """Root mean square of the row sums of dS, before and after dS is rounded; 0 in exact arithmetic.

    The rounded dS is that of the dK, dV pass, after any row correction.
    """
    arguments = Arguments(modes, None, None, query.shape[2], key.shape[2], None, spec)
    outputs = reference.attention_forward(query, key, value, arguments)
    given = reference._score_gradient(grad_out, Saved(query, key, value, *outputs), None, arguments, None)
    score_grad = given.score_grad
    if (corrected := flagged(modes, Mode.ROW_CORRECTED)) is not None:
        without = score_grad - given.weights * score_grad.sum(-1, keepdim=True)
        score_grad = torch.where(corrected.view(-1, 1, 1), without, score_grad)
    before, after = (
        x.to(torch.float64).sum(-1).square().mean().sqrt().item()
        for x in (score_grad, reference._round(score_grad, operand_dtype(query.dtype)))
    )
    return before, after
