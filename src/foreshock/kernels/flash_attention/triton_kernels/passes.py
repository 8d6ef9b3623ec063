"""What the forward writes, what the passes of the backward read, and what one leaves for the others."""

from typing import NamedTuple

from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config

Grads = tuple[Tensor, Tensor, Tensor]
"""dQ, dK and dV."""
Outputs = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]
"""Of a forward: out, what rounding took from it, lse, largest and second largest score of each row; None: not kept."""


class Tensors(NamedTuple):
    """What the passes read, as `foreshock::attention_backward` describes it (op.py)."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    residual: Tensor | None
    lse: Tensor
    row_max: Tensor
    second: Tensor | None
    """None, as the residual, in the benchmark's plain variant alone."""
    state: Tensor | None
    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    grad_lse: Tensor | None = None
    """fp32 [B, H, Sq]: the gradient of the log-sum-exp, to which every row of dS sums; None means 0."""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of both passes, which take them tile by tile."""
        return self.query, self.key, self.value, self.grad_out

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, value and grad_out."""
        return self.query.stride(), self.key.stride(), self.value.stride(), self.grad_out.stride()


Vector = Tensor | int
"""A tensor, or its address alone, which is all that a remembered launch looks at."""


class RowVectors(NamedTuple):
    """What one pass leaves for the others, of every row [B, H, Sq]; all in one piece of memory."""

    log2_lse: Vector
    delta: Vector
    bias: Vector
    """Delta's, fp32 as the two before it."""
    folded: Vector | None
    """bf16 [B * H, 1, Sq, 8]: -lse / unit and -delta as three summands each, read as the first half of 16; None where
    they cannot be folded."""
    done: Vector | None
    """int32 [H]: programs of a head that have counted; None where nothing is counted, as the next."""
    partial: Vector | None
    """int64 [planes, SLOT_COUNT, blocks of COUNT_ROWS rows]: what each program counts."""
    memory: Tensor


def settled(call: Call, config: Config, given: Tensors) -> Config:
    """The configuration as these tensors allow it."""
    return config.fitted(config.tma and call.takes_descriptors(given.query, given.key, given.value, given.grad_out))
