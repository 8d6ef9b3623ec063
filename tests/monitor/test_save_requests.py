"""A warning asks the trainer for one checkpoint, and each checkpoint is reported: in a loop and in four trainers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.pytorch import Trainer as LightningTrainer
from tests.monitor import test_huggingface, test_lightning, test_torchtitan, titan_shape
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.save_requests import SaveRequests

WARNED_AT = 2
pytestmark = test_lightning.pytestmark


def warn(agent: Agent) -> None:
    """A head drifts from step 2 on, and a second one from step 3: one incident."""
    script = {WARNED_AT: [verdict(0, 1, step=WARNED_AT)], 3: [verdict(1, 0, step=3, id="second")]}
    agent.detectors = ScriptedDetectors(len(agent.modes()), script)
    agent.detectors.standing = [verdict(0, 1, step=WARNED_AT)]


def reported(listener: Listener) -> list[wire.Checkpoint]:
    return listener.of(wire.Checkpoint)


@pytest.mark.parametrize(("settings", "asked"), [({}, 1), ({"save_on_warning": False}, 0), ({"world_size": 2}, 0)])
def test_a_plain_loop_is_asked_once_for_an_incident_and_never_where_processes_could_not_agree(
    settings: dict[str, Any], asked: int, tmp_path: Path
) -> None:
    model, listener = tiny_gpt(), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(model, **{**EVERY_STEP, "run": "r", **settings}) as agent:
        agent.subscribe(listener)
        warn(agent)
        for step in range(6):
            agent.step(train_step(model, optimizer, step))
            if agent.should_save:
                agent.checkpoint_saved(tmp_path / f"step-{step + 1}.pt")
        agent.checkpoint_saved(tmp_path / "last.pt")
    *requested, last = reported(listener)
    assert [(one.requested, one.trainer) for one in requested] == [(True, "own")] * asked
    assert (last.requested, last.step, last.path) == (False, 6, str(tmp_path / "last.pt"))


def test_an_incident_asks_again_only_after_all_its_warnings_were_cleared_and_harm_asks_for_nothing() -> None:
    requests, first, second = SaveRequests(True), verdict(0, 0), verdict(0, 1, id="second")
    requests.follow([first], [first])
    assert (requests.take(), requests.take()) == (True, False)
    requests.follow([second], [first, second])
    assert not requests.take()
    requests.follow([first.model_copy(update={"state": "cleared"})], [second])
    requests.follow([], [])
    requests.follow([first], [first])
    assert requests.take()
    requests.follow([verdict(None, None, signal="nonfinite", cause="other", id="nan")], [])
    assert not requests.take()


class Warned(test_huggingface.Observed):
    """Its agent warns from step 2 on."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        assert self.agent is not None
        warn(self.agent)


def test_transformers_trainer_saves_nothing_at_a_warning_where_the_program_saves_nothing(tmp_path: Path) -> None:
    callback = Warned(**test_huggingface.QUICK)
    test_huggingface.train(tmp_path, callback, 5, save_strategy="no")
    assert reported(callback.listener) == []


@pytest.mark.parametrize(("limit", "steps"), [(None, {4, 8}), (1, {4, 8})])
def test_transformers_trainer_saves_at_the_warning_unless_that_would_replace_the_only_checkpoint(
    limit: int | None, steps: set[int], tmp_path: Path
) -> None:
    callback = Warned(**test_huggingface.QUICK)
    test_huggingface.train(tmp_path, callback, 8, save_total_limit=limit)
    told = {one.step: one for one in reported(callback.listener)}
    extra = set(told) - steps
    assert len(extra) == (0 if limit else 1)
    assert all(told[step].requested and (tmp_path / f"checkpoint-{step}").is_dir() for step in extra)
    assert [told[step].requested for step in sorted(steps)] == [False, False]
    assert {one.trainer for one in told.values()} == {"transformers"}
    assert told[8].path == str(tmp_path / "checkpoint-8")


def lightning_warned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """What the agent says of 8 steps under Lightning, with a checkpoint every 4 and a warning from step 2 on."""
    start = test_lightning.Watcher.on_train_start

    def warned(self: Any, *args: Any) -> None:
        start(self, *args)
        warn(self.callback.agent)

    monkeypatch.setattr(test_lightning.Watcher, "on_train_start", warned)
    *_, watcher = test_lightning.fit(folder, 8)
    listener: Listener = watcher.listener
    return listener


def test_lightning_saves_at_the_warning_beside_its_own_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = reported(lightning_warned(tmp_path, monkeypatch))
    assert [(one.step, one.requested) for one in told if not one.requested] == [(4, False), (8, False)]
    [asked] = [one for one in told if one.requested]
    assert Path(asked.path).is_file()
    assert Path(asked.path).name == f"foreshock-step={asked.step}.ckpt"


def accelerated(folder: Path, steps: int) -> Listener:
    """Train under Accelerate, which names its checkpoints itself; the agent warns from step 2 on."""
    model = tiny_gpt()
    tracker = ForeshockTracker(model, **EVERY_STEP)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker.checkpoint_with(accelerator)
    accelerator.init_trackers("test")
    assert tracker.agent is not None
    listener = Listener()
    tracker.agent.subscribe(listener)
    warn(tracker.agent)
    for step in range(1, steps + 1):
        accelerator.log({"loss": train_step(model, optimizer, step)}, step=step)
    accelerator.end_training()
    assert tracker.agent.current_step == steps
    return listener


def test_accelerate_saves_at_the_warning_where_it_names_checkpoints_itself(tmp_path: Path) -> None:
    listener = accelerated(tmp_path, 5)
    [asked] = reported(listener)
    assert (asked.requested, asked.trainer) == (True, "accelerate")
    assert list(Path(asked.path).glob("foreshock_0.json"))


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_an_asked_checkpoint_that_cannot_be_written_ends_no_training_and_is_not_reported(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trainer == "accelerate":
        (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)  # as a run leaves it that did not resume
        listener = accelerated(tmp_path, 5)
    else:
        write = LightningTrainer.save_checkpoint

        def full(self: LightningTrainer, path: Any, *args: Any, **kwargs: Any) -> None:
            if "foreshock" in Path(path).name:
                raise OSError("no space left")
            write(self, path, *args, **kwargs)

        monkeypatch.setattr(LightningTrainer, "save_checkpoint", full)
        listener = lightning_warned(tmp_path, monkeypatch)
    assert not [one for one in reported(listener) if one.requested]
    assert "the checkpoint that a warning asked for was not saved; training continues" in caplog.text


def test_torchtitan_saves_at_the_warning_and_keeps_its_interval(tmp_path: Path) -> None:
    warned: list[Agent] = []

    def after(agent: Agent) -> None:
        if not warned:
            warn(agent)
            warned.append(agent)

    trainer = titan_shape.Trainer(7, tmp_path, interval=20)
    _, listener, _ = test_torchtitan.train(trainer, after=after)
    first, last = reported(listener)
    assert (first.requested, last.requested, last.step) == (True, False, 7)
    assert Path(first.path, "state.pt").is_file()
    assert trainer.checkpointer.interval == 20
