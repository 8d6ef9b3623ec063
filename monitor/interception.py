"""Puts the self-watching attention under an unchanged model, and takes it away again.

Two ways in. transformers dispatches by name, and hands its function the module. Everything else calls
`F.scaled_dot_product_attention`, which knows no module: hooks round each watched module's forward say whose call it is.
"""

import functools
import logging
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor.discovery import SDPA, VARLEN, places_of
from foreshock.monitor.probe import probe

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


def _enter(module: nn.Module, args: Any) -> None:
    current.layer = getattr(module, LAYER_ATTRIBUTE, None)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    current.layer = None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name, watched where a watched module calls it; its causal mask starts top left."""
    layer = current.layer
    served = None
    if layer is None:
        if not torch.compiler.is_compiling():
            refuse_lost_recompute()
            current.outside += 1
    elif layer.keeps:
        pass
    elif attn_mask is not None:
        layer.leave_alone("it passes attn_mask; only is_causal is served")
    elif not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
        layer.leave_alone("query and key differ in heads without enable_gqa")
    else:
        causal = "top_left" if is_causal else "none"
        served = layer.attend(query, key, value, causal=causal, scale=scale, dropout_p=dropout_p)
    if served is not None:
        return served
    out = SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if layer is None or layer.tick is None:
        return out
    causal = "top_left" if is_causal else "none"
    return layer.probed(out, query, key, value, mask=attn_mask, causal=causal, scale=scale, dropout_p=dropout_p)


def refuse_lost_recompute() -> None:
    """Raise RuntimeError where an attention call without a layer is a recompute inside a backward."""
    # Inside a backward and in no watched module: something recomputes an attention call, and lost its layer on the way.
    # Served as usual it would be counted nowhere and rounded otherwise than in its first pass.
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1 and not current.outside:
        raise RuntimeError(
            "foreshock cannot tell which layer's attention is recomputed in this backward: the checkpointing in use is "
            "not PyTorch's; use torch.utils.checkpoint, or checkpoint whole attention modules or blocks"
        )


def _keep_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as called now: in a recompute, it finds the layer that is current now."""
    layer = current.layer
    if layer is None or torch.compiler.is_compiling():
        return function

    @functools.wraps(function)
    def in_layer(*args: Any, **kwargs: Any) -> Any:
        before, current.layer = current.layer, layer
        try:
            return function(*args, **kwargs)
        finally:
            current.layer = before

    return in_layer


# What torch.utils.checkpoint.checkpoint calls. Rebinding that function itself would miss those who imported it by name
# or hold it in a partial, and would hide it from torch.compile, which knows it by identity.
_original_non_reentrant: Final = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_original_reentrant: Final = torch.utils.checkpoint.CheckpointFunction


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _original_non_reentrant(_keep_layer(function), *args, **kwargs)


class _Reentrant:
    """In the place of torch.utils.checkpoint.CheckpointFunction."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return _original_reentrant.apply(_keep_layer(function), *args)  # type: ignore[no-untyped-call]


# torch.compile knows PyTorch's function by identity and leaves it whole in its graph, where its call of attention is
# traced after the hooks have gone. A copy it looks into, as into anybody's function.
_original_mha: Final = F.multi_head_attention_forward
_mha_copy: Final = types.FunctionType(
    _original_mha.__code__, _original_mha.__globals__, _original_mha.__name__, _original_mha.__defaults__
)

_COMPILER_SETTINGS: Final = {
    # The hooks set `current.layer`. A compiled recompute, traced together with its forward, need not do so again, but
    # torch.compile refuses the hooks' effect inside a checkpoint, at the price of a broken graph, unless this is set.
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    # Or the graph of an unwatched module would be taken for a watched one of the same class, and count nothing.
    "skip_nnmodule_hook_guards": False,
}


class SdpaRebinding:
    """Rebinds every name of PyTorch's attention while at least one agent is attached."""

    def __init__(self) -> None:
        self._users = 0
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Namespace, name, what it was and what we made it."""
        self._settings_before: dict[str, Any] = {}

    def acquire(self) -> None:
        """Rebind, unless another agent already did."""
        self._users += 1
        if self._users == 1:
            # torch.compile looks PyTorch's functions up by their names, once, when it first meets one. It has to before
            # they are rebound, or it takes ours for PyTorch's and leaves it whole in its graph, counting nothing.
            torch._dynamo.trace_rules.lookup(SDPA)
            from foreshock.monitor.varlen import varlen_attn  # which counts into what is defined here

            for original, ours in ((SDPA, scaled_dot_product_attention), (VARLEN, varlen_attn)):
                for space, name in places_of(original):
                    self._bind(space, name, ours)
            self._bind(vars(F), "multi_head_attention_forward", _mha_copy)
            checkpoints = vars(torch.utils.checkpoint)
            self._bind(checkpoints, "_checkpoint_without_reentrant_generator", _non_reentrant)
            self._bind(checkpoints, "CheckpointFunction", _Reentrant)
            for name, value in _COMPILER_SETTINGS.items():
                if hasattr(torch._dynamo.config, name):  # not every version has each
                    self._settings_before[name] = getattr(torch._dynamo.config, name)
                    setattr(torch._dynamo.config, name, value)

    def _bind(self, space: dict[str, Any], name: str, value: Any) -> None:
        self._places.append((space, name, space[name], value))
        space[name] = value

    def release(self) -> None:
        """Put every name back when the last agent leaves, except those that somebody rebound since."""
        self._users -= 1
        if self._users == 0:
            for space, name, before, ours in reversed(self._places):
                if space.get(name) is ours:
                    space[name] = before
            self._places.clear()
            current.layer, current.outside = None, 0
            for name, value in self._settings_before.items():
                setattr(torch._dynamo.config, name, value)
            self._settings_before.clear()


sdpa_rebinding: Final = SdpaRebinding()


_HOOK_ID: Final = -1
"""The same in every module: with ids of their own, layers compiled one by one would each need a graph of their own, and
torch.compile gives up after eight. PyTorch counts its ids up from 0."""


def watch_module(module: nn.Module, layer: WatchedLayer) -> Callable[[], None]:
    """Let the calls of attention inside this module's forward count into `layer`; returns the undoing."""
    module.__dict__[LAYER_ATTRIBUTE] = layer
    places: list[tuple[dict[Any, Any], Any]] = [
        (module._forward_pre_hooks, _enter),
        (module._forward_hooks, _leave),
        (module._forward_hooks_always_called, True),
    ]
    for place, value in places:
        place[_HOOK_ID] = value

    def undo() -> None:
        for place, _ in places:
            place.pop(_HOOK_ID, None)
        module.__dict__.pop(LAYER_ATTRIBUTE, None)

    return undo
