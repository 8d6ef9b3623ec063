"""Compare rows of the gradients that PyTorch's attention computed with their recomputation.

With P the softmax, dP_ij = dO_i v_j and dS_ij = P_ij (dP_ij - delta_i), the gradient is dQ_i = scale sum_j dS_ij k_j. A
correct kernel differs from that for these reasons, each bounded in the Euclidean norm of the row; u is the unit
roundoff of the operands' type, d the largest error of a score and N the bounds of output_check.py:

- Each weight has an error of a factor between e^-2d and e^2d; P, dP, dS and their product are rounded to the operands'
  type, and sums over n keys are in float32: a |dS_ij| with a = 4 u + 2 n 2^-24 + e^2d - 1.
- dP and delta are sums of D products in float32, with errors of at most c |dO_i| |v_j| and c |dO_i| |O_i|, where
  c = (2 D + 32) 2^-24 (2^-10 more with TF32 operands). dP and delta cancel in dS, but their errors do not:
  P_ij c |dO_i| (|v_j| + |O_i|).
- delta is dO_i O_i, with the rounded O in FlashAttention and related kernels, or with the unrounded O, as the row's sum
  of P dP. Both are correct, so the smaller of the two distances counts.
- A dS below the type's normal range loses up to the type's smallest step, in float16 n 2^-24 max_j |k_j|; dQ is
  rounded, u.

Together, with that step s, |dQ' - dQ| is at most
scale sum_j (a |dS_ij| + P_ij c |dO_i| (|v_j| + |O_i|)) |k_j| + scale n s max_j |k_j| + 4 u |dQ'|.
This is the worst case, so a correct kernel is never reported, for any number of compared rows.

PyTorch's flash attention saves the log-sum-exp L of every row for its backward. That of a sampled row differs from the
recomputed one by at most d because of the scores, and by 2^-11 + (2 n + 4 |L|) 2^-24 because of exponentials, their sum
and its logarithm. L gives P_ij = exp(S_ij - L_i) of all queries for a few keys j, and so
dV_j = sum_i P_ij dO_i and dK_j = scale sum_i dS_ij q_i, with delta of the rounded O. The bounds are those above, with
sums over queries instead of keys: for dV, sum_i (4 u + 2 n 2^-24 + e^2d - 1) P_ij |dO_i| and the rounding of dV. On a
CPU, the kernel adds up parts of _CPU_QUERIES queries in the operands' type, and each addition rounds the sum: another u
per part.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.output_check import allowance
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.monitor.attention.probed_rows import (
    Call,
    chosen_rows,
    norms_of,
    of_rows,
    pieces,
    scores_of,
    times,
    visible_keys,
    wide,
)
from foreshock.monitor.model.executed import saved_by

ROWS: Final = 256
"""Rows per head in a sample that compares gradients."""
KEYS: Final = 8
"""Keys per head, of one batch entry, in a sample that compares gradients."""
_CPU_QUERIES: Final = 32
"""Minimum of queries per part of PyTorch's CPU kernel."""
_LEAST: Final = 1e-30
"""Minimum of the bound, for gradients that are zero: their recomputation is exact."""


class _Expected(NamedTuple):
    """Recomputed gradients of some rows of each head, [e, H, c, D] or [e, H, c]."""

    entries: Tensor
    rows: Tensor
    gradients: tuple[Tensor, Tensor]
    """With delta from the model's own output, and from the recomputed output."""
    bound: Tensor
    """Rounding bound, without the rounding of the gradient itself."""


class _ExpectedKeys(NamedTuple):
    """Recomputed gradients of some keys and values of one batch entry, from index `first` on, in each query head."""

    entry: int
    first: int
    parts: list[tuple[Tensor, Tensor]]
    """The gradient [H, k, D] and its rounding bound [H, k]: of keys, then of values."""


_checks: Final = itertools.count()
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


class GradientCheck:
    """Checks one call: `expect` runs in the backward of the probe, and then `hook` in the backward of the attention.

    node: the autograd node that computes the gradients of the attention's operands. failed: called with an error of the
    hook.
    """

    def __init__(self, state: Tensor, node: Any, failed: Callable[[Exception], None]) -> None:
        self._state, self._failed = state, failed
        self._expected: list[_Expected] = []
        self._keys: _ExpectedKeys | None = None
        self._of_gradient = 0.0
        flash = node.name().startswith("ScaledDotProductFlashAttention")
        self._lse = saved_by(node, "logsumexp") if flash else None
        node.register_hook(self.hook)

    def expect(self, call: Call, tick: Tensor, spec: AttentionSpec) -> None:
        """Compute rows of the gradient from the forward's tensors and the gradient of its output."""
        batch, _, queries, dim = call.query.shape
        allowed = allowance(call.query.dtype, spec, dim, call.key.shape[2])
        self._expected = []
        if allowed is None or spec.softcap > 0:
            return
        self._of_gradient = allowed.of_values
        groups = call.query.shape[1] // call.key.shape[1]
        in_sums = allowed.of_norms * max(1.0, call.value.shape[3] / dim)
        for entries, rows, (scores, *_), keys in pieces(*chosen_rows(tick, ROWS, batch, queries), call, spec, None):
            key, value = (wide(x, entries, spec)[:, :, keys] for x in (call.key, call.value))
            weights = scores.softmax(-1).nan_to_num(nan=0.0)
            query, grad, own = (
                of_rows(x, entries, rows).to(scores.dtype) for x in (call.query, call.grad_out, call.out)
            )
            exact = times(weights, value)
            products = times(grad, value.mT)
            found = [weights * (products - (grad * output).sum(-1, keepdim=True)) for output in (own, exact)]
            key_norms, value_norms = (
                norms_of(x, scores.dtype).repeat_interleave(groups, 1).unsqueeze(2) for x in (key, value)
            )
            off = allowed.of_norms * abs(spec.scale) * norms_of(query, scores.dtype) * key_norms.amax(-1)
            off = off + allowed.of_maximum * scores.amax(-1).abs() + allowed.of_scores
            part = (allowed.of_values + torch.expm1(2 * off)).unsqueeze(-1)
            sums = in_sums * norms_of(grad, scores.dtype).unsqueeze(-1)
            sums = sums * (value_norms + norms_of(own, scores.dtype).unsqueeze(-1))
            unsure = part * torch.maximum(found[0].abs(), found[1].abs()) + weights * sums
            bound = (unsure * key_norms).sum(-1) + allowed.of_largest_value * key_norms.amax(-1)
            own_rounding = abs(spec.scale) * bound + allowed.at_least + _LEAST
            first, second = (times(each, key) * spec.scale for each in found)
            self._expected.append(_Expected(entries, rows, (first, second), own_rounding))
            if self._lse is not None:
                given, lse = of_rows(self._lse.unsqueeze(-1), entries, rows).squeeze(-1), scores.logsumexp(-1)
                sums = 2.0**-11 + (2 * key.shape[2] + 4 * lse.abs()) * 2.0**-24
                self._count((given - lse).abs() / (off + sums))
        if self._lse is not None and call.cu_queries is None:
            self._keys = self._expect_keys(call, spec, self._lse)

    def _expect_keys(self, call: Call, spec: AttentionSpec, saved: Tensor) -> _ExpectedKeys | None:
        """Compute the gradients of some keys and values. saved: the log-sum-exp from the forward, [B, H, Sq]."""
        batch, heads, queries, dim = call.query.shape
        count = min(KEYS, call.key.shape[2])
        allowed = allowance(call.query.dtype, spec, dim, max(queries, call.key.shape[2]))
        if allowed is None:
            return None
        # drawn on the host, which needs the first key's index; spread by the golden ratio
        place = next(_checks) * _GOLDEN % 1.0
        entry, first = int(place * 7919) % batch, int(place * (call.key.shape[2] - count + 1))
        entries = torch.full((1,), entry, device=call.query.device)
        rows = torch.arange(queries, device=call.query.device).unsqueeze(0)
        keys, values = (wide(x, entries, spec)[:, :, first : first + count] for x in (call.key, call.value))
        scores = scores_of(entries, rows, call, keys, visible_keys(rows, call, spec), spec, None, first).scores
        query, grad, own = (x[entries].to(scores.dtype) for x in (call.query, call.grad_out, call.out))
        lse = saved[entries].to(scores.dtype)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -math.inf, 0.0)
        slopes = weights * (times(grad, values.mT) - (grad * own).sum(-1, keepdim=True))
        groups = heads // call.key.shape[1]
        query_norms, grad_norms, own_norms = (norms_of(x, scores.dtype) for x in (query, grad, own))
        value_norms, key_norms = (
            norms_of(x, scores.dtype).repeat_interleave(groups, 1).unsqueeze(2) for x in (values, call.key[entries])
        )
        off = allowed.of_norms * abs(spec.scale) * query_norms * key_norms.amax(-1) + allowed.of_scores
        off = off + allowed.of_maximum * lse.abs()
        parts = -(-queries // _CPU_QUERIES) if call.query.is_cpu else 0
        part = (allowed.of_values * (1 + parts / 4) + torch.expm1(2 * off)).unsqueeze(-1)
        sums = (allowed.of_norms * max(1.0, call.value.shape[3] / dim) * grad_norms).unsqueeze(-1)
        unsure = part * slopes.abs() + weights * sums * (value_norms + own_norms.unsqueeze(-1))
        of_key = abs(spec.scale) * (unsure * query_norms.unsqueeze(-1)).sum(2)
        of_key = of_key + abs(spec.scale) * allowed.of_largest_value * query_norms.amax(-1, keepdim=True)
        of_value = (part * weights * grad_norms.unsqueeze(-1)).sum(2)
        of_value = of_value + allowed.of_largest_value * grad_norms.amax(-1, keepdim=True)
        expected = (spec.scale * slopes.mT @ query, of_key), (weights.mT @ grad, of_value)
        least = allowed.at_least + _LEAST
        return _ExpectedKeys(entry, first, [(exact[0], bound[0] + least) for exact, bound in expected])

    def compare(self, given: Tensor) -> None:
        """Count rows of the attention's own gradient [B, H, Sq, D] whose distance exceeds the rounding bound."""
        expected, self._expected = self._expected, []
        for entries, rows, gradients, bound in expected:
            own = of_rows(given, entries, rows).to(bound.dtype)
            away = torch.minimum(*(norms_of(own - each, bound.dtype) for each in gradients))
            self._count(away / (bound + self._of_gradient * norms_of(own, bound.dtype)))

    def compare_keys(self, gradients: Sequence[Tensor]) -> None:
        """Count rows of the gradients of keys and values [B, H or Hkv, Sk, D] whose distance exceeds the bound. Rows of
        a key head count in each of its query heads."""
        expected, self._keys = self._keys, None
        if expected is None:
            return
        for gradient, (exact, bound) in zip(gradients, expected.parts, strict=True):
            own = gradient[expected.entry, :, expected.first : expected.first + bound.shape[1]].to(bound.dtype)
            groups = len(exact) // len(own)
            exact, bound = (each.view(-1, groups, *each.shape[1:]).sum(1) for each in (exact, bound))
            error = norms_of(own - exact, bound.dtype) / (bound + self._of_gradient * norms_of(own, bound.dtype))
            self._count(error.repeat_interleave(groups, 0).unsqueeze(0))

    def _count(self, error: Tensor) -> None:
        """Count errors [e, H, c], given as fractions of the rounding bound."""
        error = error.masked_fill(~(error.abs() < math.inf), -math.inf)
        self._state[:, Slot.WRONG_GRADIENT_ROWS] += (error > 1).sum((0, 2))
        floats, worst = self._state.view(torch.float64), error.amax((0, 2)).to(torch.float64)
        floats[:, Slot.GRADIENT_ERROR_MAX] = torch.maximum(floats[:, Slot.GRADIENT_ERROR_MAX], worst)

    def hook(self, gradients: Any, _: Any) -> None:
        """Hook of the autograd node, called with the gradients of query, key and value."""
        try:
            with torch.no_grad():
                if gradients[0] is not None:
                    self.compare(gradients[0])
                if gradients[1] is not None and gradients[2] is not None:
                    self.compare_keys(gradients[1:3])
        except Exception as error:
            self._failed(error)
