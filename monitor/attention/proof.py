"""Proves that our kernels compute what a layer's own attention computes, before they are trusted with the layer.

On operands and gradients of the training itself both are computed, forward and backward. On a part of them both are
also compared with the truth, which is the model's own function in float64: our error may be a small multiple of its
own. On all of them they may differ by what the errors on that part allow. The training never sees our result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.kernels.flash_attention import AttentionSpec, flash_attention
from foreshock.monitor.model.discovery import SDPA

CALLS: Final = 2
"""Calls of a layer that must agree."""
TRUTH_LENGTH: Final = 1024
"""Queries and keys of the part that is computed in float64."""
TRUTH_GROUPS: Final = 2
"""Key heads, with their query heads, of that part; of the batch it takes the first entry."""
FACTOR: Final = 4.0
"""Our error may be so many times that of the model's own attention."""

_NAMES: Final = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, dQ, dK, dV"""


@dataclass(slots=True)
class Proof:
    """Of one layer: how often both agreed, and why they may never."""

    calls: int = 0
    reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing left to compare."""
        return self.reason is not None or self.calls >= CALLS

    @property
    def holds(self) -> bool:
        """Whether our kernels may serve the layer."""
        return self.reason is None and self.calls >= CALLS

    def compare(
        self, grad_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> None:
        """Compare one call. Never raises: what cannot be compared is not proven, and says so."""
        if self.done:
            return
        try:
            self._compare(grad_out, out, query, key, value, spec)
        except Exception as error:
            self.reason = f"the comparison failed: {type(error).__name__}: {str(error)[:200]}"

    def _compare(
        self, grad_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> None:
        operands = tuple(x.detach().to(out.dtype) for x in (query, key, value, grad_out))
        if not all(bool(x.isfinite().all()) for x in (*operands, out)):
            return  # nothing to be learned, such as from the first steps of a GradScaler
        difference = difference_from_own(operands, out, spec)
        if difference is None:
            self.calls += 1
        else:
            self.reason = difference


def difference_from_own(operands: tuple[Tensor, ...], out: Tensor, spec: AttentionSpec) -> str | None:
    """How our attention of `operands` (query, key, value and the output's gradient) differs from PyTorch's by more
    than rounding, as a sentence; None where it does not. `out` is what the training used."""
    unit = torch.finfo(out.dtype).eps / 2

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return SDPA(query, key, value, None, 0.0, spec.causal == "top_left", scale=spec.scale, enable_gqa=grouped)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        numerics: Any = spec.numerics
        return flash_attention(query, key, value, causal=spec.causal, scale=spec.scale, numerics=numerics)

    part = _part(*operands)
    with sdpa_kernel(SDPBackend.MATH):
        truth = both_ways(own, *(x.double() for x in part))
    allowed = []
    for name, true, theirs, mine in zip(_NAMES, truth, both_ways(own, *part), both_ways(ours, *part), strict=True):
        size = _norm(true)
        error_theirs, error_mine = (_norm(x.double() - true) for x in (theirs, mine))
        if not bool((error_mine <= FACTOR * error_theirs + 2 * unit * size).all()):
            return (
                f"the {name} of our kernels is off by {_largest(error_mine, size):.2g}, its own by "
                f"{_largest(error_theirs, size):.2g} (relative to float64)"
            )
        allowed.append(FACTOR * (_largest(error_theirs, size) + _largest(error_mine, size)) + 4 * unit)
    whole = both_ways(own, *operands)
    if (far := _farthest(whole[0], out)) > allowed[0]:
        return f"its output differs by {far:.2g} from that of the attention that it seems to call"
    for name, limit, theirs, mine in zip(_NAMES, allowed, whole, both_ways(ours, *operands), strict=True):
        if (far := _farthest(theirs, mine)) > limit:
            return f"the {name} of our kernels differs by {far:.2g} from its own, {limit:.2g} is allowed"
    return None


def _part(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    group = query.shape[1] // key.shape[1]
    heads = min(TRUTH_GROUPS, key.shape[1])
    of_queries, of_keys = (
        [x[:1, :count, :TRUTH_LENGTH] for x in pair]
        for pair, count in (((query, grad_out), heads * group), ((key, value), heads))
    )
    return of_queries[0], *of_keys, of_queries[1]


def both_ways(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor
) -> _Results:
    """Output and gradients of `attention` at these operands."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = attention(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    return out.detach(), *gradients  # type: ignore[return-value]


def _norm(x: Tensor) -> Tensor:
    """Of each head, [B, H]."""
    norm: Tensor = x.double().flatten(2).norm(dim=2)
    return norm


def _largest(error: Tensor, size: Tensor) -> float:
    """The largest relative error of a head; 0 where there is nothing to err about."""
    share = error / size
    return float(torch.where(error == 0, 0.0, share).max())


def _farthest(x: Tensor, y: Tensor) -> float:
    far = _largest(_norm(x.double() - y.double()), _norm(x))
    return math.inf if math.isnan(far) else far
