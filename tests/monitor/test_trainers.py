"""Callbacks of four trainers: each optimizer step counts once, also across a resume, and the end is reported."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.monitor import titan_shape, trainers
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt
from tests.monitor.trainers import TRAINERS, Training, gpt2, with_lightning, with_torchtitan, with_transformers
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from foreshock.contract import wire
from foreshock.monitor import Agent
from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.callbacks.huggingface import ForeshockCallback
from foreshock.monitor.callbacks.torchtitan import watch

pytestmark = pytest.mark.filterwarnings(*trainers.LIGHTNING_WARNINGS)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_optimizer_step_is_one_sample_with_loss_rate_and_all_micro_batches(trainer: str, tmp_path: Path) -> None:
    clip, micro_batches = torch.nn.utils.clip_grad_norm_, 1 if trainer == "accelerate" else 2
    training = Training(tmp_path, 3, accumulate=micro_batches)
    TRAINERS[trainer](training)
    assert training.intervals == [(0, 1), (1, 2), (2, 3)]
    assert [s.loss for s in training.samples] == pytest.approx(training.losses, rel=1e-4)
    assert [s.learning_rate for s in training.samples] == [1e-3 if trainer == "torchtitan" else 1e-2] * 3
    assert training.rows == [{micro_batches * 4 * (64 if trainer == "torchtitan" else 12)}] * 3
    assert training.samples[0].query_norm is not None
    assert all((s.grad_norm or 0.0) > 0 for s in training.samples if trainer == "torchtitan")
    if trainer == "transformers":
        assert [s.grad_norm for s in training.samples] == pytest.approx(
            training.norms, rel=1e-6
        )  # norms belong to their own steps
    assert [ended.status for ended in training.listener.of(wire.Finished)] == ["completed"]
    assert training.agent.faults == {}
    assert "not monitored" not in training.agent.report()
    assert torch.nn.utils.clip_grad_norm_ is clip


def switch(agent: Agent) -> None:
    if agent.current_step == 2:
        agent.set_mode([(1, 0)], "exact_delta", "a test")


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        pytest.param("transformers", {}, marks=pytest.mark.full),
        pytest.param("transformers", {"restore_callback_states_from_checkpoint": True}, marks=pytest.mark.full),
        ("lightning", {}),
        ("accelerate", {}),
        ("accelerate", {"late": True}),
        ("torchtitan", {}),
    ],
)
def test_resumed_training_counts_each_step_once_and_keeps_its_modes(
    trainer: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run: Callable[..., None] = TRAINERS[trainer]
    every: Any = {"sample_every_steps": 3}
    uninterrupted = Training(tmp_path / "straight", 9, during=switch, **every)
    first = Training(tmp_path / "run", 4 if trainer == "torchtitan" else 6, during=switch, **every)
    resumed = Training(tmp_path / "run", 9, resume=True, **every)
    run(uninterrupted)
    run(first)
    run(resumed, **options)
    before = [interval for interval in first.intervals if interval[1] <= 4]
    assert [step for a, b in before + resumed.intervals for step in range(a + 1, b + 1)] == [*range(1, 10)]
    assert (resumed.agent.run, resumed.agent.modes()) == (first.agent.run, uninterrupted.agent.modes())
    assert resumed.agent.modes()[(1, 0)] == "exact_delta"
    assert resumed.agent.boot > first.agent.boot
    assert resumed.listener.of(wire.Started)[0].step == 4
    if trainer in ("transformers", "torchtitan"):  # these trainers also resume the data
        assert resumed.losses[-5:] == pytest.approx(uninterrupted.losses[4:], rel=1e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_qk_clip_scales_16_bit_weights_under_each_trainer(trainer: str, tmp_path: Path) -> None:
    training = Training(tmp_path, 3, dtype=torch.bfloat16, qk_clip="always", qk_clip_threshold=1e-3)
    TRAINERS[trainer](training)
    assert "heads were scaled" in training.agent.report()
    assert "not scaled" not in training.agent.report()
    assert {head for clipped in training.listener.of(wire.Clipped) for head in clipped.heads} == {
        *training.agent.modes()
    }


def fail_at_step_2(agent: Agent) -> None:
    if agent.current_step == 2:
        raise RuntimeError("an error of the user")


def test_failed_lightning_training_is_reported_as_failed(tmp_path: Path) -> None:
    training = Training(tmp_path, 5, during=fail_at_step_2)
    with pytest.raises(RuntimeError, match="an error of the user"):
        with_lightning(training)
    assert [ended.status for ended in training.listener.of(wire.Finished)] == ["failed"]


@pytest.mark.full
def test_failed_transformers_training_can_be_restarted(tmp_path: Path) -> None:
    training = Training(tmp_path, 3, during=fail_at_step_2)
    trainer = trainers.trainer_of(training, save_strategy="no")
    with pytest.raises(RuntimeError, match="an error of the user"):
        trainer.train()
    training.during = lambda agent: None
    trainer.train()
    assert [ended.status for ended in training.listener.of(wire.Finished)] == ["failed", "completed"]


def test_lightnings_own_gradient_norm_is_reported_without_recomputing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    original = torch.nn.utils.clip_grad_norm_

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        norms.append(original(*args, **kwargs).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counting)
    training = Training(tmp_path, 3, accumulate=2)
    with_lightning(training, gradient_clip_val=0.1)
    assert [s.grad_norm for s in training.samples] == pytest.approx(norms, rel=1e-6)
    assert len(norms) == 3  # norms are not computed twice
    assert min(norms) > 0.1
    assert torch.nn.utils.clip_grad_norm_ is counting


def test_checkpoint_contains_neither_the_token_nor_a_foreshock_attention(tmp_path: Path) -> None:
    training = Training(tmp_path, 4, token="very-secret-token")
    with_transformers(training)
    text = "".join(p.read_text() for p in (tmp_path / "checkpoint-4").glob("*.json"))
    assert "very-secret-token" not in text
    assert "foreshock" not in (tmp_path / "checkpoint-4" / "config.json").read_text()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["ObservedCallback"]["attributes"]["saved"]["step"] == 4


@pytest.mark.promise("A30")
def test_unsupported_transformers_setup_is_rejected_if_strict_and_otherwise_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    args, control = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), TrainerControl()
    with pytest.raises(ValueError, match="does not pass the model to its callbacks; transformers 5 does"):
        ForeshockCallback(**EVERY_STEP).on_train_begin(args, TrainerState(), control)
    args._n_gpu = 2
    with caplog.at_level(logging.WARNING, "foreshock"):
        for given, reason in (
            ({}, "does not pass the model to its callbacks"),
            ({"model": gpt2()}, "use DistributedDataParallel, with torchrun"),
        ):
            callback = ForeshockCallback(**EVERY_STEP | {"strict": False})
            callback.on_train_begin(args, TrainerState(), control, **given)
            callback.on_step_end(args, TrainerState(global_step=1), control)
            callback.on_train_end(args, TrainerState(global_step=1), control)
            assert reason in caplog.records[-1].message


@pytest.mark.parametrize("model_known", [True, False])
def test_restored_callback_uses_the_programs_settings_or_logs_that_it_does_not(
    model_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    args = TrainingArguments("unused", report_to=[], use_cpu=True)
    before = ForeshockCallback(**EVERY_STEP, run="one")
    stored = before.state()
    model, program = gpt2(), ForeshockCallback(**EVERY_STEP, run="one", policy="auto", mitigation="exact_delta")
    if model_known:
        program.on_init_end(args, TrainerState(), TrainerControl(), model=model)
    restored = ForeshockCallback(**stored["args"])  # like Trainer._load_callback_state
    for name, value in stored["attributes"].items():
        setattr(restored, name, value)
    restored.on_train_begin(args, TrainerState(global_step=4), TrainerControl(), model=model)
    assert restored.agent is not None
    assert (program.agent is restored.agent) == model_known
    assert (restored.agent.config.policy, restored.agent.current_step) == ("auto" if model_known else "observe", 4)
    assert ("foreshock uses the settings of the checkpoint" in caplog.text) == (not model_known)
    restored.on_train_end(args, TrainerState(), TrainerControl())


def test_removed_settings_in_a_checkpoint_are_ignored_on_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = TrainingArguments("unused", report_to=[], use_cpu=True)
    earlier: Any = {"sample_every_seconds": 2.0, "layers": {"a": 1}, "qk_clip_every_steps": 10}
    restored = ForeshockCallback(**EVERY_STEP, run="one", **earlier)
    restored.restored = True
    restored.on_train_begin(args, TrainerState(), TrainerControl(), model=gpt2())
    assert restored.agent is not None
    assert restored.agent.run == "one"
    assert [name for name in earlier if f"the checkpoint's setting {name} is ignored" in caplog.text] == list(earlier)
    assert restored.state()["args"].keys().isdisjoint(earlier)
    restored.on_train_end(args, TrainerState(), TrainerControl())
    program = ForeshockCallback(**EVERY_STEP, **earlier)
    with pytest.raises(ValueError, match="sample_every_seconds is no longer a setting"):
        program.on_train_begin(args, TrainerState(), TrainerControl(), model=gpt2())


def test_other_ranks_save_and_restore_their_own_state(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-0").mkdir()
    args, state = SimpleNamespace(n_gpu=0, process_index=1, output_dir=str(tmp_path)), TrainerState()
    control: Any = TrainerControl()
    found = []
    for saves in (True, False):
        callback = ForeshockCallback(**EVERY_STEP)
        callback.on_train_begin(args, state, control, model=gpt2())
        assert callback.agent is not None
        if saves:
            callback.agent.set_mode([(0, 1)], "exact_delta", "a test")
            callback.on_save(args, state, control)
        found.append((callback.agent.run, callback.agent.modes()[(0, 1)]))
        callback.on_train_end(args, state, control)
    assert found[1] == found[0] == (found[0][0], "exact_delta")


def test_missing_init_trackers_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    tracker = ForeshockTracker(model, **EVERY_STEP)
    accelerator = Accelerator(log_with=tracker, cpu=True)
    tracker.checkpoint_with(accelerator)
    for _ in range(2):
        accelerator.backward(next(model.parameters()).square().sum())
    [message] = [record.message for record in caplog.records if record.name == "foreshock"]
    assert message == "foreshock is not attached: call accelerator.init_trackers before the first step"


@pytest.mark.promise("A31")
@pytest.mark.parametrize(("numbers", "start"), [(range(9, 200, 10), 8), (range(101, 121), 100), (range(20), 0)])
def test_tracker_without_checkpoints_starts_at_the_step_of_the_loop(numbers: range, start: int) -> None:
    tracker, listener = ForeshockTracker(tiny_gpt(), **EVERY_STEP | {"sample_every_steps": 10}), Listener()
    tracker.start()
    assert tracker.agent is not None
    tracker.agent.subscribe(listener)
    for step in numbers:
        tracker.log({"loss": 1.0}, step=step)
    tracker.finish()
    assert listener.of(wire.Started)[0].step == start
    assert {sample.step // 10 for sample in listener.of(wire.Sample)} == {step // 10 for step in numbers}


def test_training_started_without_foreshock_keeps_its_step_numbers(tmp_path: Path) -> None:
    titan_shape.Trainer(4, tmp_path, interval=4).train()
    training = Training(tmp_path, 6)
    with_torchtitan(training)
    assert training.intervals == [(4, 5), (5, 6)]


def test_failed_write_of_the_state_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_write(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("foreshock.monitor.callbacks.shared.os.replace", fail_to_write)
    training = Training(tmp_path, 4, every=2)
    with_torchtitan(training)
    assert training.intervals[-1] == (3, 4)
    assert training.agent.faults == {}
    assert not list(tmp_path.rglob("foreshock_0.json"))
    assert "training continues: no space left on device" in caplog.text


def test_pipeline_stage_keeps_torchtitans_layer_numbers(tmp_path: Path) -> None:
    trainer = titan_shape.Trainer(1, tmp_path)
    pipeline_parts: list[nn.Module] = [
        nn.ModuleDict({"layers": nn.ModuleDict({n: titan_shape.TransformerBlock(64)})}) for n in ("2", "6")
    ]
    trainer.model_parts = pipeline_parts  # the parts of one rank in an interleaved schedule
    with watch(trainer, **EVERY_STEP) as agent:
        assert sorted({layer for layer, _ in agent.modes()}) == [2, 6]
    with pytest.raises(
        ValueError, match=r"SimpleNamespace does not have model_parts, .*: it is not a Trainer of torchtitan"
    ):
        watch(SimpleNamespace())


@pytest.mark.execution("plain attention", "torch.compile")
def test_blocks_compiled_by_torchtitan_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled(titan_shape.Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for block in self.model_parts[0].get_submodule("layers").children():
                block.compile(backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(titan_shape, "Trainer", Compiled)
    training = Training(tmp_path, 2)
    with_torchtitan(training)
    assert training.rows == [{4 * 64}] * 2
