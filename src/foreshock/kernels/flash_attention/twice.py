"""Attention gradients that can be differentiated again, or computed for many output gradients at once.

The gradients of foreshock's backward kernels cannot be differentiated. If autograd needs that (`create_graph`, or a
batch of gradients under vmap), PyTorch's plain attention computes the same function of the same operands instead.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.kernels.flash_attention.spec import AttentionSpec

_sdpa = torch.nn.functional.scaled_dot_product_attention  # saved here because libraries rebind the name


def is_asked(grad_out: Tensor) -> bool:
    """Whether the backward of `grad_out` has to be differentiable."""
    functorch = torch._C._functorch
    return (
        torch.is_grad_enabled() or functorch.is_batchedtensor(grad_out) or functorch.is_legacy_batchedtensor(grad_out)
    )


def differentiable_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    *,
    packed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return differentiable gradients of query [B, H, Sq, D] and of key and value [B, Hkv, Sk, D].

    Raises RuntimeError for a window, a softcap, dropout, packed sequences, different lengths under bottom_right, and
    a gradient of the log-sum-exp.
    """
    aligned = spec.causal != "bottom_right" or query.shape[2] == key.shape[2]
    plain = not (packed or spec.softcap or spec.dropout_p or max(spec.window_left, spec.window_right) >= 0)
    if not plain or not aligned or grad_lse is not None:
        raise RuntimeError(
            "foreshock's attention does not support second derivatives (create_graph=True, or many gradients at once) "
            "with a window, a softcap, dropout, packed sequences, a bottom-right diagonal or a gradient of the "
            "log-sum-exp; watch this model with attention='keep'"
        )
    followed = torch.is_grad_enabled()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = _sdpa(q, k, v, is_causal=spec.causal != "none", scale=spec.scale, enable_gqa=grouped)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out.to(out.dtype), create_graph=followed)
    return dq, dk, dv
