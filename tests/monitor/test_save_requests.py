"""A warning requests one checkpoint, and each checkpoint is reported, in a custom loop and with four trainers."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer as LightningTrainer
from tests.monitor import titan_shape, torchrun
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt
from tests.monitor.trainers import LIGHTNING_WARNINGS, TRAINERS, Training, with_torchtitan, with_transformers
from tests.monitor.watched_training import listening, train
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.checkpoints import AHEAD, LOOK_EVERY, ROUNDS, KnownCheckpoints, Rounds, SaveRequests

WARNED_AT = 2
pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)


def script_warnings(agent: Agent, at: int = WARNED_AT) -> None:
    """Scripts warnings about a head at step `at` and another at the next step, which form one incident."""
    first, second = verdict(0, 1, step=at), verdict(1, 0, step=at + 1, id="second")
    agent.detectors = ScriptedDetectors(len(agent.modes()), {at: [first], at + 1: [second]})
    agent.detectors.standing = [first] if at == WARNED_AT else []


def checkpoints_of(listener: Listener) -> list[wire.Checkpoint]:
    return listener.of(wire.Checkpoint)


@pytest.mark.parametrize(("settings", "requests"), [({}, 1), ({"save_on_warning": False}, 0), ({"world_size": 2}, 0)])
def test_custom_loop_gets_one_save_request_per_incident_unless_ranks_cannot_agree(
    settings: dict[str, Any], requests: int, tmp_path: Path
) -> None:
    model = tiny_gpt()
    with listening(model, run="r", **settings) as (agent, listener):
        script_warnings(agent)
        for step in range(6):
            train(agent, model, [step])
            if agent.should_save:
                agent.checkpoint_saved(tmp_path / f"step-{step + 1}.pt")
        agent.checkpoint_saved(tmp_path / "last.pt")
    *requested, last = checkpoints_of(listener)
    assert [(one.requested, one.trainer) for one in requested] == [(True, "own")] * requests
    assert (last.requested, last.step, last.path) == (False, 6, str(tmp_path / "last.pt"))


def test_incident_requests_another_save_only_after_all_warnings_are_cleared() -> None:
    requests, first, second = SaveRequests(True), verdict(0, 0), verdict(0, 1, id="second")
    requests.follow([first], [first])
    assert (requests.take(1), requests.take(1)) == (True, False)
    requests.follow([], [first])
    requests.follow([second], [first, second])
    assert not requests.take(2)
    requests.follow([first.model_copy(update={"state": "cleared"})], [second])
    requests.follow([], [])
    requests.follow([first], [first])
    assert requests.take(9)
    requests.follow([verdict(None, None, signal="nonfinite", cause="other", id="nan")], [])
    assert not requests.take(9)
    requests.follow([], [])
    requests.follow([note := verdict(0, 0, severity="info")], [note])
    assert not requests.take(9)


class Process:
    """One of `world` processes that share a store and step in any order."""

    def __init__(self, store: Any, world: int) -> None:
        self.requests = SaveRequests(True, Rounds("r", lambda: (store, world)))
        self.step, self.saves = 0, list[int]()

    def make_step(self) -> None:
        self.step += 1
        if self.requests.take(self.step):
            self.saves.append(self.step)


@given(
    world=st.integers(2, 4),
    max_lag=st.integers(1, 4 * AHEAD),
    warned=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_processes_save_after_the_same_steps_for_any_lag(
    world: int, max_lag: int, warned: list[tuple[int, int]], seed: int
) -> None:
    store, random = HashStore(), Random(seed)
    processes = [Process(store, world) for _ in range(world)]
    while any(process.step < 300 for process in processes):
        first = min(process.step for process in processes)
        process = random.choice([one for one in processes if one.step < min(300, first + max_lag)])
        process.make_step()
        for rank, step in warned:
            if process is processes[rank % world] and process.step == step:
                process.requests.follow([verdict(0, 0, step=step)], [verdict(0, 0, step=step)])
    saves = {tuple(process.saves) for process in processes}
    assert len(saves) == 1
    if max_lag <= LOOK_EVERY:
        [steps] = saves
        assert len(steps) == bool(warned)
        assert all(step <= min(at for _, at in warned) + 2 * AHEAD for step in steps)


def test_save_that_some_process_never_sees_is_proposed_three_times() -> None:
    store = HashStore()
    process = Process(store, 2)  # the second process never steps
    process.requests.follow([verdict(0, 0)], [verdict(0, 0)])
    for _ in range(10 * AHEAD):
        process.make_step()
    assert process.saves == []
    assert [store.check([f"r/{number}"]) for number in (ROUNDS - 1, ROUNDS)] == [True, False]


def save_steps_of_this_rank() -> list[int]:
    """The steps, of 40 under DDP, at which this rank is asked for a checkpoint; only rank 1 has a warning."""
    model, saves = DistributedDataParallel(tiny_gpt()), []
    with attach(model, **EVERY_STEP, run="r") as agent:
        if agent.config.rank == 1:
            script_warnings(agent)
        for step in range(40):
            train(agent, model, [step])
            if agent.should_save:
                saves.append(agent.current_step)
                torch.distributed.barrier()
    return saves


@pytest.mark.full
def test_two_ranks_save_at_the_same_step_for_a_warning_on_one(tmp_path: Path) -> None:
    first, second = torchrun.run_on_ranks(save_steps_of_this_rank, 2, tmp_path)
    assert first == second
    assert len(first) == 1


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_saves_at_a_warning_in_addition_to_its_own_checkpoints(trainer: str, tmp_path: Path) -> None:
    training = Training(tmp_path, 8, begun=script_warnings)
    TRAINERS[trainer](training)
    checkpoints = checkpoints_of(training.listener)
    assert [one.step for one in checkpoints if not one.requested] == [4, 8]
    [requested] = [one for one in checkpoints if one.requested]
    assert {one.trainer for one in checkpoints} == {trainer}
    assert Path(requested.path).exists()
    if trainer == "lightning":
        assert Path(requested.path).name == f"foreshock-step={requested.step}.ckpt"


def test_transformers_gets_no_request_that_would_replace_its_only_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path, 8, begun=script_warnings, keep=1)
    with_transformers(training)
    assert [(one.step, one.requested) for one in checkpoints_of(training.listener)] == [(4, False), (8, False)]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "torchtitan"])
def test_failed_requested_checkpoint_is_not_reported_and_training_continues(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, save = LightningTrainer.save_checkpoint, titan_shape.CheckpointManager.save

    def fail_to_write(self: LightningTrainer, path: Any, *args: Any, **kwargs: Any) -> None:
        if "foreshock" in Path(path).name:
            raise OSError("no space left")
        write(self, path, *args, **kwargs)

    def fail_to_save(self: titan_shape.CheckpointManager, curr_step: int, last_step: bool = False) -> bool:
        if self.interval == 1:  # a save requested by the agent
            raise OSError("no space left")
        return save(self, curr_step, last_step)

    monkeypatch.setattr(LightningTrainer, "save_checkpoint", fail_to_write)
    monkeypatch.setattr(titan_shape.CheckpointManager, "save", fail_to_save)
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(
        parents=True
    )  # left by Accelerate from a run that was not resumed
    training = Training(tmp_path, 5, begun=script_warnings, every=99)
    TRAINERS[trainer](training)
    assert training.agent.current_step == 5
    assert not [one for one in checkpoints_of(training.listener) if one.requested]
    assert "the checkpoint that a warning asked for was not saved; training continues" in caplog.text


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate", "torchtitan"])
def test_last_checkpoint_before_a_warning_survives_the_deletion_of_old_ones(trainer: str, tmp_path: Path) -> None:
    """Checkpoints are saved every 4 steps, and the warning is at step 9. By step 32, that of step 8 is deleted."""
    training = Training(
        tmp_path, 32, begun=lambda agent: script_warnings(agent, 9), keep=1 if trainer == "lightning" else 2
    )
    TRAINERS[trainer](training)
    checkpoints = checkpoints_of(training.listener)
    first, second = [one for one in checkpoints if one.step == 8]
    assert not Path(first.path).exists()
    name = "8" if trainer == "torchtitan" else Path(first.path).name
    assert Path(second.path).name == f"foreshock-clean-{name}"
    assert (second.trainer, second.requested) == (trainer, False)
    files = [Path(second.path)] if trainer == "lightning" else list(Path(second.path).iterdir())
    assert len(files) >= {"lightning": 1, "torchtitan": 2}.get(trainer, 4)
    assert all(file.stat().st_size for file in files)
    assert {file.stat().st_nlink for file in files} == {1}
    others = [one for one in checkpoints if one.step > 8 and not one.requested]
    assert sum(Path(one.path).exists() for one in others) <= 2  # the trainer still deletes old checkpoints


def test_checkpoint_before_the_suspect_step_is_linked_once_for_overlapping_warnings(tmp_path: Path) -> None:
    known = KnownCheckpoints()
    for step in (2, 4, 8, 12):
        (path := tmp_path / f"checkpoint-{step}").mkdir()
        (path / "weights").touch()
        known.add(wire.Checkpoint(step=step, path=str(path), trainer="transformers"))
    linked = tmp_path / "foreshock-clean-checkpoint-4"
    (tmp_path / f"{linked.name}.unfinished").mkdir()  # a process was killed while linking
    (tmp_path / f"{linked.name}.unfinished" / "weights").touch()
    warned, second = verdict(0, 0, step=14, evidence={"suspect_step": 8.0}), verdict(0, 1, step=15, id="second")
    found = known.follow([warned], [warned])
    assert found is not None
    assert (found.step, found.path, (linked / "weights").exists()) == (4, str(linked), True)
    assert known.follow([second], [warned, second]) is None
    assert known.follow([], []) is None
    assert known.follow([warned], [warned]) == found
    known.follow([], [])
    known.add(found)  # the run resumed from this checkpoint
    assert known.follow([warned], [warned]) is None
    assert [one.name for one in tmp_path.glob("foreshock*")] == [linked.name]


def test_filesystem_without_hard_links_is_reported(
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


def test_torchtitans_model_only_save_is_not_reported_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(titan_shape.CheckpointManager, "last_save_model_only", True)  # torchtitan's default
    training = Training(tmp_path, 7, begun=script_warnings, every=20)
    with_torchtitan(training)
    [requested] = checkpoints_of(training.listener)
    assert requested.requested
    assert Path(requested.path, "state.pt").is_file()
