"""The forward's outputs, the inputs of the backward's passes, and the vectors that one pass writes for the others."""

from typing import NamedTuple

from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config

Grads = tuple[Tensor, Tensor, Tensor]
"""dQ, dK and dV."""
Outputs = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]
"""A forward's out, rounding residual, lse, and each row's largest and second largest score; None: not stored."""


class Tensors(NamedTuple):
    """Inputs of the passes; `foreshock::attention_backward` describes them (op.py)."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    residual: Tensor | None
    lse: Tensor
    row_max: Tensor
    second: Tensor | None
    """None, like the residual, only in the benchmark's plain variant."""
    state: Tensor | None
    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    grad_lse: Tensor | None = None
    """fp32 [B, H, Sq]: the gradient of the log-sum-exp, which is the sum of a row of dS; None means 0."""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs that both passes load tile by tile."""
        return self.query, self.key, self.value, self.grad_out

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Strides of query, key, value and grad_out."""
        return self.query.stride(), self.key.stride(), self.value.stride(), self.grad_out.stride()


Vector = Tensor | int
"""A tensor, or only its address, which is all that a cached launch needs."""


class RowVectors(NamedTuple):
    """Vectors that the rows pass writes for the others, [B, H, Sq] each; all in one allocation."""

    log2_lse: Vector
    delta: Vector
    bias: Vector
    """The delta bias; fp32, like the two vectors above."""
    folded: Vector | None
    """bf16 [B * H, 1, Sq, 8]: -lse / unit and -delta as three summands each, loaded as the first 8 of 16 columns; None
    if the call is not `foldable`."""
    done: Vector | None
    """int32 [H]: number of a head's programs that finished counting; None, like `partial`, without statistics."""
    partial: Vector | None
    """int64 [planes, SLOT_COUNT, blocks of COUNT_ROWS rows]: the statistics of each program."""
    memory: Tensor


def settled(call: Call, config: Config, given: Tensors) -> Config:
    """Return the configuration, without the copy engine if it cannot read these tensors."""
    return config.fitted(config.tma and call.takes_descriptors(given.query, given.key, given.value, given.grad_out))
