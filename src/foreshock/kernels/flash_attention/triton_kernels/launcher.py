"""Repeat launches of a Triton kernel in which only the tensors' pointers change.

At every launch, Triton inspects all arguments to find the compiled kernel, and needs a Python object for every tensor
descriptor; this takes longer than a small kernel runs. This module caches the driver's arguments of a launch. It uses
Triton's private API, so it does that only for the versions named here; with other versions it launches the public
`CompiledKernel`.
"""

from collections.abc import Callable, Mapping
from inspect import getclosurevars
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_DIRECT: Final = triton.__version__.startswith("3.6.")
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


def described(tensor: Tensor, rows: int, columns: int) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Return the arguments of a descriptor of a tensor [B, H, S, D] for tiles [1, 1, rows, columns]."""
    shape = list(tensor.shape)
    # The stride of a dimension of one element is never used, but must be aligned.
    strides = [s if n > 1 else 8 for s, n in zip(tensor.stride()[:3], shape, strict=False)]
    return tensor, shape, [*strides, 1], [1, 1, rows, columns]


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(*described(tensor, rows, columns))


class Launch(NamedTuple):
    """`kernel(*tensors, *numbers, **constants)` on a grid, with Triton's `options`."""

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = _NOTHING
    tiles: Mapping[int, tuple[int, int]] = _NOTHING
    """Rows and columns of the tiles that Hopper's copy engine reads, by the index of the tensor."""
    descriptor: Callable[[Tensor, int, int], Any] = _descriptor
    """Makes the tensors' descriptors, in the kernel's language (Triton or Gluon)."""


def _given(tensors: tuple[Any, ...], tiles: Mapping[int, tuple[int, int]], descriptor: Any) -> list[Any]:
    return [descriptor(x, *tiles[place]) if x is not None and place in tiles else x for place, x in enumerate(tensors)]


class Ready:
    """A cached launch, which can be repeated with tensors that differ from the first ones only in their pointers."""

    def __init__(self, compiled: Any, launch: Launch, given: list[Any]) -> None:
        self._compiled, self._grid, self._tiles = compiled, launch.grid, (launch.tiles, launch.descriptor)
        self._rest = (*launch.numbers, *launch.constants.values())
        self.direct = _direct_launch(compiled) if _DIRECT else None
        """Function that launches through the driver, and accepts addresses in place of tensors if no launch hook is
        set; None if Triton has to launch."""
        self._words: list[Any] = []
        self._plain: list[tuple[int, int]] = []
        self._mapped: list[tuple[int, int, Any]] = []
        if self.direct is not None:
            self._lay_out(given)

    def _lay_out(self, given: list[Any]) -> None:
        """Prepare the driver's arguments: constant words are written once, and for each tensor the index of its word
        is stored, so that a launch only fills in these words."""
        compiled, launcher = self._compiled, self._compiled.run
        self._words = [
            *(*self._grid, None, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None),
            *(compiled.packed_metadata, None, None, None),
        ]
        for place, (tensor, parts) in enumerate(zip(given, _maps(compiled, given), strict=True)):
            if parts is not None:
                self._mapped.append((place, len(self._words), parts))
                self._words += [None, *tensor.shape, *tensor.strides]
            else:
                if tensor is not None:
                    self._plain.append((place, len(self._words)))
                self._words.append(None)
        self._words += self._rest

    def __call__(self, tensors: tuple[Tensor | int | None, ...]) -> None:
        if self.direct is None or hooked():
            self._compiled[self._grid](*_given(tensors, *self._tiles), *self._rest)
            return
        words = self._words.copy()
        active = driver.active
        words[_STREAM] = active.get_current_stream(active.get_current_device())
        for place, at in self._plain:
            tensor: Any = tensors[place]
            words[at] = tensor if tensor.__class__ is int else tensor.data_ptr()
        encode = active.utils.fill_tma_descriptor
        for place, at, parts in self._mapped:
            tensor = tensors[place]
            words[at] = encode(tensor if tensor.__class__ is int else tensor.data_ptr(), *parts)
        self.direct(*words)


_STREAM: Final = 3
"""Index of the stream's word, after the grid."""


def hooked() -> bool:
    """Whether a hook, such as a profiler's, runs at every launch."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _direct_launch(compiled: Any) -> Any:
    """Return the function that launches through the driver; None for a kernel that needs Triton's scratch memory."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if not getattr(compiled.metadata, "tensordesc_meta", None):
        return launcher.launch
    return getclosurevars(launcher.launch).nonlocals["launcher"]  # accepts encoded descriptors


def _maps(compiled: Any, given: list[Any]) -> list[Any]:
    """Return the arguments of each tensor's tensor map except its pointer; None for tensors without a descriptor."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    known = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    found: list[Any] = []
    for one in given:
        if one is None or isinstance(one, Tensor | int):
            found.append(None)
            continue
        meta = next(known)
        kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        found.append((meta["swizzle"], meta["elem_size"], kind, meta["block_size"], one.shape, one.strides, 0))
    return found


def first_launch(launch: Launch, tensors: tuple[Tensor | int | None, ...]) -> Ready | None:
    """Launch through Triton, which compiles the kernel; return the cached launch, or None in the interpreter."""
    given = _given(tensors, launch.tiles, launch.descriptor)
    compiled = launch.kernel[launch.grid](*given, *launch.numbers, **launch.constants, **launch.options)
    return None if compiled is None else Ready(compiled, launch, given)
