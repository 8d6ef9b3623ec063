"""The agent's few numbers in the experiment tracker that the run uses already: off by default, never in the way.

A thread of its own calls the tracker's client library, so that a slow one delays nobody. What does not fit into its
short queue is dropped and counted as a fault; after three faults in a row the mirror is off for the rest of the run.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor.guard import Guard
from foreshock.monitor.sampling.collector import Counted

Numbers = Mapping[str, float]
Log = Callable[[Numbers, int], None]
"""Takes the numbers of a step to the tracker."""

TRACKERS: Final = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "trackio": "trackio"}
"""Tracker and the module that is imported for it."""
_QUEUE: Final = 64
_PREFIX: Final = "foreshock/"


def parts_of_mirror(mirror: str) -> tuple[str, str]:
    """`tensorboard:FOLDER` in its two parts. Raises ValueError for an unknown tracker or one without its folder."""
    tracker, _, folder = mirror.partition(":")
    if tracker not in TRACKERS:
        raise ValueError(
            f"mirror {mirror[:100]!r} is no tracker; allowed are wandb, tensorboard:FOLDER, mlflow, trackio"
        )
    if (tracker == "tensorboard") != bool(folder):
        raise ValueError(
            "mirror='tensorboard' needs the folder of the run's logs: mirror='tensorboard:FOLDER'"
            if tracker == "tensorboard"
            else f"mirror={tracker!r} takes no folder; it writes into the run that {tracker} has open"
        )
    return tracker, folder


class Mirror:
    """Mirrors samples and warnings to `mirror` (see `AgentConfig.mirror`) from `start` to `close`."""

    def __init__(self, mirror: str, guard: Guard) -> None:
        self._tracker, self._folder = parts_of_mirror(mirror)
        self._guard = guard
        self._queue: queue.Queue[tuple[Numbers, int] | None] = queue.Queue(_QUEUE)
        self._warnings: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the tracker, in the thread and context in which the program opened its own run."""
        with self._guard:
            log, close = _OPEN[self._tracker](self._folder)
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._work, log, close), name="foreshock-mirror", daemon=True
            )
            self._thread.start()

    def warned(self, verdict: wire.Verdict) -> None:
        """Count a warning as active, or no longer."""
        if verdict.state == "cleared":
            self._warnings.discard(verdict.id)
        elif verdict.severity != "info":
            self._warnings.add(verdict.id)

    def sampled(self, counted: Counted) -> None:
        """Mirror the numbers of a sample; returns at once. Raises queue.Full where the tracker does not keep up."""
        if self._thread is not None:
            self._queue.put_nowait((self._numbers(counted), counted.step))

    def _numbers(self, counted: Counted) -> Numbers:
        offsets = catalog.read("head.score_offset", counted.words)
        scores = slot_values(counted.words, Slot.ROW_MAX_ABS)
        numbers = {
            "worst_score_offset": _largest(offsets),
            "largest_score": _largest(scores),
            "max_attention_logit": float(np.fmax.reduce(catalog.read("head.score_max", counted.words), initial=np.nan)),
            "attention_entropy": float(np.fmin.reduce(catalog.read("head.entropy", counted.words), initial=np.nan)),
            "active_warnings": float(len(self._warnings)),
            "switched_heads": float(np.count_nonzero(counted.modes)),
        }
        if "clip_factor" in counted.norms:
            numbers["qk_clip_factor"] = float(counted.norms["clip_factor"].min())
            numbers["qk_clipped_heads"] = float(np.count_nonzero(counted.norms["clipped_steps"]))
        # trackers draw no gap for NaN, so that what was not counted is left out
        return {_PREFIX + name: value for name, value in numbers.items() if np.isfinite(value)}

    def _work(self, log: Log, close: Callable[[], None]) -> None:
        while (item := self._queue.get()) is not None:
            self._guard.run(log, *item)
        self._guard.run(close)

    def end(self) -> None:
        """Nothing more is mirrored; the thread hands the rest over and ends."""
        if self._queue.full():  # only this thread puts, so that one less makes room
            with suppress(queue.Empty):
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait for that, for at most `seconds`; a client that hangs is left to its daemon thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(max(seconds, 0.0))


def _largest(values: Any) -> float:
    """The value that is largest in size, with its sign; NaN where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[np.argmax(np.abs(finite))]) if finite.size else float("nan")


def _wandb(folder: str) -> tuple[Log, Callable[[], None]]:
    run = import_module("wandb").run
    if run is None:
        raise RuntimeError("wandb has no run open; call wandb.init before the first step")
    run.define_metric(_PREFIX + "step")
    run.define_metric(_PREFIX + "*", step_metric=_PREFIX + "step")
    # a commit would move wandb's own step, which belongs to the program: the numbers travel with its next log
    return lambda numbers, step: run.log({**numbers, _PREFIX + "step": step}, commit=False), _nothing


def _tensorboard(folder: str) -> tuple[Log, Callable[[], None]]:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(folder, filename_suffix=".foreshock")

    def log(numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _mlflow(folder: str) -> tuple[Log, Callable[[], None]]:
    mlflow = import_module("mlflow")
    run = mlflow.active_run()
    if run is None:
        raise RuntimeError("mlflow has no run open; call mlflow.start_run before the first step")
    # named, since the open run is one of the thread that opened it
    return lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step, run_id=run.info.run_id), _nothing


def _trackio(folder: str) -> tuple[Log, Callable[[], None]]:
    trackio = import_module("trackio")
    return lambda numbers, step: trackio.log(dict(numbers), step=step), _nothing


def _nothing() -> None:
    """The program closes the run that it opened."""


_OPEN: Final = {"wandb": _wandb, "tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio}
