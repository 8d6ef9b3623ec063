"""Proves that our kernels compute what a layer's own attention computes, before they are trusted with the layer.

On operands and gradients of the training itself both are computed, forward and backward. On a part of them both are
also compared with the truth, which is the model's own function in float64: our error may be a small multiple of its
own, or, of operands in float64, of what a rounding of them does. On all of them they may differ by what the errors on
that part allow. The training never sees our result.
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
ORDERS: Final = 3
"""Orders of the features that tell the error of float64 itself."""

_NAMES: Final = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, dQ, dK, dV"""


@dataclass(slots=True)
class Proof:
    """Of one layer: how often both agreed, and why they may never."""

    calls: int = 0
    reason: str | None = None
    _like: tuple[Any, ...] = ()
    """What the call was like that was compared whole: its scores and sizes."""
    _allowed: tuple[float, ...] = ()
    """How far the results of such a call may be apart."""

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
        like = (spec, *(x.shape for x in operands))
        if like != self._like or not _agree_at_the_end(operands, out, spec, self._allowed):
            told = difference_from_own(operands, out, spec)
            if isinstance(told, str):
                self.reason = told
                return
            self._like, self._allowed = like, told
        self.calls += 1


def difference_from_own(operands: tuple[Tensor, ...], out: Tensor, spec: AttentionSpec) -> str | tuple[float, ...]:
    """How our attention of `operands` (query, key, value and the output's gradient) differs from PyTorch's by more
    than rounding, as a sentence; where it does not, how far output and gradients may be apart, relative to their norms.
    `out` is what the training used."""
    unit = torch.finfo(out.dtype).eps / 2
    own, ours = _attentions(spec)
    part = _part(*operands)
    with sdpa_kernel(SDPBackend.MATH):
        truth = both_ways(own, *(x.double() for x in part))
        doubt = _doubt(own, part, truth)
    whole_theirs, whole_mine = (both_ways(attention, *operands) for attention in (own, ours))
    if max(x.shape[2] for x in operands) <= TRUTH_LENGTH:
        parts_theirs, parts_mine = (_part(*results) for results in (whole_theirs, whole_mine))
    else:  # keys of the part get a gradient from queries beyond it
        parts_theirs, parts_mine = (both_ways(attention, *part) for attention in (own, ours))
    allowed = []
    for name, true, doubted, theirs, mine in zip(_NAMES, truth, doubt, parts_theirs, parts_mine, strict=True):
        size = _norm(true)
        error_theirs, error_mine = (_norm(x.double() - true) for x in (theirs, mine))
        error_theirs = torch.maximum(error_theirs, doubted)
        if not bool((error_mine <= FACTOR * error_theirs + 2 * unit * size).all()):
            return (
                f"the {name} of our kernels is off by {_largest(error_mine, size):.2g}, its own by "
                f"{_largest(error_theirs, size):.2g} (relative to float64)"
            )
        allowed.append(FACTOR * (_largest(error_theirs, size) + _largest(error_mine, size)) + 4 * unit)
    if (far := _farthest(whole_theirs[0], out)) > allowed[0]:
        return f"its output differs by {far:.2g} from that of the attention that it seems to call"
    for name, limit, theirs, mine in zip(_NAMES, allowed, whole_theirs, whole_mine, strict=True):
        if (far := _farthest(theirs, mine)) > limit:
            return f"the {name} of our kernels differs by {far:.2g} from its own, {limit:.2g} is allowed"
    return tuple(allowed)


def _agree_at_the_end(
    operands: tuple[Tensor, ...], out: Tensor, spec: AttentionSpec, allowed: tuple[float, ...]
) -> bool:
    """Whether both are no farther apart than `allowed` in the last heads of the last entry of the batch: for a call
    like one that was compared whole."""
    key_heads = operands[1].shape[1]
    kept = min(TRUTH_GROUPS, key_heads)
    *last, last_out = (x[-1:, -(kept * x.shape[1] // key_heads) :] for x in (*operands, out))
    theirs, mine = (both_ways(attention, *last) for attention in _attentions(spec))
    pairs = ((theirs[0], last_out), *zip(theirs, mine, strict=True))
    return all(_farthest(a, b) <= limit for (a, b), limit in zip(pairs, (allowed[0], *allowed), strict=True))


def _attentions(spec: AttentionSpec) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """PyTorch's function and ours."""

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return SDPA(query, key, value, None, 0.0, spec.causal == "top_left", scale=spec.scale, enable_gqa=grouped)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        numerics: Any = spec.numerics
        return flash_attention(query, key, value, causal=spec.causal, scale=spec.scale, numerics=numerics)

    return own, ours


def _doubt(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], part: tuple[Tensor, ...], truth: _Results
) -> _Results:
    """How far the truth of each head may be from the truth, [B, H]: nowhere, but for operands in float64 themselves.
    Theirs is as far off as it moves when they move by a rounding and their features come in another order."""
    if part[0].dtype != torch.float64:
        return tuple(torch.zeros_like(_norm(true)) for true in truth)  # type: ignore[return-value]
    random = torch.Generator(part[0].device).manual_seed(1)
    doubt = [torch.zeros_like(_norm(true)) for true in truth]
    for _ in range(ORDERS):
        order = torch.randperm(part[0].shape[3], generator=random, device=part[0].device)
        moved = (x * (1 + x.new_empty(x.shape).normal_(0, torch.finfo(x.dtype).eps, generator=random)) for x in part)
        turned = both_ways(attention, *(x[..., order] for x in moved))
        doubt = [
            torch.maximum(most, _norm(x[..., order.argsort()] - true))
            for most, x, true in zip(doubt, turned, truth, strict=True)
        ]
    return tuple(doubt)  # type: ignore[return-value]


def _part(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first key heads and their query heads in the first entry, of tensors with either."""
    key_heads = min(x.shape[1] for x in tensors)
    kept = min(TRUTH_GROUPS, key_heads)
    return tuple(x[:1, : kept * x.shape[1] // key_heads, :TRUTH_LENGTH] for x in tensors)


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
