"""Models of transformers and their Trainer: attention, masks, one-line callback, resume."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.transformers_models import DECODER, EXPERTS, tiny
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.callbacks.huggingface import ForeshockCallback


def gpt2(**changes: Any) -> Any:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 48, "n_positions": 64}
    options = {**sizes, "bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLMLoss", **changes}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**options))


def ids(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(48, (rows, length), generator=torch.Generator().manual_seed(7))


def test_generation_works_while_attached() -> None:
    model = gpt2().eval()
    expected = model.generate(ids(1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    agent = attach(model, **EVERY_STEP, numerics="float32")
    got = model.generate(ids(1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    agent.close()
    assert torch.equal(got, expected)


# ---- the Trainer ----------------------------------------------------------------------------------------------------


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """32 sequences of 12 tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(48, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


class Observed(ForeshockCallback):
    """The callback, with a listener from the start and a switch at a step."""

    def __init__(self, *, switch_at: int | None = None, **overrides: Any) -> None:
        super().__init__(**overrides)
        self.listener = Listener()
        self.switch_at = switch_at
        self.loss_seen: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        assert self.agent is not None
        self.agent.subscribe(self.listener)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        assert self.agent is not None
        if state.global_step == self.switch_at:
            self.agent.set_mode([(1, 0)], "exact_delta", "a test")

    def samples(self) -> list[wire.Sample]:
        return self.listener.of(wire.Sample)

    def state(self) -> dict[str, Any]:
        saved = super().state()
        return {**saved, "args": {**saved["args"], "switch_at": self.switch_at}}


def train(
    folder: Path,
    callback: ForeshockCallback | None,
    steps: int,
    *,
    model: nn.Module | None = None,
    resume: str | None = None,
    **changes: Any,
) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(folder), max_steps=steps, **{**settings, **changes})
    callbacks = [callback] if callback is not None else []
    trainer = Trainer(gpt2() if model is None else model, args, train_dataset=Sequences(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rows_per_head(sample: wire.Sample) -> list[float]:
    words = sample.words()
    assert words is not None
    counted: list[float] = slot_values(words, Slot.ROWS).tolist()
    return counted


def intervals(callback: Observed) -> list[tuple[int, int]]:
    return [(s.since_step, s.step) for s in callback.samples()]


def test_one_line_in_the_trainer_watches_every_step_with_the_raw_loss(tmp_path: Path) -> None:
    callback = Observed(**EVERY_STEP)
    trainer = train(tmp_path, callback, 4)
    assert intervals(callback) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [s.loss for s in callback.samples()] == pytest.approx(logged, rel=1e-4)
    assert [s.learning_rate for s in callback.samples()] == [1e-2] * 4
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [s.grad_norm for s in callback.samples()] == pytest.approx(norms, rel=1e-6)  # each on its own step
    assert callback.listener.events[-1].kind == "finished"
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "sizes"), [("Mixtral", EXPERTS), pytest.param("Qwen3", {}, marks=pytest.mark.full)])
@pytest.mark.parametrize("attention", ["keep", pytest.param("kernels", marks=pytest.mark.full)])
def test_a_mixture_of_experts_and_norms_of_queries_train_in_the_trainer_as_without_us(
    kind: str, sizes: dict[str, Any], attention: Any, tmp_path: Path
) -> None:
    def trained(callback: ForeshockCallback | None) -> list[Tensor]:
        model: Any = tiny(kind, **DECODER, **sizes)
        train(tmp_path, callback, 2, model=model, save_strategy="no", optim="sgd")
        return [weight.detach() for weight in model.parameters()]

    callback = Observed(**{**EVERY_STEP, "attention": attention, "probe_rows": 10**6})
    for got, expected in zip(trained(callback), trained(None), strict=True):
        if attention == "kernels":
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(got, expected)
    assert [rows_per_head(s) for s in callback.samples()] == [[4 * 12] * 8] * 2


def test_accumulated_micro_batches_give_the_mean_loss_of_the_step(tmp_path: Path) -> None:
    callback = Observed(**EVERY_STEP)
    trainer = train(tmp_path, callback, 2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [s.loss for s in callback.samples()] == pytest.approx(logged, rel=1e-4)
    assert [rows_per_head(s) for s in callback.samples()] == [[4 * 12] * 4] * 2


@pytest.mark.full
@pytest.mark.parametrize("restore", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_resumed_training_repeats_no_step_loses_none_and_keeps_its_modes(tmp_path: Path, restore: bool) -> None:
    settings = {**EVERY_STEP, "sample_every_steps": 3}
    straight = Observed(**settings, switch_at=2)
    train(tmp_path / "a", straight, 9)
    interrupted = Observed(**settings, switch_at=2)
    train(tmp_path / "b", interrupted, 5)
    resumed = Observed(**settings)
    checkpoint = str(tmp_path / "b" / "checkpoint-4")
    trainer = train(tmp_path / "b", resumed, 9, resume=checkpoint, restore_callback_states_from_checkpoint=restore)
    if restore:  # the Trainer then makes the callback anew
        resumed = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Observed))
    assert resumed.agent is not None
    assert interrupted.agent is not None
    before = [i for i in intervals(interrupted) if i[1] <= 4]
    assert [step for since, end in before + intervals(resumed) for step in range(since + 1, end + 1)] == [*range(1, 10)]
    assert resumed.agent.run == interrupted.agent.run
    assert resumed.agent.boot > interrupted.agent.boot
    started = resumed.listener.of(wire.Started)[0]
    assert started.step == 4
    first = resumed.samples()[0]
    assert first.modes is not None
    assert first.modes.numpy().tolist() == [0, 0, 1, 0]
    # the counts of the steps after the checkpoint are those of the training that was never interrupted
    merged = np.sum([rows_per_head(s) for s in straight.samples() if s.since_step >= 4], axis=0)
    again = np.sum([rows_per_head(s) for s in resumed.samples()], axis=0)
    assert (merged == again).all()
    assert trainer.state.global_step == 9


def test_a_checkpoint_names_no_foreshock_attention_and_holds_no_secret(tmp_path: Path) -> None:
    train(tmp_path, ForeshockCallback(**EVERY_STEP, token="very-secret-token"), 4)
    text = "".join(p.read_text() for p in (tmp_path / "checkpoint-4").glob("*.json"))
    assert "very-secret-token" not in text
    assert "foreshock" not in (tmp_path / "checkpoint-4" / "config.json").read_text()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["ForeshockCallback"]["attributes"]["saved"]["step"] == 4


@pytest.mark.full
def test_a_training_that_failed_can_be_started_again(tmp_path: Path) -> None:
    class FailsOnce(Observed):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            if not self.loss_seen:
                self.loss_seen.append(0.0)
                raise RuntimeError("another callback's fault")

    callback = FailsOnce(**EVERY_STEP)
    args = TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(gpt2(), args, train_dataset=Sequences(), callbacks=[callback])
    with pytest.raises(RuntimeError, match="another callback's fault"):
        trainer.train()
    trainer.train()
    assert [e.status for e in callback.listener.of(wire.Finished)] == ["failed", "completed"]


@pytest.mark.promise("A30")
def test_a_trainer_whose_model_cannot_be_watched_trains_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    lenient = {**EVERY_STEP, "strict": False}
    with pytest.raises(ValueError, match="hands its callbacks no model; transformers 5 does"):
        ForeshockCallback(**EVERY_STEP).on_train_begin(args, TrainerState(), TrainerControl())
    args._n_gpu = 2
    with caplog.at_level(logging.WARNING, "foreshock"):
        for given, why in (
            ({}, "hands its callbacks no model"),
            ({"model": gpt2()}, "use DistributedDataParallel, with torchrun"),
        ):
            callback = ForeshockCallback(**lenient)
            callback.on_train_begin(args, TrainerState(), TrainerControl(), **given)
            callback.on_step_end(args, TrainerState(global_step=1), TrainerControl())
            callback.on_train_end(args, TrainerState(global_step=1), TrainerControl())
            assert why in caplog.records[-1].message


@pytest.mark.parametrize("known", [True, False])
def test_where_the_trainer_restores_callbacks_the_settings_of_the_program_hold_or_a_line_says_that_they_do_not(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    args = TrainingArguments("unused", report_to=[], use_cpu=True)
    before = ForeshockCallback(**EVERY_STEP, run="one")
    stored = before.state()
    model, program = gpt2(), ForeshockCallback(**EVERY_STEP, run="one", policy="auto", mitigation="exact_delta")
    if known:
        program.on_init_end(args, TrainerState(), TrainerControl(), model=model)
    restored = ForeshockCallback(**stored["args"])  # as Trainer._load_callback_state makes it
    for name, value in stored["attributes"].items():
        setattr(restored, name, value)
    restored.on_train_begin(args, TrainerState(global_step=4), TrainerControl(), model=model)
    assert restored.agent is not None
    assert (program.agent is restored.agent) == known
    assert (restored.agent.config.policy, restored.agent.current_step) == ("auto" if known else "observe", 4)
    assert ("the checkpoint's settings of foreshock hold" in caplog.text) == (not known)
    restored.on_train_end(args, TrainerState(), TrainerControl())


def test_a_process_beside_the_first_saves_and_takes_up_its_own_state(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-0").mkdir()
    args, state = SimpleNamespace(n_gpu=0, process_index=1, output_dir=str(tmp_path)), TrainerState()
    control: Any = TrainerControl()
    saving, again = Observed(**EVERY_STEP), Observed(**EVERY_STEP)
    saving.on_train_begin(args, state, control, model=gpt2())
    assert saving.agent is not None
    saving.agent.set_mode([(0, 1)], "exact_delta", "a test")
    saving.on_save(args, state, control)
    saving.on_train_end(args, state, control)
    again.on_train_begin(args, state, control, model=gpt2())
    assert again.agent is not None
    assert again.agent.modes()[(0, 1)] == "exact_delta"
    assert again.agent.run == saving.agent.run
    again.on_train_end(args, state, control)


def test_qk_clip_is_one_argument_and_scales_16_bit_weights_that_the_trainers_optimizer_owns(tmp_path: Path) -> None:
    quick = {name: value for name, value in EVERY_STEP.items() if name != "attention"}
    callback = Observed(**quick, qk_clip="always", qk_clip_threshold=1e-3)
    train(tmp_path, callback, 3, model=gpt2().to(torch.bfloat16))
    assert callback.agent is not None
    assert "; 4 heads were scaled, " in callback.agent.report()
    assert "left out" not in callback.agent.report()
    assert {head for told in callback.listener.of(wire.Clipped) for head in told.heads} == {
        (layer, head) for layer in range(2) for head in range(2)
    }
