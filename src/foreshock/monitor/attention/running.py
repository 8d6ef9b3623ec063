"""Which layer's forward is running, and what is called outside every one of them.

Each thread has its own, but torch.compile follows only plain objects: what is traced reads one for the whole process.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, logger

_LOOKED_AT: Final = 256
"""Calls outside every watched module that are asked where they come from."""


class _OfThread(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        self.layer: WatchedLayer | None = None
        self.frame: FrameType | None = None
        """The frame of its forward's call; None in a recompute."""
        self.outer: list[tuple[WatchedLayer | None, FrameType | None]] = []
        """Layers whose forward called that of the running one, the outermost first."""
        self.intercepted = False
        """A call of PyTorch's attention was met, and served or measured as what it is."""


class _Traced:
    # With a __dict__, what torch 2.13 traces would read what stood here before its last subgraph, as flex_attention's.
    __slots__ = ("entered", "intercepted", "layer")

    def __init__(self) -> None:
        self.layer: WatchedLayer | None = None
        self.intercepted = False
        self.entered = False
        """Compiled code entered the layer, and not a hook that ran by itself: a call behind a graph break finds it
        here."""


class Scout(Protocol):
    """Wants to know which modules call attention that is not watched."""

    def note_call(self, module: nn.Module, query: Tensor, key: Tensor) -> bool:
        """`module` calls attention with query [..., H, S, D] and key [..., Hkv, S, D]; whether it takes note of it."""


class _Outside:
    calls: int = 0
    """Calls of attention outside every watched module, in the whole process."""
    trained: int = 0
    """Those of them that may train: not of evaluation, of an average or of a teacher."""
    layers: Final[WeakSet[WatchedLayer]] = WeakSet()
    """Layers of every agent attached."""
    scouts: Final[WeakSet[Scout]] = WeakSet()
    """Of agents whose first step is under way."""


_mine: Final = _OfThread()
_traced: Final = _Traced()
outside: Final = _Outside()


def enter(layer: WatchedLayer | None) -> None:
    """The forward of this layer's module begins; called by the hook that its caller calls."""
    _traced.layer = layer
    _traced.entered = torch.compiler.is_compiling()
    if not torch.compiler.is_compiling():
        _leave_what_was_interrupted()
        if _mine.layer is not None:
            _mine.outer.append((_mine.layer, _mine.frame))
        _mine.layer, _mine.frame = layer, sys._getframe(2)
        if layer is not None:
            layer.ran = True


def leave() -> None:
    """That forward is over; the one that called it goes on. What is traced forgets both."""
    _traced.layer = None
    if not torch.compiler.is_compiling():
        _mine.layer, _mine.frame = _mine.outer.pop() if _mine.outer else (None, None)
        _traced.layer = _mine.layer


@contextmanager
def again_in(layer: WatchedLayer) -> Iterator[None]:
    """Part of a layer's forward is computed again, by itself; never under torch.compile."""
    before = _traced.layer, _mine.layer, _mine.frame, _mine.outer
    _traced.layer, _mine.layer, _mine.frame, _mine.outer = layer, layer, None, []
    try:
        yield
    finally:
        _traced.layer, _mine.layer, _mine.frame, _mine.outer = before


def layer_of_this_call() -> WatchedLayer | None:
    """The layer whose forward is running in this thread; None where the call is none of its business."""
    # What is transformed or exported is to be the model's own, without us. (Traced by torch 2.11, is_exporting() says
    # True of every compiled model; the flag behind it is right.)
    if torch.compiler.is_compiling():
        return None if torch.compiler._is_exporting_flag else _traced.layer
    if _transformed():
        return None
    if _mine.layer is None:
        return _traced.layer if _traced.entered else None
    _leave_what_was_interrupted()
    return _mine.layer


def _transformed() -> bool:
    """Whether torch.func, a tracer or forward mode runs the model, which is then to be the model's own."""
    functorch = torch._C._are_functorch_transforms_active()
    return functorch or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0


def _leave_what_was_interrupted() -> None:
    # The hook after a forward does not run where KeyboardInterrupt or SystemExit left it: its frame shows that.
    while _mine.frame is not None and not _is_running(_mine.frame):
        leave()


def _is_running(called: FrameType) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not called:
        frame = frame.f_back
    return frame is not None


def forget() -> None:
    """No agent is attached any more."""
    _mine.outer.clear()
    leave()
    _traced.entered, outside.calls, outside.trained = False, 0, 0


def note_interception(query: Tensor | None = None, key: Tensor | None = None) -> None:
    """An attention was called in a watched forward, with query [..., H, S, D] and key [..., Hkv, S, D], and met."""
    _traced.intercepted = True
    if not torch.compiler.is_compiling():
        _mine.intercepted = True
        if outside.scouts and query is not None and key is not None:
            tell_scouts(next(_running_modules(), None), query, key)


def expect_interception() -> None:
    """From now on it matters whether one is met."""
    # What is traced only writes it: to read what an earlier run left would make a second graph.
    _traced.intercepted = False
    if not torch.compiler.is_compiling():
        _mine.intercepted = False


def was_intercepted() -> bool:
    """Whether the call was intercepted since `expect_interception` was last called."""
    return _traced.intercepted if torch.compiler.is_compiling() else _mine.intercepted


def note_call_outside(query: Tensor, key: Tensor) -> None:
    """Count a call of attention that is not watched, with query [..., H, S, D] and key [..., Hkv, S, D]."""
    if torch.compiler.is_compiling() or query.is_meta:  # shapes without numbers, as of somebody who counts operations
        return
    if _mine.layer is not None:
        _mine.layer.leave_alone("torch.func, forward mode or a tracer runs it, and sees the model without foreshock")
        return
    # Inside a backward and in no watched module: something recomputes an attention call, and lost its layer on the way.
    # PyTorch's own attention computes it: it is counted nowhere, and rounded otherwise than in its first pass.
    recomputed = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1 and not outside.calls
    if recomputed and any(not layer.keeps for layer in list(outside.layers)):
        logger.warning(
            "foreshock: attention is recomputed in a backward, and its layer is not known: the checkpointing in use is "
            "not PyTorch's. Its rows are not counted. Training continues. Use torch.utils.checkpoint, or checkpoint "
            "whole attention modules or blocks"
        )
    if (outside.scouts or outside.calls < _LOOKED_AT) and tell_scouts(_caller(), query, key):
        return
    outside.calls += 1
    outside.trained += torch.is_grad_enabled()


def tell_scouts(module: nn.Module | None, query: Tensor, key: Tensor) -> bool:
    """`module` calls attention that is not watched; whether an agent takes note of it, to watch it from now on."""
    if module is None or _transformed():
        return False
    noted = [scout.note_call(module, query, key) for scout in list(outside.scouts)]
    return any(noted)


def _caller() -> nn.Module | None:
    """The innermost module whose forward is running; a watched one among those running learns that no hook of it ran.
    None then, and where none is running."""
    running = list(_running_modules())
    for module in running:
        if isinstance(layer := vars(module).get(LAYER_ATTRIBUTE), WatchedLayer):
            layer.leave_alone("its code is called past the hooks of PyTorch, as by .forward(x); call the module itself")
            return None
    return next(iter(running), None)


def _running_modules() -> Iterator[nn.Module]:
    """Modules whose forward is running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Frames alone that end soon: before Python 3.13 a frame that was asked for its locals keeps them alive as they
        # are now until it ends, and those of a training loop are a loss with its graph.
        if frame.f_code.co_name in ("forward", "_call_impl"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back
