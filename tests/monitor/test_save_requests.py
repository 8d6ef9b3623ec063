"""A warning asks the trainer for one checkpoint, and each checkpoint is reported: in a loop and in four trainers."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer as LightningTrainer
from tests.monitor import test_huggingface, test_lightning, test_torchtitan, titan_shape, torchrun
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt, train_step
from torch._C._distributed_c10d import HashStore

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.checkpoints import AHEAD, LOOK_EVERY, KnownCheckpoints, Rounds, SaveRequests

WARNED_AT = 2
pytestmark = test_lightning.pytestmark


def warn(agent: Agent, at: int = WARNED_AT) -> None:
    """A head drifts from step `at` on, and a second one from the next step on: one incident."""
    first, second = verdict(0, 1, step=at), verdict(1, 0, step=at + 1, id="second")
    agent.detectors = ScriptedDetectors(len(agent.modes()), {at: [first], at + 1: [second]})
    agent.detectors.standing = [first] if at == WARNED_AT else []


def reported(listener: Listener) -> list[wire.Checkpoint]:
    return listener.of(wire.Checkpoint)


@pytest.mark.parametrize(("settings", "asked"), [({}, 1), ({"save_on_warning": False}, 0), ({"world_size": 2}, 0)])
def test_a_plain_loop_is_asked_once_for_an_incident_and_never_where_processes_cannot_agree(
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
    assert (requests.take(1), requests.take(1)) == (True, False)
    requests.follow([second], [first, second])
    assert not requests.take(2)
    requests.follow([first.model_copy(update={"state": "cleared"})], [second])
    requests.follow([], [])
    requests.follow([first], [first])
    assert requests.take(9)
    requests.follow([verdict(None, None, signal="nonfinite", cause="other", id="nan")], [])
    assert not requests.take(9)


class Process:
    """One of `world` processes that make steps in any order, and share a store."""

    def __init__(self, store: Any, world: int) -> None:
        self.requests = SaveRequests(True, Rounds("r", lambda: (store, world)))
        self.step, self.saves = 0, list[int]()

    def make_step(self) -> None:
        self.step += 1
        if self.requests.take(self.step):
            self.saves.append(self.step)


@given(
    world=st.integers(2, 4),
    apart=st.integers(1, 4 * AHEAD),
    warned=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_processes_save_after_the_same_steps_however_far_apart_they_are(
    world: int, apart: int, warned: list[tuple[int, int]], seed: int
) -> None:
    store, random = HashStore(), Random(seed)
    processes = [Process(store, world) for _ in range(world)]
    while any(process.step < 300 for process in processes):
        first = min(process.step for process in processes)
        process = random.choice([one for one in processes if one.step < min(300, first + apart)])
        process.make_step()
        for rank, step in warned:
            if process is processes[rank % world] and process.step == step:
                process.requests.follow([verdict(0, 0, step=step)], [verdict(0, 0, step=step)])
    saves = {tuple(process.saves) for process in processes}
    assert len(saves) == 1
    if apart <= LOOK_EVERY:
        [steps] = saves
        assert len(steps) == bool(warned)
        assert all(step <= min(at for _, at in warned) + 2 * AHEAD for step in steps)


@pytest.mark.full
def test_two_processes_save_at_once_for_a_warning_of_one(tmp_path: Path) -> None:
    first, second = torchrun.trained(Path(__file__).with_name("save_ranks.py"), 2, tmp_path)
    assert first == second
    assert len(first) == 1


class Warned(test_huggingface.Observed):
    """Its agent warns from a step on."""

    warns_at = WARNED_AT

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        assert self.agent is not None
        warn(self.agent, self.warns_at)


@pytest.mark.parametrize(("limit", "steps"), [(None, {4, 8}), (1, {4, 8})])
def test_transformers_trainer_saves_at_the_warning_unless_that_would_replace_the_only_checkpoint(
    limit: int | None, steps: set[int], tmp_path: Path
) -> None:
    callback = Warned(**EVERY_STEP)
    test_huggingface.train(tmp_path, callback, 8, save_total_limit=limit)
    told = {one.step: one for one in reported(callback.listener)}
    extra = set(told) - steps
    assert len(extra) == (0 if limit else 1)
    assert all(told[step].requested and (tmp_path / f"checkpoint-{step}").is_dir() for step in extra)
    assert [told[step].requested for step in sorted(steps)] == [False, False]
    assert {one.trainer for one in told.values()} == {"transformers"}
    assert told[8].path == str(tmp_path / "checkpoint-8")


def lightning_warned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 8, at: int = WARNED_AT, keep: int = -1
) -> Listener:
    """What the agent says of `steps` under Lightning, with a checkpoint every 4 and a warning from step `at` on."""
    start = test_lightning.Watcher.on_train_start

    def warned(self: Any, *args: Any) -> None:
        start(self, *args)
        warn(self.callback.agent, at)

    monkeypatch.setattr(test_lightning.Watcher, "on_train_start", warned)
    *_, watcher = test_lightning.fit(folder, steps, keep=keep)
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


def accelerated(folder: Path, steps: int, at: int = WARNED_AT, every: int = 99, keep: int | None = None) -> Listener:
    """Train under Accelerate, which names its checkpoints itself; the agent warns from step `at` on."""
    model = tiny_gpt()
    tracker = ForeshockTracker(model, **EVERY_STEP)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=keep)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker.checkpoint_with(accelerator)
    accelerator.init_trackers("test")
    assert tracker.agent is not None
    listener = Listener()
    tracker.agent.subscribe(listener)
    warn(tracker.agent, at)
    for step in range(1, steps + 1):
        accelerator.log({"loss": train_step(model, optimizer, step)}, step=step)
        if step % every == 0:
            accelerator.save_state()
    accelerator.end_training()
    assert tracker.agent.current_step == steps
    return listener


def test_accelerate_saves_at_the_warning_where_it_names_checkpoints_itself(tmp_path: Path) -> None:
    listener = accelerated(tmp_path, 5)
    [asked] = reported(listener)
    assert (asked.requested, asked.trainer) == (True, "accelerate")
    assert list(Path(asked.path).glob("foreshock_0.json"))


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "torchtitan"])
def test_an_asked_checkpoint_that_cannot_be_written_ends_no_training_and_is_not_reported(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trainer == "accelerate":
        (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)  # as a run leaves it that did not resume
        listener = accelerated(tmp_path, 5)
    elif trainer == "torchtitan":
        titan = titan_shape.Trainer(7, tmp_path, interval=20)
        save = titan.checkpointer.save

        def full_disk(curr_step: int, last_step: bool = False) -> bool:
            if titan.checkpointer.interval == 1:
                raise OSError("no space left")
            return save(curr_step, last_step)

        titan.checkpointer.save = full_disk  # type: ignore[method-assign]
        listener = titan_warned(titan)
        assert (titan.step, titan.checkpointer.interval) == (7, 20)
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


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate", "torchtitan"])
def test_the_last_checkpoint_from_before_the_warning_outlives_the_rule_that_deletes_old_ones(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints come every 4 steps, the warning at step 9; 24 steps later the one of step 8 is long deleted."""
    if trainer == "transformers":
        callback = Warned(**EVERY_STEP)
        callback.warns_at = 9
        test_huggingface.train(tmp_path, callback, 32, save_total_limit=2)
        listener = callback.listener
    elif trainer == "lightning":
        listener = lightning_warned(tmp_path, monkeypatch, 32, 9, keep=1)
    elif trainer == "torchtitan":
        titan = titan_shape.Trainer(32, tmp_path, interval=4)
        titan.checkpointer.keep_latest_k = 2
        listener = titan_warned(titan, 9)
    else:
        listener = accelerated(tmp_path, 32, 9, every=4, keep=2)
    first, second = [one for one in reported(listener) if one.step == 8]
    assert not Path(first.path).exists()
    name = "8" if trainer == "torchtitan" else Path(first.path).name
    assert Path(second.path).name == f"foreshock-clean-{name}"
    assert (second.trainer, second.requested) == (trainer, False)
    files = [Path(second.path)] if trainer == "lightning" else list(Path(second.path).iterdir())
    assert len(files) >= {"lightning": 1, "torchtitan": 2}.get(trainer, 4)
    assert all(file.stat().st_size for file in files)
    assert {file.stat().st_nlink for file in files} == {1}
    others = [one for one in reported(listener) if one.step > 8 and not one.requested]
    assert sum(Path(one.path).exists() for one in others) <= 2  # the rule goes on as without foreshock


def test_a_disk_without_links_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("os.link", no_links)
    known, warned = KnownCheckpoints(), verdict(0, 0, step=9)
    (path := tmp_path / "checkpoint-8").mkdir()
    (path / "weights").touch()
    known.add(wire.Checkpoint(step=8, path=str(path), trainer="transformers"))
    assert known.follow([warned], [warned]) is None
    assert f"exclude {path} from the rule that deletes old checkpoints" in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-8"]


def titan_warned(trainer: titan_shape.Trainer, at: int = 1) -> Listener:
    """What the agent says of a training in torchtitan's shape, with a warning from step `at` on."""
    warned: list[Agent] = []

    def after(agent: Agent) -> None:
        if not warned:
            warn(agent, at)
            warned.append(agent)

    _, listener, _ = test_torchtitan.train(trainer, after=after)
    return listener


@pytest.mark.parametrize("model_only", [False, True])
def test_torchtitan_saves_at_the_warning_and_keeps_its_interval(model_only: bool, tmp_path: Path) -> None:
    trainer = titan_shape.Trainer(7, tmp_path, interval=20)
    trainer.checkpointer.last_save_model_only = model_only  # its default; no training resumes from such a checkpoint
    first, *last = reported(titan_warned(trainer))
    assert first.requested
    assert [(one.requested, one.step) for one in last] == ([] if model_only else [(False, 7)])
    assert Path(first.path, "state.pt").is_file()
    assert trainer.checkpointer.interval == 20
