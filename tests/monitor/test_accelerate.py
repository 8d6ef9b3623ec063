"""Accelerate's tracker: a step for each log, checkpoints that repeat no step and lose none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.contract import wire
from foreshock.monitor.callbacks.accelerate import ForeshockTracker

QUICK: dict[str, Any] = {"attention": "kernels", "sample_every_seconds": 0.0, "strict": True, "quiet": True}


def train(folder: Path, steps: range, *, resume: bool = False, late: bool = False) -> tuple[ForeshockTracker, Listener]:
    """Train over `steps` with a sample every 3 of them, and save after step 4. `late` loads before init_trackers."""
    model = tiny_gpt()
    tracker = ForeshockTracker(model, **QUICK, sample_every_steps=3)
    accelerator = Accelerator(log_with=tracker, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker.checkpoint_with(accelerator)
    listener = Listener()
    if resume and late:
        accelerator.load_state(str(folder))
    accelerator.init_trackers("test")
    if resume and not late:
        accelerator.load_state(str(folder))
    assert tracker.agent is not None
    tracker.agent.subscribe(listener)
    for step in steps:
        loss = train_step(model, optimizer, step)
        accelerator.log({"loss": loss, "lr": 0.1, "speed": 7.0}, step=step)
        accelerator.log({"evaluated": 1.0})  # no loss, no step: nothing of ours
        if step == 2:
            tracker.agent.set_mode([(1, 0)], "exact_delta", "a test")
        if step == 4 and not resume:
            accelerator.save_state(str(folder))
    accelerator.end_training()
    return tracker, listener


def test_a_loop_that_never_calls_init_trackers_is_told_once_that_nothing_is_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    tracker = ForeshockTracker(model, **QUICK)
    accelerator = Accelerator(log_with=tracker, cpu=True)
    tracker.checkpoint_with(accelerator)
    for _ in range(2):
        accelerator.backward(next(model.parameters()).square().sum())
    [said] = [record.message for record in caplog.records if record.name == "foreshock"]
    assert said == "foreshock watches nothing: call accelerator.init_trackers before the first step"


def intervals(listener: Listener) -> list[tuple[int, int]]:
    return [(s.since_step, s.step) for s in listener.of(wire.Sample)]


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_loop_repeats_no_step_loses_none_and_keeps_its_modes(late: bool, tmp_path: Path) -> None:
    first, before = train(tmp_path, range(1, 7))
    again, after = train(tmp_path, range(5, 10), resume=True, late=late)
    kept = [i for i in intervals(before) if i[1] <= 4]
    assert [step for since, end in kept + intervals(after) for step in range(since + 1, end + 1)] == [*range(1, 10)]
    assert first.agent is not None
    assert again.agent is not None
    assert again.agent.run == first.agent.run
    assert again.agent.modes()[(1, 0)] == "exact_delta"
    assert after.of(wire.Started)[0].step == 4


@pytest.mark.promise("A31")
@pytest.mark.parametrize(("numbers", "start"), [(range(9, 200, 10), 8), (range(101, 121), 100), (range(20), 0)])
def test_a_tracker_without_checkpoints_goes_on_where_the_loop_is(numbers: range, start: int) -> None:
    tracker, listener = ForeshockTracker(tiny_gpt(), **QUICK), Listener()
    tracker.start()
    assert tracker.agent is not None
    tracker.agent.subscribe(listener)
    for step in numbers:
        tracker.log({"loss": 1.0}, step=step)
    tracker.finish()
    assert listener.of(wire.Started)[0].step == start
    assert {end // 10 for _, end in intervals(listener)} == {step // 10 for step in numbers}


class OneOfSeveral:
    """What the tracker needs of an Accelerator."""

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index
        self.hooks: dict[str, Any] = {}
        self.trackers: list[Any] = []
        self.project_configuration = ProjectConfiguration()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def save_state(self) -> None:
        """Nothing is written here: the tests call the hooks."""

    def register_save_state_pre_hook(self, hook: Any) -> None:
        self.hooks["save"] = hook

    def register_load_state_pre_hook(self, hook: Any) -> None:
        self.hooks["load"] = hook


def test_each_process_saves_and_takes_up_its_own_state(tmp_path: Path) -> None:
    def modes_after(process: int, folder: str, *, switch: tuple[int, int] | None = None) -> Any:
        tracker, accelerator = ForeshockTracker(tiny_gpt(), **QUICK), OneOfSeveral(process)
        tracker.checkpoint_with(accelerator)
        tracker.start()
        assert tracker.agent is not None
        if switch is None:
            accelerator.hooks["load"]([], folder)
        else:
            tracker.agent.set_mode([switch], "exact_delta", "a test")
            accelerator.hooks["save"]([], [], folder)
        switched = [head for head, mode in tracker.agent.modes().items() if mode != "plain"]
        tracker.finish()
        return switched

    for process, head in enumerate([(0, 0), (1, 1)]):
        assert modes_after(process, str(tmp_path), switch=head) == [head]
    assert [modes_after(process, str(tmp_path)) for process in range(3)] == [[(0, 0)], [(1, 1)], [(0, 0)]]
    assert modes_after(0, str(tmp_path / "nothing")) == []


def test_a_process_beside_the_first_is_watched_though_accelerate_leaves_its_trackers_alone() -> None:
    tracker, accelerator = ForeshockTracker(tiny_gpt(), **QUICK), OneOfSeveral(1)
    tracker.checkpoint_with(accelerator)
    other: Any = accelerator
    other.init_trackers("test")
    assert tracker.agent is not None
    other.log({"loss": 1.0}, step=1)
    assert tracker.agent.current_step == 1
    assert accelerator.trackers == [tracker]  # which end_training finishes
    tracker.finish()
    first = OneOfSeveral(0)
    ForeshockTracker(tiny_gpt(), **QUICK).checkpoint_with(first)
    assert not hasattr(first, "init_trackers")  # Accelerate's own serves


def test_qk_clip_is_shown_the_optimizers_that_16_bit_weights_need(tmp_path: Path) -> None:
    model = tiny_gpt().to(torch.bfloat16)
    tracker = ForeshockTracker(model, **QUICK, qk_clip="always", qk_clip_threshold=1e-3)
    accelerator = Accelerator(log_with=tracker, cpu=True)
    tracker.checkpoint_with(accelerator)
    accelerator.init_trackers("test")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (1, 2, 3):
        accelerator.log({"loss": train_step(model, optimizer, step)}, step=step)
    assert tracker.agent is not None
    report = tracker.agent.report()
    accelerator.end_training()
    assert "heads were scaled" in report
    assert "may be copies" not in report
