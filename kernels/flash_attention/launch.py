"""What every kernel of one call of attention is told: sizes, visibility, softcap, dropout; and its tensors."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foreshock.kernels.flash_attention.blocks import blank_tail_kernel
from foreshock.kernels.flash_attention.spec import AttentionSpec

_LOG2E = 1 / math.log(2)


@dataclass(frozen=True)
class Call:
    """One call of attention on [B, H, S, D] tensors, or on packed ones [1, H, total, D]."""

    heads: int
    kv_heads: int
    total_q: int
    total_k: int
    dim: int
    sequences: int
    longest_q: int
    longest_k: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    capability: int
    spec: AttentionSpec

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        spec: AttentionSpec,
    ) -> Self:
        """Raises ValueError with a sentence for layouts that the kernels do not read."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.stride(-1) != 1 and tensor.numel():
                raise ValueError(
                    f"{name} has stride {tensor.stride(-1)} in its last dimension; the kernels read rows of adjacent "
                    f"elements: call .contiguous() on it"
                )
        batch, heads, total_q, dim = query.shape
        if dim % 8 or dim > 256:
            raise ValueError(f"head dim {dim} is not served by the kernels; use a multiple of 8 up to 256")
        packed = cu_seqlens_q is not None
        return cls(
            heads=heads,
            kv_heads=key.shape[1],
            total_q=total_q,
            total_k=key.shape[2],
            dim=dim,
            sequences=cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else batch,
            longest_q=min(max_seqlen_q, total_q) if packed else total_q,
            longest_k=min(max_seqlen_k, key.shape[2]) if packed else key.shape[2],
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            capability=_capability(query.device),
            spec=spec,
        )

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @cached_property
    def block_d(self) -> int:
        """Head dim of a tile: the next power of two."""
        return max(16, 1 << (self.dim - 1).bit_length())

    @cached_property
    def right(self) -> int:
        """Keys visible after the diagonal; -1 for all."""
        if self.spec.causal == "none":
            return int(self.spec.window_right)
        return 0

    @cached_property
    def prescaled(self) -> bool:
        """Scores are multiplied by the scale entry by entry, which a cap or a scale that is not positive needs."""
        return self.spec.softcap > 0 or self.spec.scale <= 0

    @cached_property
    def score_unit(self) -> float:
        """A score as the kernels hold it, times this, is the score."""
        return 1.0 if self.prescaled else self.spec.scale

    @cached_property
    def unit(self) -> float:
        """A score as the kernels hold it, times this, is the score in powers of two."""
        return self.score_unit * _LOG2E

    @cached_property
    def foldable(self) -> bool:
        """Whether the backward may add -lse and -delta to its products before anything else is done to them."""
        return not self.prescaled and self.spec.dropout_p == 0

    @cached_property
    def mean_keys(self) -> int:
        """About how many keys a row sees."""
        length = self.total_k // max(1, self.sequences) if self.packed else self.longest_k
        return length // 2 if self.spec.causal != "none" else length

    @property
    def keep_scale(self) -> float:
        """What the kept entries of P are multiplied by."""
        return 1 / (1 - self.spec.dropout_p)

    @cached_property
    def sizes(self) -> tuple[Any, ...]:
        """The arguments from `heads` to `threshold` of every kernel."""
        spec = self.spec
        return (
            self.heads,
            self.heads // self.kv_heads,
            self.total_q,
            self.total_k,
            self.dim,
            float(spec.scale),
            float(self.unit),
            float(self.score_unit),
            float(spec.softcap),
            spec.window_left,
            self.right,
            self.keep_scale,
            round(spec.dropout_p * 2**32),
        )

    @cached_property
    def switches(self) -> dict[str, Any]:
        """The compile-time arguments that every kernel shares."""
        return {
            "BLOCK_D": self.block_d,
            "DIM_FULL": self.block_d == self.dim,
            "TOP_LEFT": self.spec.causal == "top_left",
            "HAS_LEFT": self.spec.window_left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "PRESCALED": self.prescaled,
            "SOFTCAP": self.spec.softcap > 0,
            "DROPOUT": self.spec.dropout_p > 0,
            "PACKED": self.packed,
        }

    def takes_descriptors(self, *tensors: Tensor) -> bool:
        """Whether Hopper's copy engine can read these tensors: 16-byte aligned and not packed."""
        return self.capability >= 90 and not self.packed and all(_copyable(tensor) for tensor in tensors)

    def rows(
        self, tensor: Tensor, rows: int, descriptor: bool, columns: int | None = None
    ) -> Tensor | TensorDescriptor:
        """`tensor`, or its descriptor for tiles [1, 1, rows, columns], of block_d columns unless given."""
        if not descriptor:
            return tensor
        known = self._descriptors.get((id(tensor), rows))
        if known is None:
            # The stride of a dimension of one element is never used, but must be aligned.
            strides = [s if n > 1 else 8 for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)]
            known = TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns or self.block_d])
            self._descriptors[id(tensor), rows] = known  # which keeps the tensor, and so its id, alive
        return known

    @cached_property
    def _descriptors(self) -> dict[tuple[int, int], TensorDescriptor]:
        return {}

    def blank(self, *tensors: Tensor) -> bool:
        """Zero `tensors` and return True when there is nothing to attend to."""
        if min(self.total_q, self.total_k, self.sequences, self.heads, self.longest_q, self.longest_k) > 0:
            return False
        for tensor in tensors:
            tensor.zero_()
        return True

    def blank_tail(self, cu_seqlens: Tensor | None, *fills: tuple[Tensor, float]) -> None:
        """Fill the rows past the last packed sequence of [1, H, total(, D)] tensors."""
        for tensor, fill in fills:
            dim = tensor.shape[3] if tensor.dim() == 4 else 1
            blank_tail_kernel[(tensor.shape[1],)](
                tensor,
                cu_seqlens,
                self.sequences,
                tensor.shape[2],
                tensor.stride(1),
                tensor.stride(2),
                dim,
                fill,
                ROWS=64,
                BLOCK_D=triton.next_power_of_2(dim),
            )


def _capability(device: torch.device) -> int:
    """Compute capability times ten; 0 without a GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _copyable(tensor: Tensor) -> bool:
    strides = zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    return (
        tensor.element_size() == 2
        and tensor.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % 8 == 0) for stride, size in strides)
    )
