"""Find the watched layer of an attention call, choose who computes the call, and count its rows.

Each thread stores the layer whose forward it is running. torch.compile supports only plain objects, so traced code
reads one object that is shared by the whole process.

Copies of a watched module are not watched, and can be loaded without foreshock. copy.deepcopy, copy.copy, pickle and
torch.save all get an object's state from `__getstate__`, and an attribute of the instance takes precedence over the
class's method. Code that copies a module's `__dict__` directly copies the hooks and the layer too. They do nothing in a
copy, and are removed when the copy is attached itself or when the agent is closed.
"""

import gc
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, cast
from weakref import WeakSet

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.autograd import forward_ad

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.spec import constants
from foreshock.monitor.attention.probe import probe
from foreshock.monitor.attention.self_check import UNCOMPARED, why_not_proven
from foreshock.monitor.guard import logger

if TYPE_CHECKING:
    from foreshock.monitor.attention.layout_check import LayoutCheck

LAYER_ATTRIBUTE: Final = "_foreshock_layer"
Backend = Literal["native", "kernels"]
NOT_RUN: Final = "its forward or backward did not run through the watched attention"
_EXACT: Final = ("float32", "float64")
"""Numerics that do not round the operands and results of attention to 16 bits."""


class Packed(NamedTuple):
    """Sequences concatenated along one dimension: the offset of each sequence, int32 [N + 1], and the length of the
    longest one, None if it is known only on the device."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def operand_type(query: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch's attention would compute this query."""
    autocast = query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type)
    return torch.get_autocast_dtype(query.device.type) if autocast else query.dtype


def numerics_for(query: Tensor, asked: str) -> Any:
    """Return the Numerics of one call: `asked`, or under "auto" those of the dtype that PyTorch's attention would
    use."""
    if asked != "auto":
        return asked
    if query.dtype == torch.float64:
        return "float64"
    return "kernel" if operand_type(query) in (torch.bfloat16, torch.float16) else "float32"


def _why_not_third_last(query: Tensor, heads: int) -> str | None:
    """Return why the heads of a query with more than four dimensions may not be in its third-last dimension, as in
    [B, windows, heads, S, D]; None if they can only be there."""
    like, third_last = [dim for dim in range(1, query.dim() - 2) if query.shape[dim] == heads > 1], query.dim() - 3
    if len(like) > 1:  # heads are parts of a token's features, so they are closer in memory than tokens
        like = [dim for dim in like if 0 < query.stride(dim) < query.stride(-2)] or like
    if like in ([], [third_last]):
        return None
    unclear = f"which dimension holds its {heads} heads is unclear"
    return f"its query has shape {list(query.shape)}: {unclear}; [B, ..., H, S, D] is measured"


@dataclass(eq=False)
class WatchedLayer:
    """One layer's views of the packed buffers: `state` int64 [H, SLOT_COUNT] and `modes` int32 [H].

    It is stored on the module (LAYER_ATTRIBUTE), so that a recompute and compiled code can find it. Each call is
    computed by our kernels or by the model's own attention; of the latter, a sample of rows is measured.
    """

    name: str
    state: Tensor
    modes: Tensor
    numerics: str
    _: KW_ONLY
    strict: bool = False
    sampling: str = ""
    """Key of the agent's sampling, for the probe."""
    sample_counter: Tensor | None = None
    """The probe's counter, int64 [1]; None if the layer is not sampled by an agent."""
    largest: Tensor | None = None
    """The largest score of all rows of each head, float32 [H], in a step that computes all scores; else -inf."""
    backend: Backend = "kernels"
    """The requested backend. "native": the model's own attention, of which a sample of rows is measured."""
    layout: "LayoutCheck | None" = None
    """Finds the rows of W_Q and W_K that belong to each head."""
    rounds: bool = field(init=False)
    """Whether its attention is computed in a dtype that rounds; under "auto" set by the last training call."""
    has_score_mod: bool = field(default=False, init=False)
    """Whether a call used a score_mod or a block mask, which the pass over all rows does not support."""
    reason: str | None = field(default=None, init=False)
    """Why our kernels could not compute the last training call that stayed native; reset when they are requested."""
    dropout_p: float = field(default=0.0, init=False)
    """The dropout probability of the last training call."""
    computed_by: str = field(default="", init=False)
    """The full name of the function that computed its last sampled call."""
    # Findings of calls. Compiled code only writes these attributes, because reading one would trigger a recompilation.
    kernels: Literal["", "fit", "ran"] = field(default="", init=False)
    """State of our kernels. "fit": they can compute its training calls, unless a comparison shows a difference. "ran":
    they computed one since they were requested."""
    differs: bool = field(default=False, init=False)
    """Whether our kernels differ from PyTorch's attention in the last calls that were compared."""
    stayed_native: set[str] = field(default_factory=set, init=False)
    """Reasons why calls stayed native, each of which was logged."""
    unmeasured: dict[str, None] = field(default_factory=dict, init=False)
    """Reasons why calls were neither computed by our kernels nor measured, in the order of the calls."""
    home: Callable[[], nn.Module | None] = field(default=lambda: None, init=False)
    """A weak reference to the watched module."""
    head_dim: int = field(default=0, init=False)
    """Features of a query in the last call; 0 before the first call. Not set by compiled code."""
    silent: bool = field(default=False, init=False)
    """Whether samples were taken, but did not contain a row of this layer."""
    ran: bool = field(default=False, init=False)
    """Whether its module's forward ran; not set by compiled code."""

    def __post_init__(self) -> None:
        # .data has its own version counter. Views of one buffer share a counter, so one layer's backward would make
        # autograd reject the tensors that the graph of another, separately compiled layer has saved.
        self.state, self.modes = self.state.data, self.modes.data
        self.rounds = self.numerics not in _EXACT
        self.sample_counter = None if self.sample_counter is None else self.sample_counter.data
        self.largest = None if self.largest is None else self.largest.data
        for buffer in (self.state, self.modes, self.sample_counter, self.largest):
            if buffer is not None:  # saves torch.compile's CUDA graphs a copy of it in every step
                torch._dynamo.mark_static_address(buffer, guard=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # an unpickled module is not watched either

    @property
    def why_not_counted(self) -> str:
        """Why the layer did not count any rows, as far as is known."""
        if self.unmeasured:
            return "; ".join(self.unmeasured)
        if self.head_dim:
            again = ", or only backwards that are differentiated again, which are not counted"
            return "no backward ran through it" + ("" if self.backend == "native" else again)
        if self.ran and isinstance(self.home(), nn.MultiheadAttention):
            return "it computes its probabilities itself under need_weights=True, its default; give need_weights=False"
        if self.ran:
            return "its forward pass called no attention function that foreshock supports"
        return NOT_RUN

    def go_on(self, before: "WatchedLayer") -> None:
        """Take over the counts and findings of another layer of the same module."""
        self.state.copy_(before.state)
        for name in ("rounds", "head_dim", "dropout_p", "ran", "unmeasured", "stayed_native"):
            setattr(self, name, getattr(before, name))

    @property
    def idle(self) -> bool:
        """Whether its module's forward ran uncompiled, but no attention call was intercepted or counted. It may wait
        for the device."""
        rows = self.state[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]]
        return self.ran and not self.head_dim and not self.unmeasured and not bool(rows.any())

    def ask(self, backend: Backend) -> None:
        """Request a backend for all later calls; the calls show whether it can compute them."""
        if backend != self.backend:
            self.backend, self.kernels = backend, self.kernels and "fit"
            self.reason = self.reason if backend == "native" else None

    def count_unmeasured_call(self, reason: str) -> None:
        """Record a call that is neither computed by our kernels nor measured; each reason is logged once."""
        if torch.compiler.is_compiling() or reason in self.unmeasured:
            return  # compiled layers without rows are found when a sample is checked
        self.unmeasured[reason] = None
        logger.warning("foreshock: %s is not watched in this call: %s", self.name, reason)

    @property
    def sampled(self) -> bool:
        """Whether its calls stay native, so that a sample of rows is measured in some steps."""
        return self.backend == "native" or self.reason is not None

    def call(
        self, own: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, *, why: str | None, **call: Any
    ) -> Tensor:
        """Return the output [..., H, Sq, D] of a call. Our kernels compute it if they can, else `own`, the model's own
        attention, and a sample of rows is measured. `why` and `call`: as for `on_kernels`."""
        computed = self.on_kernels(query, key, value, why=why, **call)
        return self.probed(own(), query, key, value, **call) if computed is None else computed

    def on_kernels(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        why: str | None = None,
        mask: Tensor | None = None,
        packed: Packed | None = None,
        **scores: Any,
    ) -> Tensor | None:
        """Return the output [B, H, Sq, D] of our kernels; None if the model's own attention has to compute the call.
        `why`: a reason for that which the caller knows; `scores`: causal, window, scale, softcap and dropout_p."""
        if mask is not None:
            why = "it passes a mask"
        elif why is None and (why := self.problem(query, key, value)) is not None and torch.compiler.is_compiling():
            why = "our kernels do not take its operands"  # without sizes, which may be symbols in a graph
        if why is None and self.backend == "kernels":
            why = self._why_not_proven(query, key, packed, **scores)
            if why is None:
                return self.attend(query, key, value, packed, **scores)
            self.differs = why != UNCOMPARED
        if why is not None:
            self.keep_call(why)
        elif torch.is_grad_enabled():
            self.kernels = "fit"
        return None

    def keep_call(self, reason: str) -> None:
        """Record a call that our kernels cannot compute; each reason is logged once."""
        if torch.is_grad_enabled():
            self.reason = reason
        if not torch.compiler.is_compiling() and reason not in self.stayed_native:
            self.stayed_native.add(reason)
            logger.info("foreshock: %s keeps its own attention in this call: %s", self.name, reason)

    def problem(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Return why our kernels cannot compute a call with query [B, H, Sq, D], key and value [B, Hkv, Sk, D]; None if
        they can."""
        if (reason := self._misfit(query, key, value)) is not None:
            return reason
        if query.dim() != 4 or key.shape[0] != query.shape[0]:
            shapes = f"its query has shape {list(query.shape)}, its key {list(key.shape)}"
            return f"{shapes}; our kernels take [B, H, S, D]"
        if key.shape[3] != query.shape[3] or value.shape[3] != query.shape[3]:
            return f"its queries have {query.shape[3]} features, its values {value.shape[3]}"
        numerics, head_dim = numerics_for(query, self.numerics), query.shape[3]
        if query.device.type == "cpu":
            return None
        if self.numerics == "auto" and numerics != "kernel":
            # The reference implementation would be correct, but its memory grows with the square of the length.
            return (
                f"its operands are {str(query.dtype).removeprefix('torch.')}; the kernels are for 16 bits. Train under "
                "autocast, or ask for numerics='float32', which is slow"
            )
        if numerics == "kernel" and (head_dim % 8 or head_dim > 256):  # else torch.compile makes a graph that fails
            return f"its head dim is {head_dim}; the kernels support multiples of 8 up to 256"
        return None

    def _misfit(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Return why a call can be neither computed by our kernels nor measured; None if it can."""
        heads = self.state.shape[0]
        if query.is_nested:
            return "its query is a nested tensor; [B, H, S, D] is measured"
        shapes = [list(x.shape) for x in (query, key, value)]
        if query.dim() < 4 and not (query.dim() == 3 and heads == 1):
            return f"its query has shape {shapes[0]}; [B, H, S, D] is measured"
        if query.dim() > 4 and (reason := _why_not_third_last(query, heads)) is not None:
            return reason
        if query.dim() >= 4 and query.shape[-3] != heads:
            return f"its query has {query.shape[-3]} heads, {heads} were announced; attach(heads=...) announces others"
        apart = key.dim() != query.dim() or value.shape[:-1] != key.shape[:-1]
        if apart or any(q != k and 1 not in (q, k) for q, k in zip(query.shape[:-3], key.shape[:-3], strict=True)):
            return "its query has shape {}, its key {}, its value {}".format(*shapes)
        if query.dim() >= 4 and query.shape[-3] % key.shape[-3]:
            return f"its query has {query.shape[-3]} heads, its key {key.shape[-3]}"
        if query.device != self.state.device:
            return f"it runs on {query.device}, but was on {self.state.device} when attached; attach after moving it"
        return None

    def _why_not_proven(
        self, query: Tensor, key: Tensor, packed: Packed | None, *, scale: float | None = None, **scores: Any
    ) -> str | None:
        """Return why our kernels are not proven to agree with PyTorch's attention in calls of this kind, None if they
        are."""
        numerics = numerics_for(query, self.numerics)
        # sizes may be symbols in compiled code; index() turns them into constants
        head_dim, group = operator.index(query.shape[3]), operator.index(query.shape[1] // key.shape[1])
        (softcap,) = constants(scores.get("softcap", 0.0))
        if scale is not None:
            (scale,) = constants(scale)
        kind = (str(query.device), str(operand_type(query)).removeprefix("torch."), numerics, head_dim, group)
        rule = scores["causal"], scores.get("window", (-1, -1)), softcap, scale
        return cast("str | None", why_not_proven(*kind, *rule, packed is not None))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed | None, **options: Any) -> Tensor | None:
        """Return the output of our operator, [B, H, Sq, D], or None if the operator rejects this call."""
        given = options | {
            "numerics": numerics_for(query, self.numerics),
            "state": self.state,
            "modes": self.modes,
            **({} if packed is None else packed._asdict()),
        }
        if torch.compiler.is_compiling():
            out = cast(Tensor, flash_attention(query, key, value, **given))
        else:
            try:
                out = cast(Tensor, flash_attention(query, key, value, **given))
            except Exception as refused:
                if self.strict and not isinstance(refused, ValueError):
                    raise
                self.keep_call(str(refused) or type(refused).__name__)
                return None
        self._meets(query, key, value, out, **options)
        if torch.is_grad_enabled():
            self.kernels, self.differs = "ran", False
        return out

    def _meets(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **options: Any) -> bool:
        """Record a call and its output; return whether a backward will run through it."""
        if self.layout is not None:
            self.layout.observe_call(query, key, value)
        if torch.is_grad_enabled():
            self.dropout_p = options.get("dropout_p", 0.0)
            self.rounds = numerics_for(query, self.numerics) not in _EXACT
        if not torch.compiler.is_compiling():
            self.head_dim = query.shape[-1]
            if torch.is_grad_enabled() and not out.requires_grad:
                self.count_unmeasured_call("nothing that it depends on is trained, so no backward runs through it")
        return out.requires_grad

    def refusal(self, mode: int) -> str | None:
        """Return why this layer's heads cannot be switched to a mode, as far as its calls show; None if they can."""
        if mode and self.silent and not self.head_dim:
            return f"none of its calls is met: {self.why_not_counted}"
        could = bool(self.kernels) and not self.differs
        if not mode or self.reason is None or could:
            return None
        return f"its own attention stays in every call: {self.reason}; a switch would change nothing"

    def probed(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        packed: Packed | None = None,
        by: str = "torch.nn.functional.scaled_dot_product_attention",
        **options: Any,
    ) -> Tensor:
        """Return `out` [..., H, Sq, D], which the model's own attention, the function `by`, computed. Its backward
        measures a sample of rows if one is due."""
        if not self._meets(query, key, value, out, **options) or self.sample_counter is None:
            return out
        if (reason := self._misfit(query, key, value)) is not None:
            self.count_unmeasured_call(reason)
            return out
        self.computed_by = by
        ends = None if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
        where = self.state, self.sample_counter, self.sampling
        if options.get("score_mod") is None:
            options["largest"] = self.largest
        else:
            self.has_score_mod = True
        numerics = numerics_for(query, self.numerics)
        return probe(out, query, key, value, *where, numerics=numerics, cu_seqlens=ends, **options)


LAYOUT_ATTRIBUTE: Final = "_foreshock_layout"
"""Attribute of a projection whose outputs are recorded to find its heads (layout_check.py)."""
_NAME: Final = "__getstate__"
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_TRAITS_OF_HOOKS: Final = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def _state_without_us(module: nn.Module) -> Any:
    state = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    return _stripped(dict(state))


def _stripped(state: dict[str, Any]) -> dict[str, Any]:
    """Remove our attributes and hooks from `state`, a module's attributes, and return it. Dictionaries of hooks may be
    shared, so they are replaced by new ones instead of changed."""
    for name in (_NAME, LAYER_ATTRIBUTE, LAYOUT_ATTRIBUTE):
        state.pop(name, None)
    for hooks in _HOOKS:
        ours = {number for number, hook in state[hooks].items() if is_ours(hook)}
        for name in (hooks, *_TRAITS_OF_HOOKS[hooks]):
            kept = state[name].copy()
            for number in ours:
                kept.pop(number, None)
            state[name] = kept
    return state


def is_watched(module: nn.Module) -> bool:
    """Whether an agent watches this very module. If it is a copy of a watched module, remove our attributes from it."""
    if LAYER_ATTRIBUTE not in vars(module):
        return False
    layer = vars(module)[LAYER_ATTRIBUTE]
    if isinstance(layer, WatchedLayer) and layer.home() is module:
        return True
    _stripped(vars(module))
    return False


def clean_copies(hook: Callable[..., Any]) -> None:
    """Remove our attributes and hooks from every module that has `hook`, as each watched module does, but is not
    watched itself."""
    # Skip the globals of the module that defines the hook: they would always make a second walk of the heap necessary.
    own = getattr(hook, "__globals__", None)
    dicts = [each for each in gc.get_referrers(hook) if isinstance(each, dict) and each is not own]
    held = [each for each in dicts if hook in each.values()]
    for owner in gc.get_referrers(*held) if held else ():
        # An object's attributes are a separate dictionary or, in newer versions of Python, part of the object.
        space = vars(owner) if issubclass(type(owner), nn.Module) else owner
        if isinstance(space, dict) and any(space.get(name) in held for name in _HOOKS):
            layer = space.get(LAYER_ATTRIBUTE)
            home = layer.home() if isinstance(layer, WatchedLayer) else None
            if home is None or vars(home) is not space:
                _stripped(space)


def is_ours(hook: object) -> bool:
    """Whether the agent registered this hook of a module."""
    return str(getattr(hook, "__module__", "")).startswith("foreshock.monitor.")


def leave_no_trace_in_copies(module: nn.Module) -> Callable[[], None]:
    """Omit our hooks and our layer from copies and pickles of `module`. Returns a function that undoes this, to be
    called after they were removed from `module`."""
    vars(module)[_NAME] = types.MethodType(_state_without_us, module)

    def undo() -> None:
        hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
        if LAYER_ATTRIBUTE not in vars(module) and not any(is_ours(hook) for hook in hooks):
            vars(module).pop(_NAME, None)

    return undo


_LOOKED_AT: Final = 256
"""The number of calls outside every watched module whose calling module is searched for."""


class _OfThread(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        self.layer: WatchedLayer | None = None
        self.frame: FrameType | None = None
        """The frame that calls the layer's forward; None in a recompute."""
        self.outer: list[tuple[WatchedLayer | None, FrameType | None]] = []
        """Layers whose forward called the current layer's forward, the outermost first."""
        self.intercepted = False
        """Whether an attention call was intercepted, and computed or measured."""


class _Traced:
    # With a __dict__, code that torch 2.13 traces would read outdated values from before its last subgraph (such as
    # that of flex_attention).
    __slots__ = ("entered", "intercepted", "layer")

    def __init__(self) -> None:
        self.layer: WatchedLayer | None = None
        self.intercepted = False
        self.entered = False
        """Whether compiled code entered the layer, and not an uncompiled hook: a call after a graph break finds the
        layer here."""


class Scout(Protocol):
    """Collects the modules that call attention without being watched."""

    def note_call(self, module: nn.Module, query: Tensor, key: Tensor) -> bool:
        """Receive a call of attention by `module`, with query [..., H, S, D] and key [..., Hkv, S, D]; return whether
        it was recorded."""


class _Outside:
    calls: int = 0
    """Attention calls outside every watched module, in the whole process."""
    trained: int = 0
    """Those of them whose queries or keys need gradients: not calls of evaluation, an averaged model or a teacher."""
    layers: Final[WeakSet[WatchedLayer]] = WeakSet()
    """The layers of all attached agents."""
    scouts: Final[WeakSet[Scout]] = WeakSet()
    """The scouts of agents in their first step."""


_mine: Final = _OfThread()
_traced: Final = _Traced()
outside: Final = _Outside()


def enter(layer: WatchedLayer | None) -> None:
    """Record that the forward of this layer's module begins. Only the module's hook may call this function, because it
    takes the frame of the hook's caller."""
    _traced.layer = layer
    _traced.entered = torch.compiler.is_compiling()
    if not torch.compiler.is_compiling():
        _leave_what_was_interrupted()
        if _mine.layer is not None:
            _mine.outer.append((_mine.layer, _mine.frame))
        _mine.layer, _mine.frame = layer, sys._getframe(2)
        if layer is not None:
            layer.ran = True


def leave(*_: object) -> None:
    """Record that the forward ended and the layer that called it continues; traced code forgets both. This is a hook
    of the module."""
    _traced.layer = None
    if not torch.compiler.is_compiling():
        _mine.layer, _mine.frame = _mine.outer.pop() if _mine.outer else (None, None)
        _traced.layer = _mine.layer


@contextmanager
def again_in(layer: WatchedLayer) -> Iterator[None]:
    """Assign calls to `layer` while only a part of its forward is recomputed; not to be used under torch.compile."""
    before = _traced.layer, _mine.layer, _mine.frame, _mine.outer
    _traced.layer, _mine.layer, _mine.frame, _mine.outer = layer, layer, None, []
    try:
        yield
    finally:
        _traced.layer, _mine.layer, _mine.frame, _mine.outer = before


def layer_of_this_call() -> WatchedLayer | None:
    """Return the layer whose forward is running in this thread; None if this call does not belong to a layer or must
    not be changed."""
    # A transformed or exported model must not contain foreshock. (While torch 2.11 traces, is_exporting() returns True
    # for every compiled model; the flag that it reads is correct.)
    if torch.compiler.is_compiling():
        return None if torch.compiler._is_exporting_flag else _traced.layer
    if transformed():
        return None
    if _mine.layer is None:
        return _traced.layer if _traced.entered else None
    _leave_what_was_interrupted()
    return _mine.layer


def transformed() -> bool:
    """Whether torch.func, a tracer or forward mode runs the model, which must then run without foreshock."""
    functorch = torch._C._are_functorch_transforms_active()
    return functorch or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0


def _leave_what_was_interrupted() -> None:
    # The hook after a forward does not run if KeyboardInterrupt or SystemExit ended the forward: then the frame that
    # called the forward is not running any more.
    while _mine.frame is not None and not _is_running(_mine.frame):
        leave()


def _is_running(called: FrameType) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not called:
        frame = frame.f_back
    return frame is not None


def forget() -> None:
    """Reset the state of this thread and of the process after the last agent was closed."""
    _mine.outer.clear()
    leave()
    _traced.entered, outside.calls, outside.trained = False, 0, 0


def note_interception(query: Tensor | None = None, key: Tensor | None = None) -> None:
    """Record that an attention call in a watched forward was intercepted, with query [..., H, S, D] and key
    [..., Hkv, S, D]."""
    _traced.intercepted = True
    if not torch.compiler.is_compiling():
        _mine.intercepted = True
        if outside.scouts and query is not None and key is not None:
            tell_scouts(next(_running_modules(), None), query, key)


def expect_interception() -> None:
    """Reset `was_intercepted` before a call of attention."""
    # Traced code only writes the flag: reading the value of an earlier run would compile a second graph.
    _traced.intercepted = False
    if not torch.compiler.is_compiling():
        _mine.intercepted = False


def was_intercepted() -> bool:
    """Whether an attention call was intercepted since `expect_interception` was last called."""
    return _traced.intercepted if torch.compiler.is_compiling() else _mine.intercepted


def note_call_outside(query: Tensor, key: Tensor) -> None:
    """Count an attention call that is not watched, with query [..., H, S, D] and key [..., Hkv, S, D]."""
    if torch.compiler.is_compiling() or query.is_meta:  # shapes without values, for example to count operations
        return
    if _mine.layer is not None:
        _mine.layer.count_unmeasured_call(
            "torch.func, forward mode or a tracer runs it, and sees the model without foreshock"
        )
        return
    # Inside a backward, but outside every watched module: a recompute lost the layer of the call. PyTorch's own
    # attention computes it, so its rows are not counted, and rounded differently than in the first pass.
    recomputed = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1 and not outside.calls
    if recomputed and any(layer.backend == "kernels" for layer in list(outside.layers)):
        logger.warning(
            "foreshock: attention is recomputed in a backward, and its layer is not known: the checkpointing in use is "
            "not PyTorch's. Its rows are not counted. Training continues. Use torch.utils.checkpoint, or checkpoint "
            "whole attention modules or blocks"
        )
    if (outside.scouts or outside.calls < _LOOKED_AT) and tell_scouts(_caller(), query, key):
        return
    outside.calls += 1
    outside.trained += torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)


def tell_scouts(module: nn.Module | None, query: Tensor, key: Tensor) -> bool:
    """Report an attention call of `module` that is not watched; return whether an agent recorded it, to watch the
    module from now on."""
    if module is None or transformed():
        return False
    noted = [scout.note_call(module, query, key) for scout in list(outside.scouts)]
    return any(noted)


def _caller() -> nn.Module | None:
    """Return the innermost module whose forward is running, None if there is none. If a watched module is among those
    running, record in its layer that its hooks did not run, and return None."""
    running = list(_running_modules())
    for module in running:
        if isinstance(layer := vars(module).get(LAYER_ATTRIBUTE), WatchedLayer):
            layer.count_unmeasured_call(
                "its code is called past the hooks of PyTorch, as by .forward(x); call the module itself"
            )
            return None
    return next(iter(running), None)


def _running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward is running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only frames that end soon: before Python 3.13, reading a frame's locals keeps their current values alive until
        # the frame ends, and the locals of a training loop include a loss with its graph.
        if frame.f_code.co_name in ("forward", "_call_impl"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back
