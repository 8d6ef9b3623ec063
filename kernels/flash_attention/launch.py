"""What every kernel of one call of attention is told: sizes, visibility, softcap, dropout; and its launch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foreshock.kernels.flash_attention.blocks import blank_tail_kernel
from foreshock.kernels.flash_attention.spec import Arguments, AttentionSpec

_LOG2E = 1 / math.log(2)
_GPU: Final = torch.cuda.is_available()


class Compiled(NamedTuple):
    """What every kernel of one call is compiled for: its argument SPEC."""

    BLOCK_D: int
    """Head dim of a tile: the next power of two."""
    DIM_FULL: bool
    """That power is the head dim itself."""
    TOP_LEFT: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    """A bound of what a query sees on either side."""
    PRESCALED: bool
    """Scores are multiplied by the scale entry by entry, which a cap or a scale that is not positive needs."""
    SOFTCAP: bool
    DROPOUT: bool
    PACKED: bool


def compiled_for(spec: AttentionSpec, dim: int, packed: bool) -> Compiled:
    """As which the kernels are compiled for attention of this head dim."""
    block_d = max(16, 1 << (dim - 1).bit_length())
    return Compiled(
        BLOCK_D=block_d,
        DIM_FULL=block_d == dim,
        TOP_LEFT=spec.causal == "top_left",
        HAS_LEFT=spec.window_left >= 0,
        HAS_RIGHT=spec.right >= 0,
        PRESCALED=spec.softcap > 0 or spec.scale <= 0,
        SOFTCAP=spec.softcap > 0,
        DROPOUT=spec.dropout_p > 0,
        PACKED=packed,
    )


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
    packed: bool
    capability: int
    spec: AttentionSpec

    @cached_property
    def compiled(self) -> Compiled:
        """What the kernels of this call are compiled for."""
        return compiled_for(self.spec, self.dim, self.packed)

    @cached_property
    def block_d(self) -> int:
        """Head dim of a tile."""
        return self.compiled.BLOCK_D

    @cached_property
    def row_block(self) -> int:
        """Rows a program of the backward's first pass."""
        return max(16, 4096 // self.block_d)

    @cached_property
    def score_unit(self) -> float:
        """A score as the kernels hold it, times this, is the score."""
        return 1.0 if self.compiled.PRESCALED else self.spec.scale

    @cached_property
    def unit(self) -> float:
        """A score as the kernels hold it, times this, is the score in powers of two."""
        return self.score_unit * _LOG2E

    @cached_property
    def foldable(self) -> bool:
        """Whether the backward may add -lse and -delta to its products before anything else is done to them."""
        return not self.compiled.PRESCALED and self.spec.dropout_p == 0

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
        """The argument `sizes` of the passes, from `heads` to `threshold`."""
        spec = self.spec
        return (
            *self.planes,
            self.dim,
            float(spec.scale),
            float(self.unit),
            float(spec.softcap),
            spec.window_left,
            spec.right,
            self.keep_scale,
            round(spec.dropout_p * 2**32),
        )

    @property
    def planes(self) -> tuple[int, int, int, int]:
        """What every `sizes` begins with (blocks.one_head): query heads, how many share a key head, all rows of
        queries and of keys."""
        return self.heads, self.heads // self.kv_heads, self.total_q, self.total_k

    def takes_descriptors(self, *tensors: Tensor) -> bool:
        """Whether Hopper's copy engine can read these tensors: 16-byte aligned and not packed."""
        return self.capability >= 90 and not self.packed and all(map(_copyable, tensors))

    def rows(
        self, tensor: Tensor, rows: int, descriptor: bool, columns: int | None = None
    ) -> Tensor | TensorDescriptor:
        """`tensor`, or its descriptor for tiles [1, 1, rows, columns], of block_d columns unless given."""
        if not descriptor:
            return tensor
        shape = list(tensor.shape)
        # The stride of a dimension of one element is never used, but must be aligned.
        strides = [s if n > 1 else 8 for s, n in zip(tensor.stride()[:3], shape, strict=False)]
        return TensorDescriptor(tensor, shape, [*strides, 1], [1, 1, rows, columns or self.block_d])

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
            launch(
                blank_tail_kernel,
                (tensor.shape[1], 1, 1),
                (tensor, cu_seqlens),
                (self.sequences, tensor.shape[2], tensor.stride(1), tensor.stride(2), dim, fill),
                {"ROWS": 64, "BLOCK_D": triton.next_power_of_2(dim)},
            )


_CALLS: Final[dict[Any, Call]] = {}
_COMPILED: Final[dict[Any, Any]] = {}
_MOST_PLANES: Final = 65_535
"""What CUDA allows in the second dimension of a grid."""
_MOST_KNOWN: Final = 4096
"""Shapes, and launches, that are remembered; past so many all are forgotten, as lengths may differ at every step."""


def call_of(query: Tensor, key: Tensor, value: Tensor, given: Arguments) -> Call:
    """The call, remembered by shape. Raises ValueError with a sentence for layouts that the kernels do not read."""
    cu_seqlens, spec = given.cu_seqlens_q, given.spec
    sequences = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else query.shape[0]
    longest = (given.max_seqlen_q, given.max_seqlen_k) if cu_seqlens is not None else None
    strides = query.stride(-1), key.stride(-1), value.stride(-1)
    known = (query.shape, key.shape, strides, sequences, longest, query.device, spec)
    call = _CALLS.get(known)
    if call is None:
        if len(_CALLS) >= _MOST_KNOWN:
            _CALLS.clear()
        call = _CALLS[known] = _new_call(query, key, value, sequences, longest, spec)
    return call


def _new_call(
    query: Tensor, key: Tensor, value: Tensor, sequences: int, longest: tuple[int, int] | None, spec: AttentionSpec
) -> Call:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1 and tensor.numel():
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; the kernels read rows of adjacent "
                f"elements: call .contiguous() on it"
            )
    _, heads, total_q, dim = query.shape
    total_k = key.shape[2]
    if dim % 8 or dim > 256:
        raise ValueError(f"head dim {dim} is not served by the kernels; use a multiple of 8 up to 256")
    if sequences * heads > _MOST_PLANES:
        raise ValueError(
            f"{sequences} sequences of {heads} heads are {sequences * heads} planes; a launch serves {_MOST_PLANES}: "
            "split the batch"
        )
    return Call(
        heads=heads,
        kv_heads=key.shape[1],
        total_q=total_q,
        total_k=total_k,
        dim=dim,
        sequences=sequences,
        longest_q=min(longest[0], total_q) if longest else total_q,
        longest_k=min(longest[1], total_k) if longest else total_k,
        packed=longest is not None,
        capability=_capability(query.device),
        spec=spec,
    )


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Launch `kernel(*tensors, *numbers, **constants)` with Triton's `options`.

    Triton looks at every argument of every launch to find what it compiled for them, for longer than a small kernel
    runs. All that it asks is kept here beside what it found: the numbers, and of a tensor its type and whether it is
    aligned to 16 bytes.
    """
    known = (
        kernel.fn, numbers, *constants.values(), *options.values(), *map(_kind, tensors),
        torch.cuda.current_device() if _GPU else -1,
    )  # fmt: skip
    compiled = _COMPILED.get(known)
    if compiled is not None:
        compiled[grid](*tensors, *numbers, *constants.values())
        return
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) >= _MOST_KNOWN:
            _COMPILED.clear()
        _COMPILED[known] = compiled


def _kind(tensor: Tensor | TensorDescriptor | None) -> Any:
    if tensor is None:
        return None
    if isinstance(tensor, TensorDescriptor):
        return tensor.base.dtype, tensor.block_shape[2]
    return tensor.dtype, tensor.data_ptr() % 16 == 0


def _capability(device: torch.device) -> int:
    """Compute capability times ten; 0 without a GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _copyable(tensor: Tensor) -> bool:
    if tensor.data_ptr() % 16 or tensor.element_size() != 2:
        return False
    strides, sizes = tensor.stride(), tensor.shape
    return all(sizes[i] == 1 or (strides[i] > 0 and strides[i] % 8 == 0) for i in range(3))
