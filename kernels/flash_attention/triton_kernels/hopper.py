"""Which forwards the kernel for Hopper takes (hopper_forward.py) where it is asked for; Triton's takes all others."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from torch import Tensor

from foreshock.kernels.flash_attention.launch import Call

DIM: Final = 128
"""The head dim that it is written for."""
_NAME: Final = "hopper forward"
_given_up: Final[list[Exception]] = []
"""Why it is not asked any more."""


def serves(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernel computes this call's forward of, and into, these tensors."""
    spec = call.spec
    all_seen = spec.right < 0 or (spec.causal != "none" and call.longest_q == call.longest_k)
    plain = spec.window_left < 0 and not call.compiled.PRESCALED and spec.dropout_p == 0
    return call.capability == 90 and call.dim == DIM and all_seen and plain and call.takes_descriptors(*tensors)


def launched(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor | None, ...],
    modes: Tensor | None,
) -> bool:
    """Launch the kernel where it serves and FORESHOCK_KERNELS=hopper asks for it, and say whether it did: then all is
    stored of the heads that do not shift their rows (arguments: forward.launch_forward)."""
    chosen = call.plans.get(_NAME)
    if chosen is None:
        asked = os.environ.get("FORESHOCK_KERNELS") == "hopper"
        given = [x for x in (*inputs, *outputs[:2]) if x is not None]
        chosen = call.plans[_NAME] = asked and serves(call, *given)
    if not chosen or _given_up:
        return False
    try:
        _launch()(call, inputs, outputs, modes)
    except Exception as error:  # an import's or a compiler's; what else is wrong, the other launch will say
        _given_up.append(error)
        warnings.warn(
            f"foreshock's forward for Hopper, which needs Triton 3.6, could not be launched ({type(error).__name__}: "
            f"{error}); the slower forward serves in its place",
            stacklevel=2,
        )
        return False
    return True


@cache
def _launch() -> Callable[..., Any]:
    from foreshock.kernels.flash_attention.triton_kernels.hopper_forward import launch_hopper_forward

    return launch_hopper_forward
