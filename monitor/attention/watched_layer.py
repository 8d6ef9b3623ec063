"""A watched layer: where the calls of its attention are served and counted, and which layer's forward is running."""

import logging
from collections import Counter
from typing import Any, Final, cast

import torch
import torch._dynamo
from torch import Tensor

from foreshock.kernels.flash_attention import AttentionSpec, flash_attention
from foreshock.kernels.flash_attention.centring import refusal
from foreshock.monitor.attention.probe import probe

logger: Final = logging.getLogger("foreshock")

LAYER_ATTRIBUTE: Final = "_foreshock_layer"
MASKED: Final = "it passes a mask"
NOT_RUN: Final = "its forward or backward did not run through the watched attention"
_EXACT: Final = ("float32", "float64")
"""Numerics in which no operand and no result of attention is rounded to 16 bits."""


def numerics_for(query: Tensor, asked: str) -> Any:
    """The Numerics of one call: as `asked`, and under "auto" those of the type that PyTorch's attention would use."""
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
    """One layer's place in the packed buffers: `state` int64 [H, SLOT_COUNT], `modes` int32 [H] and `cadence` int64
    [2], all views; `cadence` is None where all rows are counted always.

    It lies on the module (LAYER_ATTRIBUTE), so that it is found again in a recompute and under torch.compile. Each call
    is served by our kernels or by the model's own attention, of which a sample is measured.
    """

    def __init__(
        self,
        name: str,
        state: Tensor,
        modes: Tensor,
        numerics: str,
        *,
        cadence: Tensor | None = None,
        strict: bool = False,
    ) -> None:
        self.name = name
        # .data: a version of its own. Views of one buffer share theirs, so that one layer's backward would make
        # autograd refuse what the graph of another layer, compiled by itself, has saved.
        self.state = state.data
        self.modes = modes.data
        self.cadence = None if cadence is None else cadence.data
        self.numerics = numerics
        self.strict = strict
        self.rounds = numerics not in _EXACT
        """Whether its attention is computed in a type that rounds; under "auto" taken from the last eager call."""
        self.tick: Tensor | None = None
        """The probe's counter, int64 [1]; None before and after a Keeper looks after the layer."""
        self.sampling = ""
        """Key of the agent's sampling, for the probe."""
        self.keeps = False
        """The model's own attention serves the calls, and a sample of them is measured."""
        self.draws = True
        """Our kernels may serve dropout, whose masks they draw for themselves."""
        self.softcap = self.dropout_p = 0.0
        """Of the last call that trained."""
        self.servable = False
        """Our kernels could serve, or did serve, a call that trained."""
        self.never_served: str | None = None
        """Why they could not serve the last call that trained and stayed with its own attention."""
        self.kept: Counter[str] = Counter()
        """Why calls stayed with the model's own attention while our kernels served the layer."""
        self.unserved: Counter[str] = Counter()
        """Why calls were neither served nor measured."""
        self.ran = self.met = False
        """Its module's forward ran, and called an attention that is met; not told of compiled code."""
        for buffer in (self.state, self.modes, self.cadence):
            if buffer is not None:  # spares torch.compile's CUDA graphs a copy of them in every step
                torch._dynamo.mark_static_address(buffer, guard=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # nor is one that is loaded again

    @property
    def silence(self) -> str:
        """Why the layer counted nothing, as far as it is known."""
        if self.unserved:
            return "; ".join(self.unserved)
        if self.met:
            again = ", or only such as are differentiated again, which are not counted"
            return "no backward ran through it" + ("" if self.keeps else again)
        if self.ran:
            return "its forward ran, but computed attention by none of the functions that are met"
        return NOT_RUN

    def leave_alone(self, reason: str) -> None:
        """Count a call that is neither served nor measured, and say so once."""
        if torch.compiler.is_compiling():
            return  # the check of each sample finds the layer that was not hit
        self.unserved[reason] += 1
        if self.unserved[reason] == 1:
            logger.warning("foreshock: %s is not watched in this call: %s", self.name, reason)

    def note_service(self, problem: str | None) -> None:
        """Take note of whether our kernels could serve a call, or why not: no mode changes what they never serve."""
        if not torch.is_grad_enabled():
            return
        if problem is None:
            self.servable = True
        elif torch.compiler.is_compiling() and problem != MASKED:  # a sentence of shapes has no place in a graph
            self.never_served = "our kernels do not take its operands"
        else:
            self.never_served = problem

    @property
    def sampled(self) -> bool:
        """Whether calls of it stay with its own attention, of which a sample is measured in some steps alone."""
        return self.keeps or self.never_served is not None

    @property
    def idle(self) -> str | None:
        """Why no mode would change what this layer computes, as its calls have been; None where one would."""
        if self.servable or self.never_served is None:
            return None
        return f"its own attention stays in every call: {self.never_served}; a switch would change nothing"

    def keep_call(self, reason: str) -> None:
        """Count a call that our kernels do not serve, and say so once."""
        self.note_service(reason)
        if torch.compiler.is_compiling():
            return
        self.kept[reason] += 1
        if self.kept[reason] == 1:
            logger.info("foreshock: %s keeps its own attention in this call: %s", self.name, reason)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> str | None:
        """Why our kernels cannot serve a call with query [B, H, Sq, D], key and value [B, Hkv, Sk, D]; None: they
        can."""
        if (reason := self._misfit(query, key, value)) is not None:
            return reason
        if query.dim() != 4 or key.shape[0] != query.shape[0]:
            shapes = f"its query has shape {list(query.shape)}, its key {list(key.shape)}"
            return f"{shapes}; our kernels take [B, H, S, D]"
        if key.shape[3] != query.shape[3] or value.shape[3] != query.shape[3]:
            return f"its queries have {query.shape[3]} features, its values {value.shape[3]}"
        if dropout_p > 0 and not self.draws:
            return "our kernels would draw other dropout masks than it does; attention='kernels' lets them"
        if self.numerics == "auto" and query.device.type != "cpu" and numerics_for(query, "auto") != "kernel":
            # The reference is right there too, but its memory grows with the square of the length.
            return (
                f"its operands are {str(query.dtype).removeprefix('torch.')}; the kernels are for 16 bits. Train under "
                "autocast, or ask for numerics='float32', which is slow"
            )
        return head_dim_problem(query.shape[3], query.device, numerics_for(query, self.numerics))

    def _misfit(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Why a call can be neither served nor measured."""
        heads = self.state.shape[0]
        shapes = f"its query has shape {list(query.shape)}, its key {list(key.shape)}, its value {list(value.shape)}"
        if query.is_nested:
            return "its query is a nested tensor; [B, H, S, D] is measured"
        if query.dim() < 4 and not (query.dim() == 3 and heads == 1):
            return f"its query has shape {list(query.shape)}; [B, H, S, D] is measured"
        if query.dim() >= 4 and query.shape[-3] != heads:
            return f"its query has {query.shape[-3]} heads, {heads} were announced; attach(heads=...) announces others"
        if key.dim() != query.dim() or value.shape[:-1] != key.shape[:-1]:
            return shapes
        if any(q != k and 1 not in (q, k) for q, k in zip(query.shape[:-3], key.shape[:-3], strict=True)):
            return shapes
        if query.dim() >= 4 and query.shape[-3] % key.shape[-3]:
            return f"its query has {query.shape[-3]} heads, its key {key.shape[-3]}"
        if query.device != self.state.device:
            return f"it runs on {query.device}, but was on {self.state.device} when attached; attach after moving it"
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor | None:
        """The watched attention, [B, H, Sq, D], or None when our operator refuses this call."""
        self._note(**options)
        numerics = numerics_for(query, self.numerics)
        options |= {"numerics": numerics, "state": self.state, "modes": self.modes, "cadence": self.cadence}
        if torch.compiler.is_compiling():
            self.note_service(None)
            return cast(Tensor, flash_attention(query, key, value, **options))
        self.rounds = numerics not in _EXACT
        try:
            out = cast(Tensor, flash_attention(query, key, value, **options))
            self._meets(out)
            self.note_service(None)
            return out
        except Exception as refused:
            if self.strict and not isinstance(refused, ValueError):
                raise
            self.keep_call(str(refused) or type(refused).__name__)
            return None

    def _meets(self, out: Tensor) -> bool:
        """Take note of a call's output; whether a backward will run through it."""
        if torch.compiler.is_compiling():
            return out.requires_grad
        self.met = True
        if torch.is_grad_enabled() and not out.requires_grad:
            self.leave_alone("nothing that it depends on is trained, so no backward runs through it")
        return out.requires_grad

    def _note(self, *, softcap: float = 0.0, dropout_p: float = 0.0, **_: Any) -> None:
        if torch.is_grad_enabled():
            self.softcap, self.dropout_p = softcap, dropout_p

    def refusal(self, mode: int) -> str | None:
        """Why our kernels cannot give this layer's heads a mode, as its calls are; None where they can."""
        return refusal(mode, AttentionSpec(1.0, softcap=self.softcap, dropout_p=self.dropout_p))

    def probed(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """`out` [..., H, Sq, D] of the model's own attention, of which the backward measures a sample where asked."""
        if self.tick is None or not self._meets(out):
            return out
        if (reason := self._misfit(query, key, value)) is not None:
            self.leave_alone(reason)
            return out
        self._note(**options)
        numerics = numerics_for(query, self.numerics)
        if not torch.compiler.is_compiling():
            self.rounds = numerics not in _EXACT
        return probe(out, query, key, value, self.state, self.tick, self.sampling, numerics=numerics, **options)
