"""Attention in plain PyTorch: the truth, and the path where there is no GPU (being written)."""

from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out, out_residual, lse, row_max."""
    raise NotImplementedError


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_residual: Tensor,
    lse: Tensor,
    row_max: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value; counts into state."""
    raise NotImplementedError
