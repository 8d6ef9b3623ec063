"""What the passes of the backward read, and what one leaves for the others."""

from typing import Any, NamedTuple

from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.tuning import Config


class Tensors(NamedTuple):
    """What the passes read, as `foreshock::attention_backward` describes it (op.py)."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    residual: Tensor | None
    """None in the benchmark's plain variant alone."""
    lse: Tensor
    row_max: Tensor
    state: Tensor | None
    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    mean_keys: Tensor | None = None
    """The mean key of each plane (means.py), where a head asks; None without modes."""

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, value and grad_out."""
        return self.query.stride(), self.key.stride(), self.value.stride(), self.grad_out.stride()


class RowVectors(NamedTuple):
    """What one pass leaves for the others, of every row [B, H, Sq]."""

    log2_lse: Tensor
    delta: Tensor
    bias: Tensor
    """Delta's, fp32 as the two before it."""
    common: Tensor | None
    """fp32: what the mean key adds to every score of a row, 0 for heads that do not ask; None without modes."""
    factors: Tensor | None
    """fp32 [B, H, Sq, 2]: what finds ties (ties.py); None where nothing is counted, as the next two."""
    large: Tensor | None
    """int8 [planes, blocks]: blocks of rows, some of whose maxima are too large or too small for `factors`."""
    codes: Tensor | None
    """int16, from the dQ pass: how many scores tie (ties.py); 2^14 more where the paper's rule shifted."""
    folded: Tensor | None
    """bf16 [B * H, 1, Sq, 16]: -lse / unit and -delta as three summands each; None where they cannot be folded."""


class Tiles(NamedTuple):
    """The tensors that a pass takes tile by tile, or their descriptors, which cost the host as much as a launch."""

    tma: bool
    query: Any
    key: Any
    value: Any
    grad_out: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """All four."""
        return self[1:]


def tiles_of(call: Call, config: Config, given: Tensors) -> Tiles:
    """As one configuration cuts them."""
    tma = config.tma and call.takes_descriptors(given.query, given.key, given.value, given.grad_out)
    return Tiles(
        tma,
        call.rows(given.query, config.block_m, tma),
        call.rows(given.key, config.block_n, tma),
        call.rows(given.value, config.block_n, tma),
        call.rows(given.grad_out, config.block_m, tma),
    )
