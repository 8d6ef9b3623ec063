"""The host's copy of the modes of a layer's heads. Reading them from device memory would wait for the device.

Kernels obey the flags in device memory. With the host's copy, a call skips launches for modes that no head has, and
chooses the fastest passes for the modes that heads have. After a launch was skipped, the remaining launch ignores the
flags: they could change while it waits on another stream, and then neither launch would write some heads. For the same
reason, two launches that divide the heads between them read one `snapshot` of the flags.
"""

import weakref
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode


class Known(NamedTuple):
    """The host's knowledge of the modes of one layer's heads."""

    all_corrected: bool
    """The rows of every head are known to be corrected. Only chooses between passes that all obey the flags."""
    some_corrected: bool
    """The rows of some head may be corrected. If False, launches for such heads can be skipped."""
    some_shifted: bool
    """Some head may shift its rows. If False, launches for such heads can be skipped."""


def snapshot(modes: Tensor | None) -> Tensor | None:
    """Copy the flags for the next launches, because a signal handler that ends a step could change the original.

    The copy is a kernel of its own, so a captured graph copies the flags at each replay.
    """
    return None if modes is None else modes.clone()


_UNKNOWN: Final = Known(all_corrected=False, some_corrected=True, some_shifted=True)
_PLAIN: Final = Known(all_corrected=False, some_corrected=False, some_shifted=False)


def note_modes(modes: Tensor, flags: Iterable[int], *, written: Tensor | None = None) -> None:
    """Record that `modes` contains these `flags`, for all later launches. Call it after each write to `modes`.

    The record applies to every tensor at the same address, such as those of a compiled graph, until `modes` is
    deleted. written: the tensor through which `modes` is written, if that is a different tensor with its own version
    counter.
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
"""By the address of the modes: the recorded tensor, the tensor that is written, its version then, the knowledge."""


def known_modes(modes: Tensor | None) -> Known:
    """Return the knowledge of `modes`; it is empty if they were never recorded, or were written after that.

    A captured graph is replayed under other flags, so its launches have to cover all modes.
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
