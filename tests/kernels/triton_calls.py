"""Helpers of the Triton suite: random inputs, one forward and backward, float64 results, and PyTorch's results."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, new_state, reference
from foreshock.kernels.flash_attention.spec import Arguments, Saved
from foreshock.kernels.flash_attention.triton_kernels import backward, forward

INTERPRETED = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
"""Marks of modules whose kernels run in Triton's interpreter on machines without a GPU."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ON_HOPPER = [
    pytest.mark.skipif(
        not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
    ),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports TorchScript
]
"""Marks of modules that need a GPU of compute capability 9.0."""


class Inputs(NamedTuple):
    """query [B, H, Sq, D], key and value [B, Hkv, Sk, D], gradient of O [B, H, Sq, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


class Outputs(NamedTuple):
    """The results of one forward and backward; state is int64 [H, SLOT_COUNT]."""

    out: Tensor
    residual: Tensor
    lse: Tensor
    row_max: Tensor
    second: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    state: Tensor

    def counts(self, slot: Slot) -> list[float]:
        """One statistic of every head."""
        return slot_values(self.state.cpu().numpy(), slot).tolist()  # type: ignore[no-any-return]


def random_inputs(
    length_q: int,
    length_k: int,
    dim: int = 32,
    heads: int = 2,
    kv_heads: int = 2,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, length: int) -> Tensor:
        return torch.randn(batch, rows, length, dim, generator=generator).to(dtype).to(DEVICE)

    return Inputs(draw(heads, length_q), draw(kv_heads, length_k), draw(kv_heads, length_k), draw(heads, length_q))


def scaled(dim: int, **options: object) -> AttentionSpec:
    """A spec with the usual scale unless given."""
    return AttentionSpec(**({"scale": dim**-0.5} | options))


def attend(
    inputs: Inputs,
    spec: AttentionSpec,
    modes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seed: Tensor | None = None,
    by_reference: bool = False,
    longest: tuple[int, int] | None = None,
    grad_lse: Tensor | None = None,
) -> Outputs:
    """Forward and backward by the Triton kernels, or by the reference."""
    query, key, value, grad = inputs
    lengths = longest or (query.shape[2], key.shape[2])
    given = Arguments(modes, cu_seqlens_q, cu_seqlens_k, *lengths, seed, spec)
    outputs = (reference if by_reference else forward).attention_forward(query, key, value, given)
    state = new_state(query.shape[1], query.device)
    saved = Saved(query, key, value, *outputs)
    grads = (reference if by_reference else backward).attention_backward(grad, saved, state, given, grad_lse)
    return Outputs(*saved[3:8], grads[0], grads[1], grads[2], state)


def attend_by_reference(inputs: Inputs, spec: AttentionSpec, **options: object) -> Outputs:
    """The same call by the reference."""
    return attend(inputs, spec, by_reference=True, **options)  # type: ignore[arg-type]


def truth(inputs: Inputs, spec: AttentionSpec, **options: object) -> Outputs:
    """The same call in float64 throughout."""
    exact = AttentionSpec(
        spec.scale, spec.causal, spec.window_left, spec.window_right, spec.softcap, spec.dropout_p, numerics="float64"
    )
    return attend_by_reference(Inputs(*(x.double() for x in inputs)), exact, **options)


def hidden(spec: AttentionSpec, length_q: int, length_k: int) -> Tensor:
    """The masked pairs of query and key, bool [Sq, Sk], implemented independently for the tests."""
    offset = 0 if spec.causal == "top_left" else length_k - length_q
    distance = torch.arange(length_k)[None] - torch.arange(length_q)[:, None] - offset
    seen = torch.ones_like(distance, dtype=torch.bool)
    if spec.causal != "none":
        seen &= distance <= 0
    if spec.window_right >= 0:
        seen &= distance <= spec.window_right
    if spec.window_left >= 0:
        seen &= distance >= -spec.window_left
    return ~seen.to(DEVICE)


def pytorch_own(inputs: Inputs, spec: AttentionSpec) -> list[Tensor]:
    """O, dQ, dK, dV by PyTorch operators in the dtype of the inputs; promise K1 allows twice their error."""
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs[:3])
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    mask = hidden(spec, query.shape[2], key.shape[2])
    weights = scores.masked_fill(mask, -math.inf).softmax(-1).masked_fill(mask, 0.0)
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), inputs.grad)]


def flags(*modes: Mode) -> Tensor:
    return torch.tensor([int(mode) for mode in modes], dtype=torch.int32, device=DEVICE)


def largest_error(given: Tensor, exact: Tensor) -> float:
    return (given.double() - exact.double()).abs().max().item()


BY_BOTH = pytest.mark.parametrize("attention", [attend, attend_by_reference], ids=["kernels", "reference"])
"""Runs a test with the kernels and with the reference."""
