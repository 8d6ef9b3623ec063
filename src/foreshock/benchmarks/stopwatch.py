"""How calls of attention are timed: in turn, with device events, each pass by itself."""

import gc
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

PASSES = ("forward", "backward", "both")

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query [B, H, Sq, D], key and value [B, Hkv, Sk, D] to the output [B, H, Sq, D]."""


class Stopwatch:
    """Times calls in turn, each after a write of 256 MB that empties the cache of the last one's data."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def medians(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each call: the median of its repeats."""
        for call in calls.values():
            for _ in range(2):
                _prepare(call)
                call()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()  # as timeit does: a collection takes longer than any of these calls
        for _ in range(self.repeats):
            for name, call in calls.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                _prepare(call)
                self.flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        gc.enable()
        torch.cuda.synchronize()
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


class _Backward:
    """The backward of a forward that `prepare` makes: one that goes through a kept graph again counts no rows."""

    def __init__(self, call: Contender, tensors: tuple[Tensor, ...], grad: Tensor) -> None:
        self._call, self._tensors, self._grad = call, tensors, grad
        self._out: Tensor | None = None

    def prepare(self) -> None:
        self._out = self._call(*self._tensors)

    def __call__(self) -> object:
        out, self._out = self._out, None
        assert out is not None
        return torch.autograd.grad(out, self._tensors, self._grad)


def _prepare(call: Callable[[], object]) -> None:
    if isinstance(call, _Backward):
        call.prepare()


def passes(call: Contender, tensors: tuple[Tensor, ...], grad: Tensor) -> dict[str, Callable[[], object]]:
    """Forward, backward and both of one contender on the same tensors."""
    with torch.no_grad():
        call(*tensors)

    def forward() -> object:
        with torch.no_grad():
            return call(*tensors)

    return {
        "forward": forward,
        "backward": _Backward(call, tensors, grad),
        "both": lambda: torch.autograd.grad(call(*tensors), tensors, grad),
    }
