"""Decide which calls use the kernels for Hopper (hopper_forward.py, hopper_backward.py).

Triton's kernels compute all other calls, or all calls if FORESHOCK_KERNELS=triton.
"""

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
"""The only head dim that these kernels support."""
BLOCK: Final = 128
"""Keys per program of the backward."""
SEARCHED: Final = ("3.6.", "3.7.", "3.8.")
"""Versions of Triton whose compiled code was searched for products that read stale registers (3.6.0, 3.7.1 and 3.8.0).
A later version could order instructions differently without any error message. Only 3.6 ran on GPUs."""


def serves(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernels support this call's forward or backward with these input and output tensors."""
    spec = call.spec
    all_seen = spec.right < 0 or (spec.causal != "none" and call.longest_q == call.longest_k)
    plain = spec.window_left < 0 and not call.compiled.PRESCALED and spec.dropout_p == 0
    fits = call.capability == 90 and call.dim == DIM and triton.__version__.startswith(SEARCHED)
    return fits and all_seen and plain and call.takes_descriptors(*tensors)


class Pass:
    """The forward or the backward for Hopper. After a launch failed, that kind of call is not tried again, or no call
    if the kernels cannot be imported."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failed: set[Any] = set()
        """Kinds of calls that failed; None means all."""

    def chosen(self, call: Call, *tensors: Tensor | None) -> bool:
        """Whether to use this pass for a call with these input and output tensors; the call caches the answer."""
        name = "hopper " + self.what
        answer = call.plans.get(name)
        if answer is None:
            answer = os.environ.get("FORESHOCK_KERNELS") != "triton" and serves(
                call, *[tensor for tensor in tensors if tensor is not None]
            )
            call.plans[name] = answer
        return bool(answer) and not (self.failed and self.failed & {None, _kind(call)})

    def launched(self, call: Call, *arguments: object) -> bool:
        """Launch this pass and return whether it succeeded; a warning gives the reason of a failure."""
        try:
            self.load()(call, *arguments)
        except torch.OutOfMemoryError:  # not the kernel's fault
            raise
        except Exception as error:  # an error of the import or compiler; the fallback raises all others again
            self.failed.add(None if isinstance(error, ImportError) else _kind(call))
            warnings.warn(
                f"foreshock's {self.what} for Hopper could not be launched ({type(error).__name__}: "
                f"{error}); the slower {self.what} is used instead",
                stacklevel=3,
            )
            return False
        return True

    def load(self) -> Callable[..., None]:
        """Return the launch function. The first call imports Gluon, which takes a second."""
        launch: Callable[..., None] = import_module(f"{__package__}.hopper_{self.what}").launch
        return launch


def _kind(call: Call) -> Any:
    """Return a call's compile-time constants, without its lengths: another length would fail too, after compiling."""
    return call.compiled, call.longest_k % BLOCK > 0, call.heads // call.kv_heads, *_asked


FORWARD: Final = Pass("forward")
"""Writes all outputs of heads that do not shift their rows."""
BACKWARD: Final = Pass("backward")
"""Writes dK and dV, and dQ of heads whose rows are not corrected."""


def launched(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    modes: Tensor | None,
) -> bool:
    """Launch the forward if it supports the call; return whether it did (arguments: forward.launch_forward)."""
    return FORWARD.chosen(call, *inputs, *outputs[:2]) and FORWARD.launched(call, inputs, outputs, modes)


def takes_backward(call: Call, given: Tensors, grads: Grads) -> bool:
    """Whether to launch the backward for Hopper: it supports the call, is faster than Triton's passes, and determinism
    is not requested (torch.use_deterministic_algorithms), because its sums are not deterministic. The answer may change
    between calls.

    If every head is corrected, Triton's passes are faster, because the dQ pass has to run in any case.
    """
    grouped = call.heads > call.kv_heads and call.spec.causal != "none" and call.longest_k <= _SHORT
    slower = grouped or known_modes(given.modes).all_corrected
    if (slower and not _asked) or torch.are_deterministic_algorithms_enabled():
        return False
    return BACKWARD.chosen(call, *given.operands, *grads)


_SHORT: Final = 2048
"""Up to this number of keys, it took 5 to 19 % longer than Triton's if query heads share a key head under a causal mask
(benchmarks/results/hopper_grouped_h100.json)."""


def each_version(dim: int, group: int) -> Iterator[None]:
    """Loop over the versions of the backward for `group` query heads per key head, even if Triton's is faster.

    Normally the version depends on the lengths, but a check of the kernels uses only a few lengths.
    """
    try:
        for members in sorted({1, group}) if dim == DIM else [0]:
            _asked[:] = [members] if members else []
            yield
    finally:
        _asked.clear()


_asked: Final[list[int]] = []
"""Query heads per program that `each_version` requests; empty outside of its loop."""


def members_of(call: Call, device: torch.device) -> int:
    """Return how many of the query heads that share a key head one program processes."""
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
    """Return the fastest number of query heads per program, among those that share a key head.

    More heads per program need fewer additions to dK and dV, but enough programs have to remain for all processors of
    the GPU. Under a causal mask, programs differ in their work, so more programs have to remain. Programs with short
    blocks then also run ahead to heads whose tiles no other program reads at that time: eight heads took 18 to 31 %
    longer than four (benchmarks/results/hopper_grouped_h100.json).
    """
    group = call.heads // call.kv_heads
    programs = triton.cdiv(call.longest_k, BLOCK) * call.sequences * call.heads
    causal = call.spec.causal != "none"
    most, wanted = (min(group, 4), 4.0 * processors) if causal else (group, 1.5 * processors)
    return next((x for x in range(most, 1, -1) if group % x == 0 and programs // x >= wanted), 1)
