"""Which forwards and backwards the kernels for Hopper take (hopper_forward.py, hopper_backward.py); Triton's take all
others, and all where FORESHOCK_KERNELS=triton asks for them alone."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call
from foreshock.kernels.flash_attention.triton_kernels.passes import Grads, Outputs, RowVectors, Tensors

DIM: Final = 128
"""The head dim that they are written for."""
SEARCHED: Final = ("3.6.", "3.7.", "3.8.")
"""The versions of Triton from which what they compile into was searched for products of stale registers (3.6.0, 3.7.1
and 3.8.0). A later one may order them otherwise, and nothing would tell. 3.6 alone ran on GPUs."""
_NAME: Final = "hopper forward"
_NAME_BACKWARD: Final = "hopper backward"
_given_up: Final[list[Exception]] = []
"""Why the forward is not asked any more."""
_given_up_backward: Final[list[Exception]] = []


def serves(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernels compute this call's forward, or its backward, of and into these tensors."""
    spec = call.spec
    all_seen = spec.right < 0 or (spec.causal != "none" and call.longest_q == call.longest_k)
    plain = spec.window_left < 0 and not call.compiled.PRESCALED and spec.dropout_p == 0
    fits = call.capability == 90 and call.dim == DIM and triton.__version__.startswith(SEARCHED)
    return fits and all_seen and plain and call.takes_descriptors(*tensors)


def launched(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Outputs,
    modes: Tensor | None,
) -> bool:
    """Launch the forward where it serves, and say whether it did: then all is stored of the heads that do not shift
    their rows (arguments: forward.launch_forward)."""
    chosen = call.plans.get(_NAME)
    if chosen is None:
        chosen = _choose(call, _NAME, *inputs, *(x for x in outputs[:2] if x is not None))
    if not chosen or _given_up:
        return False
    return _launches("forward", _given_up, lambda: _launch()(call, inputs, outputs, modes))


def takes_backward(call: Call, given: Tensors, grads: Grads) -> bool:
    """Whether the backward is to be launched: it serves, and nobody wants equal bits, which its dQ has not
    (torch.use_deterministic_algorithms). That may change from one call to the next."""
    chosen = call.plans.get(_NAME_BACKWARD)
    if chosen is None:
        chosen = _choose(call, _NAME_BACKWARD, *given.operands, *grads)
    return bool(chosen) and not _given_up_backward and not torch.are_deterministic_algorithms_enabled()


def launched_backward(call: Call, given: Tensors, rows: RowVectors, grads: Grads) -> bool:
    """Launch what `takes_backward`, and say whether it could be: then dK and dV are stored, and dQ of the heads whose
    rows are not corrected. It is not taken a second time where it could not be."""
    return _launches("backward", _given_up_backward, lambda: _launch_backward()(call, given, rows, grads))


def _choose(call: Call, name: str, *tensors: Tensor) -> bool:
    chosen = call.plans[name] = os.environ.get("FORESHOCK_KERNELS") != "triton" and serves(call, *tensors)
    return chosen


def _launches(what: str, given_up: list[Exception], launch: Callable[[], None]) -> bool:
    try:
        launch()
    except torch.OutOfMemoryError:  # no fault of the kernel
        raise
    except Exception as error:  # an import's or a compiler's; what else is wrong, the other launch will say
        given_up.append(error)
        warnings.warn(
            f"foreshock's {what} for Hopper could not be launched ({type(error).__name__}: "
            f"{error}); the slower {what} serves in its place",
            stacklevel=3,
        )
        return False
    return True


@cache
def _launch() -> Callable[..., Any]:
    from foreshock.kernels.flash_attention.triton_kernels.hopper_forward import launch_hopper_forward

    return launch_hopper_forward


@cache
def _launch_backward() -> Callable[..., Any]:
    from foreshock.kernels.flash_attention.triton_kernels.hopper_backward import launch_hopper_backward

    return launch_hopper_backward
