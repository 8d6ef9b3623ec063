"""PyTorch's attention on random inputs of a model's shapes: output and gradients against float64, before a run.

Every row of O and dQ and every column of dK and dV is compared under a bound in its Euclidean norm. The bound of O is
output_check's. With dS = P (dP - delta), whose rounding and that of P is part `a` of each, and delta's error at most
4 u |dO| rho, as of an output that was rounded, the others are

    dQ_i   scale (a sum_j |dS_ij| |k_j| + sum_j P_ij e_i |k_j|),    e_i = 4 u |dO_i| rho_i
    dK_j   scale (a sum_i |dS_ij| |q_i| + sum_i P_ij e_i |q_i|)
    dV_j   a sum_i P_ij |dO_i|
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from foreshock.kernels.flash_attention.output_check import allowance, distance
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.monitor.attention.probed_rows import norms_of

LENGTHS: Final = (1, 7, 129)
"""One key, fewer than any tile holds, and one more than some tiles hold."""


def wrong_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[str]:
    """What of PyTorch's causal attention with these shapes is farther from float64 than rounding explains, in words."""
    found = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        shapes = [(2, count, length, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        query, key, value, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=heads != kv_heads
        )
        given = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        for name, error in _errors(query, key, value, grad, given):
            if not bool((error <= 1).all()):  # NaN too
                worst = float(error.nan_to_num(nan=math.inf).max())
                found.append(f"{name} at length {length}, up to {worst:.3g} times as far as rounding explains")
    return found


def _errors(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, given: tuple[Tensor, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Of output and gradients: the name, and the distance of each row in parts of its bound."""
    groups, (length, dim) = query.shape[1] // key.shape[1], query.shape[2:]
    spec = AttentionSpec(1 / math.sqrt(dim), numerics="float32" if query.dtype == torch.float32 else "kernel")
    allowed = allowance(query.dtype, spec, dim, length)
    assert allowed is not None
    out, grad_query, grad_key, grad_value = (x.double() for x in given)
    q, d = query.double(), grad.double()
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    sizes = [norms_of(x, torch.float64) for x in (q, k, v, d)]  # [B, H, S]
    scores = (q @ k.mT * spec.scale).masked_fill(torch.ones(length, length, device=q.device).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    exact = weights @ v
    mean_square = (weights @ sizes[2].square().unsqueeze(-1)).squeeze(-1)
    largest = [size.amax(-1, keepdim=True) for size in sizes[:3]]
    common = (scores.amax(-1), mean_square, sizes[0], largest[1], largest[2], spec.scale, allowed)
    yield "its output is wrong", distance(norms_of(out - exact, torch.float64), norms_of(exact, torch.float64), *common)
    off = allowed.of_norms * spec.scale * largest[0] * largest[1] + allowed.of_maximum * scores.amax(
        (-1, -2)
    ).abs().unsqueeze(-1)
    part = (allowed.of_values + torch.expm1(2 * (off + allowed.of_scores))).unsqueeze(-1)  # [B, H, 1, 1]
    least = allowed.of_largest_value * largest[1] * largest[2] * sizes[3].amax(-1, keepdim=True) + 1e-30
    both = weights * (d @ v.mT - (d * exact).sum(-1, keepdim=True))
    error = weights * (allowed.of_values * sizes[3] * mean_square.sqrt()).unsqueeze(-1)
    unsure = part * both.abs() + error  # [B, H, S, S]
    of_query = spec.scale * (unsure @ sizes[1].unsqueeze(-1)).squeeze(-1) + allowed.of_values * norms_of(
        grad_query, torch.float64
    )
    yield (
        "its gradient of queries is wrong",
        norms_of(grad_query - spec.scale * both @ k, torch.float64) / (of_query + least),
    )
    for name, theirs, ours, bound in (
        ("keys", grad_key, spec.scale * both.mT @ q, spec.scale * (unsure.mT @ sizes[0].unsqueeze(-1))),
        ("values", grad_value, weights.mT @ d, (part * weights).mT @ sizes[3].unsqueeze(-1)),
    ):

        def of_key_heads(x: Tensor) -> Tensor:
            return x.reshape(len(x), -1, groups, *x.shape[2:]).sum(2)

        limit = of_key_heads(bound).squeeze(-1) + allowed.of_values * norms_of(theirs, torch.float64)
        away = norms_of(theirs - of_key_heads(ours), torch.float64)
        yield f"its gradient of {name} is wrong", away / (limit + of_key_heads(least))
