"""The arguments that all kernels of one attention call share: sizes, visibility, softcap, dropout."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from foreshock.kernels.flash_attention.spec import Arguments, AttentionSpec
from foreshock.kernels.flash_attention.triton_kernels.blocks import blank_rest_kernel
from foreshock.kernels.flash_attention.triton_kernels.launcher import Launch, Ready, first_launch, hooked
from foreshock.kernels.flash_attention.triton_kernels.tuning import Config

_LOG2E = 1 / math.log(2)


class Compiled(NamedTuple):
    """Compile-time constants of every kernel of one call: its argument SPEC."""

    BLOCK_D: int
    """Head dim of a tile: the next power of two."""
    DIM_FULL: bool
    """Whether the head dim is a power of two, so that it fills the tile."""
    TOP_LEFT: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    """Whether the keys that a query sees are bounded on this side."""
    PRESCALED: bool
    """Whether scores are multiplied by the scale entry by entry; a cap or a scale of 0 or less needs that."""
    SOFTCAP: bool
    DROPOUT: bool
    PACKED: bool


def compiled_for(spec: AttentionSpec, dim: int, packed: bool) -> Compiled:
    """Return the compile-time constants for attention with this head dim."""
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
    ready: dict[Any, Ready] = field(default_factory=dict, compare=False, repr=False)
    """Launches of this call that were made before, by name."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Other values that the kernels cache for this call."""

    def launch(self, name: Any, tensors: tuple[Tensor | int | None, ...], settle: Callable[[], Launch]) -> None:
        """Launch the kernel that `settle` returns with `tensors`.

        From the second time on, only the tensors' pointers are read: all else is part of the call's key (call_of).
        """
        known = (name, *[tensor is None for tensor in tensors])
        ready = self.ready.get(known)
        if ready is not None:
            ready(tensors)
        elif (made := first_launch(settle(), tensors)) is not None:
            self.ready[known] = made

    def takes_addresses(self) -> bool:
        """Whether the call's launches accept addresses in place of tensors: all of them are cached and direct."""
        return not hooked() and bool(self.ready) and all(ready.direct for ready in self.ready.values())

    @cached_property
    def compiled(self) -> Compiled:
        """Compile-time constants of this call's kernels."""
        return compiled_for(self.spec, self.dim, self.packed)

    @cached_property
    def block_d(self) -> int:
        """Head dim of a tile."""
        return self.compiled.BLOCK_D

    @cached_property
    def row_block(self) -> int:
        """Rows per program of the backward's first pass."""
        return min(128, max(16, 4096 // self.block_d))

    @cached_property
    def score_unit(self) -> float:
        """Factor from a score in the kernels' unit to the score."""
        return 1.0 if self.compiled.PRESCALED else self.spec.scale

    @cached_property
    def unit(self) -> float:
        """Factor from a score in the kernels' unit to the exponent of two of exp(score)."""
        return self.score_unit * _LOG2E

    @cached_property
    def foldable(self) -> bool:
        """Whether the backward may add -lse and -delta to its products before it scales or masks them."""
        return not self.compiled.PRESCALED and self.spec.dropout_p == 0

    @cached_property
    def mean_keys(self) -> int:
        """Approximate number of keys that a row sees."""
        length = self.total_k // max(1, self.sequences) if self.packed else self.longest_k
        return length // 2 if self.spec.causal != "none" else length

    @property
    def keep_scale(self) -> float:
        """Factor of the entries of P that are not dropped."""
        return 1 / (1 - self.spec.dropout_p)

    @cached_property
    def sizes(self) -> tuple[Any, ...]:
        """Argument `sizes` of the passes, from `heads` to `threshold`."""
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
        """First four entries of every `sizes` (places.one_head): query heads, query heads per key head, and the total
        rows of queries and of keys."""
        return self.heads, self.heads // self.kv_heads, self.total_q, self.total_k

    def order(self, blocks: int, planes: int, length: int) -> tuple[int, int, int]:
        """Return the start order of a pass's programs (places.turn), each of which reads two streams of `length` rows.

        Under a causal mask, the blocks of a plane differ in their work, and a pass ends with its last long block. So
        the longest blocks of a section's planes start first; a section is as many planes as fit the L2 cache together.
        In all other cases, and if a plane has few blocks, each plane is a section of its own.
        """
        alike = self.spec.right < 0 or self.spec.window_left >= 0 or blocks < _MANY_BLOCKS
        fitting = 1 if alike else _SECTION_ELEMENTS // max(1, length * self.block_d**2)
        return blocks, planes, max(1, min(planes, fitting))

    def takes_descriptors(self, *tensors: Tensor) -> bool:
        """Whether Hopper's copy engine can read these tensors: 16-byte aligned and not packed."""
        return self.capability >= 90 and not self.packed and all(map(_copyable, tensors))

    def tiles(self, config: Config, rows: tuple[int, ...]) -> dict[int, tuple[int, int]]:
        """Return the tiles that Hopper's copy engine reads: one entry of `rows` for each of the first tensors."""
        return {place: (count, self.block_d) for place, count in enumerate(rows)} if config.tma else {}

    def blank(self, *tensors: Tensor) -> bool:
        """If the call does not have any query or key, zero `tensors` and return True."""
        if min(self.total_q, self.total_k, self.sequences, self.heads, self.longest_q, self.longest_k) > 0:
            return False
        for tensor in tensors:
            tensor.zero_()
        return True

    def blank_rest(self, cu_seqlens: Tensor | None, longest: int, *fills: tuple[Tensor, float]) -> None:
        """Fill the rows of packed tensors [1, H, total(, D)] that no program writes (blocks.blank_rest_kernel)."""
        for tensor, fill in fills:
            dim = tensor.shape[3] if tensor.dim() == 4 else 1
            numbers = (self.sequences, longest, tensor.shape[2], tensor.stride(1), tensor.stride(2), dim, fill)
            self.launch(
                ("rest", tensor.shape[1], numbers, tensor.dtype),
                (tensor, cu_seqlens),
                partial(
                    Launch,
                    blank_rest_kernel,
                    (tensor.shape[1], 1, 1),
                    numbers,
                    {"ROWS": 64, "BLOCK_D": triton.next_power_of_2(dim)},
                ),
            )


_CALLS: Final[dict[Any, Call]] = {}
_MOST_PLANES: Final = 65_535
"""CUDA's limit for the second dimension of a grid."""
_MANY_BLOCKS: Final = 32
_SECTION_ELEMENTS: Final = 2**28
"""The programs of a section read 16 MB together at head dim 64 and 8 MB at 128: the fastest of 8, 16, 32 and 64 MB, of
the 50 MB of L2 of a Hopper GPU ("Rejected variants of the kernels" in the notebook)."""
_MOST_KNOWN: Final = 4096
"""Size of the call cache; when it is full, it is emptied, because lengths may differ at every step."""


def call_of(query: Tensor, key: Tensor, value: Tensor, given: Arguments, *others: Tensor | None) -> Call:
    """Return the cached call for these arguments, or a new one.

    The cache key contains everything that may change the launches, except pointers: shapes and, for every tensor from
    outside (also a backward's `others`), type, strides and alignment to 16 bytes. Raises ValueError with a sentence
    for layouts that the kernels do not read.
    """
    modes, cu_seqlens, cu_seqlens_k, longest_q, longest_k, seed, spec = given
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    longest = None if cu_seqlens is None else (longest_q, longest_k)
    outer = (query, key, value, modes, cu_seqlens, cu_seqlens_k, seed, *others)
    known = (query.shape, key.shape, sequences, longest, query.device, spec, *map(_kind, outer))
    call = _CALLS.get(known)
    if call is None:
        if len(_CALLS) >= _MOST_KNOWN:
            _CALLS.clear()
        call = _CALLS[known] = _new_call(query, key, value, sequences, longest, spec)
    return call


def _kind(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.stride(), tensor.data_ptr() % 16)


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
        raise ValueError(f"head dim {dim} is not supported by the kernels; use a multiple of 8 up to 256")
    if sequences * heads > _MOST_PLANES:
        raise ValueError(
            f"{sequences} sequences of {heads} heads are {sequences * heads} planes; a launch supports {_MOST_PLANES}: "
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


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one. It nearly always is, and a check is ten times as fast as setting it."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


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
