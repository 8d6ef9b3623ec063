"""Mirroring to experiment trackers: real trackers, fakes and faults."""

import contextvars
import gzip
import importlib.machinery
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt
from tests.monitor.watched_training import train

from foreshock.monitor import Agent, AgentConfig, attach

SETTINGS = EVERY_STEP | {"attention": "keep", "strict": False, "spool_directory": None}
NUMBERS = ("worst_score_offset", "largest_score", "max_attention_logit", "attention_entropy")
NAMES = {f"foreshock/{name}" for name in (*NUMBERS, "active_warnings", "switched_heads")}


def trained(steps: int, **settings: Any) -> Agent:
    """Trains `steps` sampled steps with a warning about layer 0 head 1, raised at step 3 and cleared at step 6."""
    model = tiny_gpt(seed=5)
    with attach(model, **SETTINGS | settings) as agent:
        raised, cleared = verdict(0, 1, step=3), verdict(0, 1, step=6, state="cleared")
        agent.detectors = ScriptedDetectors(len(agent.modes()), {3: [raised], 6: [cleared]})
        train(agent, model, steps)
    return agent


def install_fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    """Installs an importable module with this name."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(autouse=True)
def check_mirror_threads_end() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "foreshock-mirror":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_values_of_each_sample_and_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "close_seconds", 30)
    agent = trained(9, mirror=f"tensorboard:{tmp_path}", policy="auto")
    assert not agent.faults
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    warned = {e.step: e.value for e in events.Scalars("foreshock/active_warnings")}
    assert set(warned) == set(range(1, 10))
    assert 1.0 in warned.values()
    assert warned[1] == warned[9] == 0.0
    switched = [e.value for e in events.Scalars("foreshock/switched_heads")]
    assert switched[0] == 0.0
    assert switched[-1] > 0.0
    assert all(e.value > 0 for e in events.Scalars("foreshock/largest_score"))
    (warning,) = events.Tensors("foreshock/warnings/text_summary")
    assert (warning.step, b"layer 0 head 1" in warning.tensor_proto.string_val[0]) == (3, True)


def test_wandb_gets_values_without_advancing_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], dict[str, Any]]] = []
    defined: list[tuple[str, str | None]] = []
    alerts: list[dict[str, str]] = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric=None: defined.append((name, step_metric)),
        log=lambda numbers, **options: logged.append((numbers, options)),
        alert=lambda **alert: alerts.append(alert),
    )
    install_fake_module(monkeypatch, "wandb", run=run)
    assert not trained(4, mirror="wandb").faults
    (alert,) = alerts
    assert (alert["title"], alert["level"]) == ("foreshock: rounding, layer 0 head 1", "WARN")
    assert "layer 0 head 1" in alert["text"]
    assert ("foreshock/*", "foreshock/step") in defined
    assert [numbers["foreshock/step"] for numbers, _ in logged] == [1, 2, 3, 4]
    assert all(numbers.keys() == NAMES | {"foreshock/step"} for numbers, _ in logged)
    assert all(options == {"commit": False} for _, options in logged)


def install_fake_trackio(monkeypatch: pytest.MonkeyPatch, log: Any, **members: Any) -> None:
    levels = {"WARN": "warn", "ERROR": "error"}
    install_fake_module(monkeypatch, "trackio", log=log, AlertLevel=levels, **{"alert": lambda **_: None, **members})


def test_trackio_run_is_found_in_the_context_that_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current: contextvars.ContextVar[list[int]] = contextvars.ContextVar("current")
    logged: list[int] = []
    alerts: list[tuple[str, str]] = []
    current.set(logged)
    install_fake_trackio(
        monkeypatch,
        lambda numbers, step: current.get().append(step),
        alert=lambda title, text, level: alerts.append((title, level)),
    )
    assert not trained(3, mirror="trackio").faults
    assert logged == [1, 2, 3]
    assert alerts == [("foreshock: rounding, layer 0 head 1", "warn")]


def test_only_rank_0_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []
    install_fake_trackio(monkeypatch, lambda numbers, step: logged.append(step))
    trained(3, mirror="trackio", rank=1, world_size=2, run="r")
    assert logged == []


def test_tracker_is_disabled_after_three_errors_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def log(numbers: Any, step: int) -> None:
        calls.append(step)
        raise ConnectionError("the tracker's host is gone")

    install_fake_trackio(monkeypatch, log, alert=log)
    agent = trained(12, mirror="trackio")
    assert agent.current_step == 12
    assert agent.faults["tracker"] == 3
    assert calls == [1, 2, 3]
    assert "tracker is off from now on" in caplog.text


def test_hanging_tracker_delays_no_step_and_close_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(AgentConfig, "close_seconds", 0.1)
    install_fake_trackio(monkeypatch, lambda numbers, step: released.wait(60))
    try:
        agent = trained(80, mirror="trackio")  # more samples than the queue holds
        assert agent.current_step == 80
        assert agent.faults["mirror"] >= 1
    finally:
        released.set()


def test_mirror_waits_for_a_run_that_is_opened_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[int] = []
    run = Mock(log=lambda numbers, **options: logged.append(numbers["foreshock/step"]))
    wandb: Any = install_fake_module(monkeypatch, "wandb", run=None)
    model = tiny_gpt()
    with attach(model, **SETTINGS, mirror="wandb") as agent:
        for step in range(6):
            wandb.run = run if step >= 3 else None
            train(agent, model, [step])
    assert not agent.faults
    assert logged[-3:] == [4, 5, 6]
    assert not {1, 2} & set(logged)
    assert caplog.text.count("the mirror waits for a run: call wandb.init") == 1


@pytest.mark.parametrize(
    ("mirror", "sentence"),
    [
        ("comet", "is unknown; allowed are wandb, tensorboard:FOLDER, mlflow, trackio, otlp"),
        ("tensorboard", "needs the folder of the run's logs"),
        ("mlflow:here", "takes no folder"),
        ("otlp:http://collector:4318", "set OTEL_EXPORTER_OTLP_ENDPOINT"),
    ],
)
def test_invalid_mirror_is_rejected_by_attach(mirror: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attach(tiny_gpt(), mirror=mirror, quiet=True)


def test_missing_tracker_is_rejected_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="mirror needs wandb, which is not installed: pip install wandb"):
        attach(tiny_gpt(), mirror="wandb", quiet=True)
    with pytest.raises(ValueError, match=r"mirror needs otlp, which is not installed: pip install 'foreshock\[otlp\]'"):
        attach(tiny_gpt(), mirror="otlp", quiet=True)


class Collector(BaseHTTPRequestHandler):
    """A fake OpenTelemetry collector (HTTP)."""

    metrics: ClassVar[list[ExportMetricsServiceRequest]] = []
    logs: ClassVar[list[ExportLogsServiceRequest]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            assert self.path == "/v1/logs"
            self.logs.append(ExportLogsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    Collector.metrics.clear()
    Collector.logs.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield Collector
        server.shutdown()


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def test_collector_gets_values_and_warnings_of_each_rank_with_nemo_lens_names(
    collector: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "nemo.run.id=from-the-job,deployment.environment=test")
    monkeypatch.setattr(AgentConfig, "close_seconds", 30)
    agent = trained(9, mirror="otlp", rank=1, world_size=2, run="team/r")
    assert not agent.faults
    (resource,) = collector.metrics[-1].resource_metrics
    resource_attributes = attributes(resource.resource)
    assert resource_attributes.items() >= {
        ("service.name", "foreshock"), ("foreshock.run", "team/r"), ("nv.dl.rank", 1), ("nv.dl.world_size", 2),
        ("nemo.run.id", "from-the-job"), ("deployment.environment", "test"),
    }  # fmt: skip
    gauges = {metric.name: metric.gauge.data_points for metric in resource.scope_metrics[0].metrics}
    assert gauges["foreshock.step"][0].as_double == 9.0
    assert gauges["foreshock.loss"][0].as_double > 0.0
    assert gauges["foreshock.active_warnings"][0].as_double == 0.0
    assert "foreshock.worst_score_offset" in gauges
    by_layer = {attributes(point)["layer"] for point in gauges["foreshock.max_attention_logit"]}
    assert by_layer == {layer for layer, _ in agent.modes()}
    records = [
        record
        for request in collector.logs
        for one in request.resource_logs
        for scope in one.scope_logs
        for record in scope.log_records
    ]
    logged = [(record.severity_text, attributes(record)) for record in records]
    assert [(text, found["foreshock.state"], found["foreshock.step"]) for text, found in logged] == [
        ("WARN", "raised", 3),
        ("INFO", "cleared", 6),
    ]
    assert (logged[0][1]["foreshock.layer"], logged[0][1]["foreshock.head"]) == (0, 1)
    assert "layer 0 head 1" in records[0].body.string_value


def test_unreachable_collector_does_not_affect_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(AgentConfig, "close_seconds", 0.1)
    assert trained(4, mirror="otlp").current_step == 4


PROGRAM = Path(__file__).with_name("tracked_run.py")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_real_tracker_stores_samples_next_to_the_programs_own_values(tracker: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM), tracker, str(tmp_path)]
    path = os.pathsep.join(str(PROGRAM.parents[2] / part) for part in ("src", "."))
    environment = os.environ | {"PYTHONPATH": path}
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=570)
    assert found.returncode == 0, found.stderr
    output = json.loads(found.stdout.splitlines()[-1])
    assert output["faults"] == {}
    stored = {name: dict(map(tuple, points)) for name, points in output["stored"].items()}
    assert set(stored) == NAMES | {"loss"}
    assert sorted(stored["loss"]) == list(range(6)), "the program's own steps are unchanged"
    steps = sorted(stored["foreshock/largest_score"])
    # wandb stores the latest values with the program's next log; MLflow stores every sample
    assert steps == list(range(1, 7)) if tracker == "mlflow" else set(steps) <= set(range(1, 7))
    assert steps[-1] == 6
    assert all(value > 0 for value in stored["foreshock/largest_score"].values())
    assert stored["foreshock/active_warnings"][6] == 0.0
    assert set(stored["foreshock/switched_heads"].values()) == {0.0}
    if tracker == "mlflow":
        assert list(stored["foreshock/active_warnings"].values()).count(1.0) >= 1
