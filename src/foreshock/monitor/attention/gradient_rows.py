"""Rows of the gradient of queries that PyTorch's attention computed, compared with their recomputation.

With P the softmax, dP_ij = dO_i v_j and dS_ij = P_ij (dP_ij - delta_i), the gradient is dQ_i = scale sum_j dS_ij k_j. A
correct kernel differs from that for these reasons, each bounded in the Euclidean norm of the row; u is the unit
roundoff of the operands' type, d the largest error of a score and N the bounds of output_check.py:

- Each weight is off by a factor between e^-2d and e^2d; P, dP, dS and their product are rounded to the operands' type,
  and sums over n keys are in float32: a |dS_ij| with a = 4 u + 2 n 2^-24 + e^2d - 1.
- dP and delta are sums of D products in float32, off by at most c |dO_i| |v_j| and c |dO_i| |O_i|, c = (2 D + 32) 2^-24
  (with TF32 operands 2^-10 more). They cancel in dS, so that this counts in full: P_ij c |dO_i| (|v_j| + |O_i|).
- delta is dO_i O_i with O as it was rounded, in FlashAttention and its kin, or of the unrounded O, as the row's sum of
  P dP is. The smaller of the two distances counts: no kernel is at fault for either.
- A dS below the type's normal range loses up to its smallest step, in float16 n 2^-24 max_j |k_j|; dQ is rounded, u.

Together, with that step s, |dQ' - dQ| is at most
scale sum_j (a |dS_ij| + P_ij c |dO_i| (|v_j| + |O_i|)) |k_j| + scale n s max_j |k_j| + 4 u |dQ'|.
This is the worst case, so no correct kernel is ever reported, however many rows are compared.
"""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.output_check import allowance
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.monitor.attention.probed_rows import Call, chosen_rows, norms_of, of_rows, pieces, times, wide

ROWS: Final = 256
"""Of each head, in a sample that compares gradients."""
_LEAST: Final = 1e-30
"""Of a gradient that is zero: the recomputation is exact."""


class _Expected(NamedTuple):
    """Of some rows of each head, [e, H, c, D] or [e, H, c]."""

    entries: Tensor
    rows: Tensor
    gradients: tuple[Tensor, Tensor]
    """With delta of the model's own output, and of the one computed again."""
    bound: Tensor
    """What rounding explains, but the rounding of the gradient itself."""


class GradientCheck:
    """One call: `expect` in the backward of the probe, which comes first, then `compare` in that of the attention."""

    def __init__(self, state: Tensor) -> None:
        self._state = state
        self._expected: list[_Expected] = []
        self._of_gradient = 0.0

    def expect(self, call: Call, tick: Tensor, spec: AttentionSpec) -> None:
        """Compute rows of the gradient from what the forward left and from the gradient of its output."""
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

    def compare(self, given: Tensor) -> None:
        """Count rows of the attention's own gradient [B, H, Sq, D] that are farther away than rounding explains."""
        expected, self._expected = self._expected, []
        for entries, rows, gradients, bound in expected:
            own = of_rows(given, entries, rows).to(bound.dtype)
            away = torch.minimum(*(norms_of(own - each, bound.dtype) for each in gradients))
            error = away / (bound + self._of_gradient * norms_of(own, bound.dtype))
            finite = error.abs() < math.inf
            error = error.masked_fill(~finite, -math.inf)
            self._state[:, Slot.WRONG_GRADIENT_ROWS] += (error > 1).sum((0, 2))
            floats, worst = self._state.view(torch.float64), error.amax((0, 2)).to(torch.float64)
            floats[:, Slot.GRADIENT_ERROR_MAX] = torch.maximum(floats[:, Slot.GRADIENT_ERROR_MAX], worst)

    def hook(self, gradients: Any, _: Any) -> None:
        """For the node of autograd that computes the gradients of an attention's operands, the queries' first."""
        if gradients[0] is not None:
            with torch.no_grad():
                self.compare(gradients[0])
