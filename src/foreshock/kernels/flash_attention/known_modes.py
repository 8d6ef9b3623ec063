"""What the host knows of the modes of a layer's heads. Reading them from device memory would wait for the device.

Kernels obey the flags in device memory. This lets a call leave out launches for heads that the layer does not have,
and choose the passes that are fastest for those that it has. Where a launch is left out, the one that stays reads no
flags: they may be written while it waits on another stream, and no launch would write what both leave to each other.
Two launches that share out the heads read one `snapshot` of the flags, for the same reason.
"""

import weakref
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode


class Known(NamedTuple):
    """Of the heads of one layer."""

    all_corrected: bool
    """The rows of every head are known to be corrected. It may choose passes, all of which obey the flags."""
    some_corrected: bool
    """Those of some head may be corrected; else no launch need serve such heads."""
    some_shifted: bool
    """Some head may shift its rows; else no launch need serve such heads."""


def snapshot(modes: Tensor | None) -> Tensor | None:
    """The flags as they are for the next launches, whatever is written meanwhile, as by a signal handler that ends a
    step. The copy is a kernel of its own, so that a captured graph takes one at each replay."""
    return None if modes is None else modes.clone()


_UNKNOWN: Final = Known(all_corrected=False, some_corrected=True, some_shifted=True)
_PLAIN: Final = Known(all_corrected=False, some_corrected=False, some_shifted=False)


def note_modes(modes: Tensor, flags: Iterable[int], *, written: Tensor | None = None) -> None:
    """Note that `modes` holds these `flags`, for launches from here on. Call it each time they are written.

    It is known as long as `modes` is alive, also of tensors that share its memory, as a compiled graph's do. written:
    the tensor through which `modes` is written, where that is another one with a version of its own.
    """
    numbers = [int(flag) for flag in flags]
    corrected = [bool(number & Mode.ROW_CORRECTED) for number in numbers]
    shifted = any(number & Mode.PAPER_SOFTMAX for number in numbers)
    address, known = modes.data_ptr(), Known(all(corrected), any(corrected), shifted)

    def forget(owner: weakref.ref[Tensor]) -> None:
        if address in _NOTED and _NOTED[address][0] is owner:
            del _NOTED[address]

    through = modes if written is None else written
    _NOTED[address] = weakref.ref(modes, forget), weakref.ref(through), through._version, known


_NOTED: Final[dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], int, Known]]] = {}
"""By the address of the modes: the tensor that was noted, the one that is written, its version then, what is known."""


def known_modes(modes: Tensor | None) -> Known:
    """What is known of `modes`: nothing where nobody noted them, or they were written since.

    A graph that is captured is replayed under other flags: its launches have to serve all heads.
    """
    if modes is None:
        return _PLAIN
    noted = _NOTED.get(modes.data_ptr())
    if noted is None:
        return _UNKNOWN
    owner, written, version, known = noted[0](), noted[1](), *noted[2:]
    if owner is None or written is None or written._version != version or owner.shape != modes.shape:
        return _UNKNOWN
    if modes.is_cuda and torch.cuda.is_current_stream_capturing():
        return _UNKNOWN._replace(all_corrected=known.all_corrected)
    return known
