"""Launching a Triton kernel again and again with nothing but other pointers.

Triton looks at every argument of every launch to find what it compiled for them, and asks a Python object for every
tensor descriptor: for longer than a small kernel runs. A launch that was made once is remembered here down to what the
driver is given. That reaches below Triton's public surface, and is done for the versions named here alone; others take
the way of `CompiledKernel`, which is public.
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
    """What a descriptor of a tensor [B, H, S, D] for tiles [1, 1, rows, columns] is made of."""
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
    """Which of the tensors are read by Hopper's copy engine, by place, and the rows and columns of its tiles."""
    descriptor: Callable[[Tensor, int, int], Any] = _descriptor
    """Their descriptors, as the kernel's language takes them."""


def _given(tensors: tuple[Any, ...], tiles: Mapping[int, tuple[int, int]], descriptor: Any) -> list[Any]:
    return [descriptor(x, *tiles[place]) if x is not None and place in tiles else x for place, x in enumerate(tensors)]


class Ready:
    """A launch that was made, to be made again with tensors that differ from its first ones in their pointers alone."""

    def __init__(self, compiled: Any, launch: Launch, given: list[Any]) -> None:
        self._compiled, self._grid, self._tiles = compiled, launch.grid, (launch.tiles, launch.descriptor)
        self._rest = (*launch.numbers, *launch.constants.values())
        self.direct = _direct_launch(compiled) if _DIRECT else None
        """What hands it to the driver, and takes addresses in the place of tensors while no hook follows; or None."""
        self._words: list[Any] = []
        self._plain: list[tuple[int, int]] = []
        self._mapped: list[tuple[int, int, Any]] = []
        if self.direct is not None:
            self._lay_out(given)

    def _lay_out(self, given: list[Any]) -> None:
        """All that the driver is given: what stays is written once, and of the rest it is kept where each tensor's word
        stands, so that a launch looks at nothing else."""
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
"""Place of the stream among the words, after the grid."""


def hooked() -> bool:
    """Whether a hook, a profiler's perhaps, follows every launch."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _direct_launch(compiled: Any) -> Any:
    """The function that hands a launch to the driver; None for a kernel that needs memory of Triton's own."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if not getattr(compiled.metadata, "tensordesc_meta", None):
        return launcher.launch
    return getclosurevars(launcher.launch).nonlocals["launcher"]  # which takes descriptors that are made already


def _maps(compiled: Any, given: list[Any]) -> list[Any]:
    """What the copy engine's map of each tensor is made of beside its pointer; None for those that it does not read."""
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
    """Launch by Triton's own way, which compiles; what is launched from then on, or None in the interpreter."""
    given = _given(tensors, launch.tiles, launch.descriptor)
    compiled = launch.kernel[launch.grid](*given, *launch.numbers, **launch.constants, **launch.options)
    return None if compiled is None else Ready(compiled, launch, given)
