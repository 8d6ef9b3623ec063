"""Copy a few of the agent's numbers and its warnings to the run's tracker or collector; off by default.

A separate thread calls the client library, so that a slow client does not delay training. Items that do not fit into
its short queue are dropped and counted as errors; after three errors in a row, the mirror is off for the rest of the
run.
"""

import contextvars
import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor.guard import Guard, logger
from foreshock.monitor.sampling import Counted

_QUEUE: Final = 64
_PREFIX: Final = "foreshock/"


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The numbers of one sample, without NaN, because trackers do not draw a gap for NaN."""

    step: int
    numbers: Mapping[str, float]
    training: Mapping[str, float]
    """loss and grad_norm; most trackers get them from the program itself."""
    max_attention_logits: Mapping[int, float]
    """By layer."""


class Tracker:
    """One client library."""

    module: ClassVar[str]
    install: ClassVar[str]
    """Package for pip install."""
    opened_by: ClassVar[str] = ""
    """The call with which the program opens a run."""

    @classmethod
    def join(cls, **where: Any) -> "Tracker | None":
        """Create the tracker for the mirror's folder and this run, rank and world size; None if no run is open yet."""
        return cls(**where)

    def log(self, sample: Mirrored) -> None:
        """Log the numbers of a sample."""

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        """Send an alert about a raised warning; page: the run's page in parentheses, or ""."""

    def verdict(self, verdict: wire.Verdict) -> None:
        """Log that a head's warning was raised, updated or cleared."""

    def close(self) -> None:
        """End the tracker, but do not close a run that the program opened."""


class _Wandb(Tracker):
    module, install, opened_by = "wandb", "wandb", "wandb.init"

    @classmethod
    def join(cls, **_: Any) -> "Tracker | None":
        run = import_module("wandb").run
        return None if run is None else cls(run)

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(_PREFIX + "step")
        run.define_metric(_PREFIX + "*", step_metric=_PREFIX + "step")

    def log(self, sample: Mirrored) -> None:
        # a commit would increment wandb's step, which the program controls, so send with the program's next log call
        self._run.log({**_prefixed(sample.numbers), _PREFIX + "step": sample.step}, commit=False)

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        self._run.alert(title=_title(verdict), text=f"{verdict.sentence}{page}", level=_level(verdict))


class _TensorBoard(Tracker):
    module, install = "tensorboard", "tensorboard"

    def __init__(self, *, folder: str, **_: Any) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(folder, filename_suffix=".foreshock")

    def log(self, sample: Mirrored) -> None:
        for name, value in _prefixed(sample.numbers).items():
            self._writer.add_scalar(name, value, sample.step)

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        self._writer.add_text(_PREFIX + "warnings", f"{verdict.sentence}{page}", verdict.step)

    def close(self) -> None:
        self._writer.close()


class _MLflow(Tracker):
    module, install, opened_by = "mlflow", "mlflow", "mlflow.start_run"

    @classmethod
    def join(cls, **_: Any) -> "Tracker | None":
        run = import_module("mlflow").active_run()
        return None if run is None else cls(run.info.run_id)

    def __init__(self, run_id: str) -> None:
        # stored, because the active run is known only to the thread that opened it
        self._run_id = run_id

    def log(self, sample: Mirrored) -> None:
        import_module("mlflow").log_metrics(_prefixed(sample.numbers), step=sample.step, run_id=self._run_id)

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        client = import_module("mlflow").MlflowClient()
        client.set_tag(self._run_id, "foreshock.warning", f"step {verdict.step:,}: {verdict.sentence}{page}")


class _Trackio(Tracker):
    module, install, opened_by = "trackio", "trackio", "trackio.init"

    @classmethod
    def join(cls, **_: Any) -> "Tracker | None":
        current = getattr(import_module("trackio"), "context_vars", None)
        return None if current is not None and current.current_run.get() is None else cls()

    def __init__(self) -> None:
        self._module = import_module("trackio")

    def log(self, sample: Mirrored) -> None:
        self._module.log(_prefixed(sample.numbers), step=sample.step)

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        level = self._module.AlertLevel[_level(verdict)]
        self._module.alert(title=_title(verdict), text=f"{verdict.sentence}{page}", level=level)


class _Otlp(Tracker):
    """OpenTelemetry's own exporter, configured by its OTEL_* variables. It uses the resource names of NVIDIA's NeMo
    Lens, so that one query can join these numbers with Megatron's."""

    module, install = "opentelemetry.exporter.otlp.proto.http", "'foreshock[otlp]'"

    def __init__(self, *, run: str, rank: int, world_size: int, **_: Any) -> None:
        export = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        export_logs = import_module("opentelemetry.exporter.otlp.proto.http._log_exporter")
        metrics = import_module("opentelemetry.sdk.metrics")
        reading = import_module("opentelemetry.sdk.metrics.export")
        logs = import_module("opentelemetry.sdk._logs")
        processing = import_module("opentelemetry.sdk._logs.export")
        resources = import_module("opentelemetry.sdk.resources")
        who = {
            "service.name": "foreshock",
            "service.instance.id": f"{run}-rank{rank}",
            "foreshock.run": run,
            "nemo.run.id": run,
            "nv.dl.rank": rank,
            "nv.dl.world_size": world_size,
        }
        # resource attributes in the environment take precedence: a job may set one run id for all processes there
        resource = resources.Resource.create(who).merge(resources.OTELResourceDetector().detect())
        reader = reading.PeriodicExportingMetricReader(export.OTLPMetricExporter())
        self._metrics = metrics.MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._logs = logs.LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(processing.BatchLogRecordProcessor(export_logs.OTLPLogExporter()))
        self._meter = self._metrics.get_meter("foreshock")
        self._logger = self._logs.get_logger("foreshock")
        self._severities = import_module("opentelemetry._logs").SeverityNumber
        self._gauges: dict[str, Any] = {}

    def _set(self, name: str, value: float, **attributes: int) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(f"foreshock.{name}")
        self._gauges[name].set(value, attributes)

    def log(self, sample: Mirrored) -> None:
        for name, value in {"step": float(sample.step), **sample.training, **sample.numbers}.items():
            if name != "max_attention_logit":
                self._set(name, value)
        for layer, value in sample.max_attention_logits.items():
            self._set("max_attention_logit", value, layer=layer)

    def verdict(self, verdict: wire.Verdict) -> None:
        place = {"layer": verdict.layer, "head": verdict.head}
        level = "INFO" if verdict.state == "cleared" else _level(verdict)
        self._logger.emit(
            body=verdict.sentence,
            severity_number=self._severities[level],
            severity_text=level,
            event_name="foreshock.warning",
            attributes={
                "foreshock.step": verdict.step,
                "foreshock.state": verdict.state,
                "foreshock.cause": verdict.cause,
                "foreshock.warning.id": verdict.id,
                **{f"foreshock.{name}": number for name, number in place.items() if number is not None},
            },
        )

    def close(self) -> None:
        self._metrics.shutdown()
        self._logs.shutdown()


_TRACKERS: Final[dict[str, type[Tracker]]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "trackio": _Trackio,
    "otlp": _Otlp,
}


def parts_of_mirror(mirror: str) -> tuple[str, str]:
    """Split `tensorboard:FOLDER` into tracker and folder. Raises ValueError if the tracker is unknown or not installed,
    or if its folder is missing."""
    tracker, _, folder = mirror.partition(":")
    if tracker not in _TRACKERS:
        raise ValueError(
            f"mirror {mirror[:100]!r} is unknown; allowed are wandb, tensorboard:FOLDER, mlflow, trackio, otlp"
        )
    if tracker == "tensorboard" and not folder:
        raise ValueError("mirror='tensorboard' needs the folder of the run's logs: mirror='tensorboard:FOLDER'")
    if tracker == "otlp" and folder:
        raise ValueError("mirror='otlp' takes no address; set OTEL_EXPORTER_OTLP_ENDPOINT, as for any exporter")
    if tracker != "tensorboard" and folder:
        raise ValueError(f"mirror={tracker!r} takes no folder; it writes into the run that {tracker} has open")
    kind = _TRACKERS[tracker]
    try:
        found = importlib.util.find_spec(kind.module)
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    if found is None:
        raise ValueError(f"mirror needs {tracker}, which is not installed: pip install {kind.install}")
    return tracker, folder


class Mirror:
    """Mirrors samples and warnings to `mirror` (see `AgentConfig.mirror`) from `start` to `close`."""

    def __init__(self, mirror: str, guard: Guard, *, run: str, rank: int, world_size: int) -> None:
        tracker, folder = parts_of_mirror(mirror)
        self._kind = _TRACKERS[tracker]
        self._open = partial(self._kind.join, folder=folder, run=run, rank=rank, world_size=world_size)
        self._guard = guard
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_QUEUE)
        self._warnings: set[str] = set()
        self._layers: list[int] = []
        self._said = False
        self._thread: threading.Thread | None = None

    def start(self, layers: tuple[wire.Layer, ...]) -> None:
        """Open the tracker, in the thread and context in which the program opened its run. If no run is open yet, the
        next sample tries again."""
        self._layers = [layer.layer for layer in layers for _ in layer.heads]
        self._join_run()

    def _join_run(self) -> None:
        tracker = self._guard.run(self._open)
        if tracker is not None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._work, tracker), name="foreshock-mirror", daemon=True
            )
            self._thread.start()
        elif self._guard.on and not self._said:
            self._said = True
            logger.warning(
                "foreshock: the mirror waits for a run: call %s; samples and warnings after that are mirrored",
                self._kind.opened_by,
            )

    def verdict(self, verdict: wire.Verdict) -> None:
        """Update the number of active warnings, and log the verdict. Raises queue.Full if the tracker is too slow."""
        if verdict.severity == "info":
            return
        if verdict.state == "cleared":
            self._warnings.discard(verdict.id)
        else:
            self._warnings.add(verdict.id)
        self._put(lambda tracker: tracker.verdict(verdict))

    def alert(self, verdict: wire.Verdict, page: str) -> None:
        """Send an alert through the tracker. Raises queue.Full if it is too slow."""
        self._put(lambda tracker: tracker.alert(verdict, page))

    def sampled(self, counted: Counted) -> None:
        """Mirror the numbers of a sample; returns at once. Raises queue.Full if the tracker is too slow."""
        if self._thread is None:
            self._join_run()
        sample = self._mirrored(counted)
        self._put(lambda tracker: tracker.log(sample))

    def _put(self, work: Callable[[Tracker], None]) -> None:
        if self._thread is not None:
            self._queue.put_nowait(work)

    def _mirrored(self, counted: Counted) -> Mirrored:
        logits = catalog.read("head.score_max", counted.words)
        numbers = {
            "worst_score_offset": _largest(catalog.read("head.score_offset", counted.words)),
            "largest_score": _largest(slot_values(counted.words, Slot.ROW_MAX_ABS)),
            "max_attention_logit": float(np.fmax.reduce(logits, initial=np.nan)),
            "attention_entropy": float(np.fmin.reduce(catalog.read("head.entropy", counted.words), initial=np.nan)),
            "active_warnings": float(len(self._warnings)),
            "switched_heads": float(np.count_nonzero(counted.modes)),
        }
        if "clip_factor" in counted.norms:
            numbers["qk_clip_factor"] = float(counted.norms["clip_factor"].min())
            numbers["qk_clipped_heads"] = float(np.count_nonzero(counted.norms["clipped_steps"]))
        training = {
            name: float(values.mean())
            for name, values in (("loss", counted.losses), ("grad_norm", counted.grad_norms))
            if values.size
        }
        by_layer: dict[int, float] = {}
        for layer, value in zip(self._layers, logits.tolist(), strict=True):
            by_layer[layer] = float(np.fmax(by_layer.get(layer, np.nan), value))
        return Mirrored(counted.step, _finite(numbers), _finite(training), _finite(by_layer))

    def _work(self, tracker: Tracker) -> None:
        while (work := self._queue.get()) is not None:
            self._guard.run(work, tracker)
        self._guard.run(tracker.close)

    def end(self) -> None:
        """Stop mirroring; the thread sends the remaining items and ends."""
        if self._queue.full():  # only this thread adds items, so removing one makes room
            with suppress(queue.Empty):
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait for the end, for at most `seconds`; a client that hangs stays in its daemon thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(max(seconds, 0.0))


def _largest(values: Any) -> float:
    """Return the value with the largest absolute value, with its sign; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[np.argmax(np.abs(finite))]) if finite.size else float("nan")


def _finite(numbers: Mapping[Any, float]) -> dict[Any, float]:
    return {name: value for name, value in numbers.items() if np.isfinite(value)}


def _prefixed(numbers: Mapping[str, float]) -> dict[str, float]:
    return {_PREFIX + name: value for name, value in numbers.items()}


def _title(verdict: wire.Verdict) -> str:
    place = "" if verdict.layer is None else f", layer {verdict.layer} head {verdict.head}"
    return f"foreshock: {verdict.cause}{place}"[:63]  # wandb accepts fewer than 64 characters


def _level(verdict: wire.Verdict) -> str:
    return "ERROR" if verdict.severity == "critical" else "WARN"
