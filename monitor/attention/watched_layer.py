"""A watched layer: where the calls of its attention are served and counted, and which layer's forward is running."""

import logging
from collections import Counter
from typing import Any, Final, cast

import torch
import torch._dynamo
from torch import Tensor

from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor.attention.probe import probe

logger: Final = logging.getLogger("foreshock")

LAYER_ATTRIBUTE: Final = "_foreshock_layer"
_EXACT: Final = ("float32", "float64")
"""Numerics in which no operand and no result of attention is rounded to 16 bits."""


def numerics_for(query: Tensor, asked: str) -> str:
    """The numerics of one call: as `asked`, and under "auto" those of the type that PyTorch's attention would use."""
    if asked != "auto":
        return asked
    if query.dtype == torch.float64:
        return "float64"
    autocast = query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type)
    dtype = torch.get_autocast_dtype(query.device.type) if autocast else query.dtype
    return "kernel" if dtype in (torch.bfloat16, torch.float16) else "float32"


def head_dim_problem(head_dim: int, device: torch.device, numerics: str) -> str | None:
    """Why no kernel serves this head dim, or None. Asked before torch.compile makes a graph that would fail."""
    if device.type == "cpu" or numerics not in ("auto", "kernel") or (head_dim % 8 == 0 and head_dim <= 256):
        return None
    return f"its head dim is {head_dim}; the kernels serve multiples of 8 up to 256"


class WatchedLayer:
    """One layer's place in the packed buffers: `state` int64 [H, SLOT_COUNT] and `modes` int32 [H], both views.

    It lives on the module (LAYER_ATTRIBUTE), so that it is found again in a recompute and under torch.compile.
    """

    def __init__(self, name: str, state: Tensor, modes: Tensor, numerics: str, *, strict: bool = False) -> None:
        self.name = name
        # .data: a version of its own. Views of one buffer share theirs, so that one layer's backward would make
        # autograd refuse what the graph of another layer, compiled by itself, has saved.
        self.state = state.data
        self.modes = modes.data
        self.numerics = numerics
        self.strict = strict
        self.rounds = numerics not in _EXACT
        """Whether its attention is computed in a type that rounds; under "auto" taken from the last eager call."""
        self.tick: Tensor | None = None
        """The probe's counter, int64 [1], where the model keeps its own attention; else None."""
        self.sampling = 0
        """Number of the agent's sampling, for the probe."""
        self.keeps = False
        """The model's own attention serves the calls, and a sample of them is measured."""
        self.unserved: Counter[str] = Counter()
        for buffer in (self.state, self.modes):
            # spares torch.compile's CUDA graphs a copy of them in every step
            torch._dynamo.mark_static_address(buffer, guard=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedLayer":
        return self  # a copy of the model (an average of its weights, say) must not bring buffers of its own

    def leave_alone(self, reason: str) -> None:
        """Count a call that goes to the model's own attention, and say so once."""
        if torch.compiler.is_compiling():
            return  # the check after step 1 finds the layer that was never hit
        self.unserved[reason] += 1
        if self.unserved[reason] == 1:
            logger.warning("foreshock: %s is not watched in this call: %s", self.name, reason)

    def problem(self, query: Tensor) -> str | None:
        """Why a call with this query [B, H, S, D] cannot be served by our kernels and counted into this layer."""
        if (reason := self._misfit(query)) is not None:
            return reason
        if self.numerics == "auto" and query.device.type != "cpu" and numerics_for(query, "auto") != "kernel":
            # The reference is right there too, but its memory grows with the square of the length.
            return (
                f"its operands are {str(query.dtype).removeprefix('torch.')}; the kernels are for 16 bits. Train under "
                "autocast, or ask for numerics='float32', which is slow"
            )
        return head_dim_problem(query.shape[3], query.device, numerics_for(query, self.numerics))

    def _misfit(self, query: Tensor) -> str | None:
        if query.dim() != 4:
            return f"its query has shape {list(query.shape)}; [B, H, S, D] is served"
        if query.shape[1] != self.state.shape[0]:
            return f"its query has {query.shape[1]} heads, {self.state.shape[0]} were announced"
        if query.device != self.state.device:
            return f"it runs on {query.device}, but was on {self.state.device} when attached; attach after moving it"
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor | None:
        """The watched attention, [B, H, Sq, D], or None when this call cannot be served."""
        if (reason := self.problem(query)) is not None:
            self.leave_alone(reason)
            return None
        numerics = numerics_for(query, self.numerics)
        options |= {"numerics": numerics, "state": self.state, "modes": self.modes}
        if torch.compiler.is_compiling():
            return cast(Tensor, flash_attention(query, key, value, **options))
        self.rounds = numerics not in _EXACT
        try:
            return cast(Tensor, flash_attention(query, key, value, **options))
        except Exception as refusal:
            if self.strict and not isinstance(refusal, ValueError):
                raise
            self.leave_alone(str(refusal) or type(refusal).__name__)
            return None

    def probed(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """`out` [B, H, Sq, D] of the model's own attention, of which the backward measures a sample where asked to."""
        if self.tick is None or not out.requires_grad:
            return out
        if (reason := self._misfit(query)) is not None:
            self.leave_alone(reason)
            return out
        numerics = numerics_for(query, self.numerics)
        return probe(out, query, key, value, self.state, self.tick, self.sampling, numerics=numerics, **options)


class _Current:
    """The layer whose forward is running; process-wide, as torch.compile can follow it."""

    layer: WatchedLayer | None = None
    outside: int = 0
    """Calls of attention outside every watched module."""


current: Final = _Current()


def refuse_lost_recompute() -> None:
    """Raise RuntimeError where an attention call without a layer is a recompute inside a backward."""
    # Inside a backward and in no watched module: something recomputes an attention call, and lost its layer on the way.
    # Served as usual it would be counted nowhere and rounded otherwise than in its first pass.
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1 and not current.outside:
        raise RuntimeError(
            "foreshock cannot tell which layer's attention is recomputed in this backward: the checkpointing in use is "
            "not PyTorch's; use torch.utils.checkpoint, or checkpoint whole attention modules or blocks"
        )
