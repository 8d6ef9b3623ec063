"""Which forwards and backwards the kernels for Hopper take (hopper_forward.py, hopper_backward.py); Triton's take all
others, and all where FORESHOCK_KERNELS=triton asks for them alone."""

import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

import torch
import triton
from torch import Tensor

from foreshock.kernels.flash_attention.known_modes import known_modes
from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.passes import Grads, Outputs, Tensors

DIM: Final = 128
"""The head dim that they are written for."""
BLOCK: Final = 128
"""Keys of a program of the backward."""
SEARCHED: Final = ("3.6.", "3.7.", "3.8.")
"""The versions of Triton from which what they compile into was searched for products of stale registers (3.6.0, 3.7.1
and 3.8.0). A later one may order them otherwise, and nothing would tell. 3.6 alone ran on GPUs."""


def serves(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernels compute this call's forward, or its backward, of and into these tensors."""
    spec = call.spec
    all_seen = spec.right < 0 or (spec.causal != "none" and call.longest_q == call.longest_k)
    plain = spec.window_left < 0 and not call.compiled.PRESCALED and spec.dropout_p == 0
    fits = call.capability == 90 and call.dim == DIM and triton.__version__.startswith(SEARCHED)
    return fits and all_seen and plain and call.takes_descriptors(*tensors)


class Pass:
    """The forward or the backward for Hopper. What could not be launched is not asked for again: a kind of call, or
    every call if the kernels cannot be imported."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failed: set[Any] = set()
        """Kinds of calls; None stands for all."""

    def chosen(self, call: Call, *tensors: Tensor | None) -> bool:
        """Whether it computes this call, of and into these tensors. The call remembers the answer."""
        name = "hopper " + self.what
        answer = call.plans.get(name)
        if answer is None:
            answer = os.environ.get("FORESHOCK_KERNELS") != "triton" and serves(
                call, *[tensor for tensor in tensors if tensor is not None]
            )
            call.plans[name] = answer
        return bool(answer) and not (self.failed and self.failed & {None, _kind(call)})

    def launched(self, call: Call, *arguments: object) -> bool:
        """Launch it, and say whether it could be; a warning says why it could not."""
        try:
            self.load()(call, *arguments)
        except torch.OutOfMemoryError:  # no fault of the kernel
            raise
        except Exception as error:  # an import's or a compiler's; what else is wrong, the other launch will say
            self.failed.add(None if isinstance(error, ImportError) else _kind(call))
            warnings.warn(
                f"foreshock's {self.what} for Hopper could not be launched ({type(error).__name__}: "
                f"{error}); the slower {self.what} is used instead",
                stacklevel=3,
            )
            return False
        return True

    def load(self) -> Callable[..., None]:
        """Its launch. The first call imports Gluon, which takes a second."""
        launch: Callable[..., None] = import_module(f"{__package__}.hopper_{self.what}").launch
        return launch


def _kind(call: Call) -> Any:
    """What the kernels are compiled for, and not the lengths: another length would fail as well, after compiling."""
    return call.compiled, call.longest_k % BLOCK > 0, call.heads // call.kv_heads, *_asked


FORWARD: Final = Pass("forward")
"""Stores all of the heads that do not shift their rows."""
BACKWARD: Final = Pass("backward")
"""Stores dK and dV, and dQ of the heads whose rows are not corrected."""


def launched(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    modes: Tensor | None,
) -> bool:
    """Launch the forward where it serves, and say whether it did (arguments: forward.launch_forward)."""
    return FORWARD.chosen(call, *inputs, *outputs[:2]) and FORWARD.launched(call, inputs, outputs, modes)


def takes_backward(call: Call, given: Tensors, grads: Grads) -> bool:
    """Whether the backward is to be launched: it serves and is the faster one, and nobody wants equal bits, which its
    sums have not (torch.use_deterministic_algorithms). That may change from one call to the next.

    Where every head is corrected, Triton's passes are faster, of which the one that makes dQ runs anyway.
    """
    grouped = call.heads > call.kv_heads and call.spec.causal != "none" and call.longest_k <= _SHORT
    slower = grouped or known_modes(given.modes).all_corrected
    if (slower and not _asked) or torch.are_deterministic_algorithms_enabled():
        return False
    return BACKWARD.chosen(call, *given.operands, *grads)


_SHORT: Final = 2048
"""Up to so many keys it took 5 to 19 % longer than Triton's where query heads share a key head under a causal mask
(benchmarks/results/hopper_grouped_h100.json)."""


def each_version(dim: int, group: int) -> Iterator[None]:
    """In each turn of this loop calls of `group` query heads a key head are served by another version of the backward,
    also where Triton's is faster: which one serves depends on lengths, and who checks a call knows one of them."""
    try:
        for members in sorted({1, group}) if dim == DIM else [0]:
            _asked[:] = [members] if members else []
            yield
    finally:
        _asked.clear()


_asked: Final[list[int]] = []
"""Of `each_version`."""


def members_of(call: Call, device: torch.device) -> int:
    """How many query heads that share a key head a program takes."""
    if call.heads == call.kv_heads:
        return 1
    if _asked:
        return _asked[0]
    members = call.plans.get("hopper members")
    if members is None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        members = call.plans["hopper members"] = fastest_members(call, processors)
    return int(members)


def fastest_members(call: Call, processors: int) -> int:
    """How many query heads that share a key head a program takes: as many as leave enough programs for a GPU's
    processors, since what is made of several heads is added but once.

    Under a causal mask programs differ in their work, so that more of them have to be left. Those of short blocks run
    ahead of the others there, to heads whose tiles no neighbour reads at that time: eight heads took 18 to 31 % longer
    than four (benchmarks/results/hopper_grouped_h100.json).
    """
    group = call.heads // call.kv_heads
    programs = triton.cdiv(call.longest_k, BLOCK) * call.sequences * call.heads
    causal = call.spec.causal != "none"
    most, wanted = (min(group, 4), 4.0 * processors) if causal else (group, 1.5 * processors)
    return next((x for x in range(most, 1, -1) if group % x == 0 and programs // x >= wanted), 1)
