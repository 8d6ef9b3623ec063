"""What the agent mirrors into an experiment tracker: real TensorBoard, stand-ins for the others and for faults."""

import contextvars
import importlib.machinery
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.monitor import Agent, AgentConfig, attach

NAMES = {
    f"foreshock/{name}"
    for name in (
        *("worst_score_offset", "largest_score", "max_attention_logit", "attention_entropy"),
        *("active_warnings", "switched_heads"),
    )
}


def trained(steps: int, **settings: Any) -> Agent:
    """A run of `steps` steps, each sampled, whose layer 0 head 1 is warned about at step 3 and cleared at step 6."""
    torch.manual_seed(5)
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    every = {
        "sample_every_steps": 1,
        "sample_every_seconds": 0.0,
        "quiet": True,
        "spool_directory": None,
    }
    with attach(model, **{**every, **settings}) as agent:
        raised, cleared = verdict(0, 1, step=3), verdict(0, 1, step=6, state="cleared")
        agent.detectors = ScriptedDetectors(len(agent.modes()), {3: [raised], 6: [cleared]})
        for step in range(steps):
            agent.step(train_step(model, optimizer, step))
    return agent


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    """A module of that name that can be found and imported."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "foreshock-mirror":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_each_sample_s_numbers_and_when_a_warning_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "close_seconds", 30)
    agent = trained(9, mirror=f"tensorboard:{tmp_path}", policy="auto")
    assert not agent.faults
    told = EventAccumulator(str(tmp_path))
    told.Reload()
    assert set(told.Tags()["scalars"]) == NAMES
    warned = {e.step: e.value for e in told.Scalars("foreshock/active_warnings")}
    assert set(warned) == set(range(1, 10))
    assert 1.0 in warned.values()
    assert warned[1] == warned[9] == 0.0
    switched = [e.value for e in told.Scalars("foreshock/switched_heads")]
    assert switched[0] == 0.0
    assert switched[-1] > 0.0
    assert all(e.value > 0 for e in told.Scalars("foreshock/largest_score"))


def test_wandb_s_own_step_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], dict[str, Any]]] = []
    defined: list[tuple[str, str | None]] = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric=None: defined.append((name, step_metric)),
        log=lambda numbers, **options: logged.append((numbers, options)),
    )
    stand_in(monkeypatch, "wandb", run=run)
    assert not trained(4, mirror="wandb").faults
    assert ("foreshock/*", "foreshock/step") in defined
    assert [numbers["foreshock/step"] for numbers, _ in logged] == [1, 2, 3, 4]
    assert all(numbers.keys() == NAMES | {"foreshock/step"} for numbers, _ in logged)
    assert all(options == {"commit": False} for _, options in logged)


def test_mlflow_is_told_by_the_name_of_the_open_run(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, str, set[str]]] = []
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-77"))
    stand_in(
        monkeypatch,
        "mlflow",
        active_run=lambda: run if threading.current_thread() is threading.main_thread() else None,
        log_metrics=lambda numbers, step, run_id: logged.append((step, run_id, set(numbers))),
    )
    assert not trained(3, mirror="mlflow").faults
    assert logged == [(1, "run-77", NAMES), (2, "run-77", NAMES), (3, "run-77", NAMES)]


def test_trackio_s_run_is_found_in_the_context_that_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current: contextvars.ContextVar[list[int]] = contextvars.ContextVar("current")
    logged: list[int] = []
    current.set(logged)
    stand_in(monkeypatch, "trackio", log=lambda numbers, step: current.get().append(step))
    assert not trained(3, mirror="trackio").faults
    assert logged == [1, 2, 3]


def test_only_the_first_process_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []
    stand_in(monkeypatch, "trackio", log=lambda numbers, step: logged.append(step))
    trained(3, mirror="trackio", rank=1, world_size=2, run="r")
    assert logged == []


def test_a_tracker_that_raises_is_off_after_three_faults_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def log(numbers: Any, step: int) -> None:
        calls.append(step)
        raise ConnectionError("the tracker's host is gone")

    stand_in(monkeypatch, "trackio", log=log)
    agent = trained(12, mirror="trackio")
    assert agent.current_step == 12
    assert agent.faults["tracker"] == 3
    assert calls == [1, 2, 3]
    assert "tracker is off from now on" in caplog.text


def test_a_tracker_that_hangs_delays_no_step_and_close_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(AgentConfig, "close_seconds", 0.1)
    stand_in(monkeypatch, "trackio", log=lambda numbers, step: released.wait(60))
    try:
        agent = trained(80, mirror="trackio")  # more samples than its queue takes
        assert agent.current_step == 80
        assert agent.faults["mirror"] >= 1
    finally:
        released.set()


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_without_an_open_run_the_log_says_what_to_call(
    tracker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, tracker, run=None, active_run=lambda: None)
    assert trained(2, mirror=tracker).current_step == 2
    assert "before the first step" in caplog.text


@pytest.mark.parametrize(
    ("mirror", "sentence"),
    [
        ("comet", "is no tracker; allowed are wandb, tensorboard:FOLDER, mlflow, trackio"),
        ("tensorboard", "needs the folder of the run's logs"),
        ("mlflow:here", "takes no folder"),
    ],
)
def test_a_wrong_mirror_is_refused_before_the_first_step(mirror: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attach(tiny_gpt(), mirror=mirror, quiet=True)


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="mirror needs wandb, which is not installed: pip install wandb"):
        attach(tiny_gpt(), mirror="wandb", quiet=True)


def test_a_warning_is_a_line_of_the_training_log_with_no_service_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foreshock"):
        trained(5)
    assert "foreshock, step 3: layer 0 head 1 drifts" in caplog.text
