"""Distributed trainings with transformers' Trainer or Accelerate under FSDP2, or Accelerate under DDP, each with and
without foreshock. Each training stops, saves, and resumes in another trainer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from tests.monitor.resumed_training import LENGTH, REFERENCES, ROWS, STEPS, STOP, WATCHED, ResumedTraining
from tests.monitor.transformers_models import DECODER, tiny
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.callbacks.huggingface import ForeshockCallback

SIZES: dict[str, dict[str, Any]] = {
    "cpu": DECODER,
    "cuda": DECODER | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 256},
}
DEVICE, SHARDED = "cpu", True


def sharding() -> FullyShardedDataParallelPlugin:
    """FSDP2 on each decoder layer."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def patch_cpu_sharding() -> None:
    """Lets Accelerate shard on a CPU; by default it requires an accelerator."""
    prepare: Callable[..., None] = AcceleratorState.__init__
    plugin = sharding()

    def with_sharding(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = with_sharding


def model() -> Any:
    return tiny("Llama", **SIZES[DEVICE]).train()


def rows(step: int, rank: int) -> Tensor:
    """The tokens of a rank in a step, [ROWS, LENGTH]."""
    return torch.randint(3, 90, (ROWS, LENGTH[DEVICE]), generator=torch.Generator().manual_seed(100 * step + rank))


class _StopAt(TrainerCallback):  # type: ignore[misc]
    """Stops a training early and reports each step to its record."""

    def __init__(self, at: int, callback: ForeshockCallback | None, course: ResumedTraining) -> None:
        self.at, self.callback, self.course = at, callback, course

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.course.begins(None if self.callback is None else self.callback.agent, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.course.stepped()
        control.should_training_stop |= state.global_step >= self.at


def arguments(folder: Path, **overrides: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": STEPS, "save_steps": STOP, "per_device_train_batch_size": ROWS, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "optim": "adamw_torch", "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "seed": 3, "bf16": DEVICE == "cuda", "use_cpu": DEVICE == "cpu",
    }  # fmt: skip
    if DEVICE == "cuda" and SHARDED:
        settings["fsdp"] = "full_shard auto_wrap"
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "reshard_after_forward": True,
        }
    return TrainingArguments(str(folder), **settings | overrides)


def train_with_trainer(folder: Path, course: ResumedTraining) -> None:
    """Train to STOP, save, and resume to STEPS with another Trainer."""
    for last in (STOP, STEPS):
        callback = None if course.settings is None else ForeshockCallback(**course.settings)
        trainer = Trainer(
            model(),
            arguments(folder),
            train_dataset=[{"input_ids": x, "labels": x} for step in range(2 * STEPS) for x in rows(step, 0)],
            callbacks=[*([callback] if callback else []), _StopAt(last, callback, course)],
        )
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STOP}") if last == STEPS else None)
        course.ends(trainer.model, trainer.state.global_step)
        course.results["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_accelerate(folder: Path, course: ResumedTraining) -> None:
    """The same with a custom loop under Accelerate."""
    for first, last in ((0, STOP), (STOP, STEPS)):
        trained = model()
        tracker = None if course.settings is None else ForeshockTracker(trained, **course.settings)
        on: dict[str, Any] = {"mixed_precision": "bf16"} if DEVICE == "cuda" else {"cpu": True}
        accelerator = Accelerator(log_with=tracker, fsdp_plugin=sharding() if SHARDED else None, **on)
        trained, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=0.01))
        if tracker is not None:
            tracker.checkpoint_with(accelerator)
            accelerator.init_trackers("test")
        if first:
            accelerator.load_state(str(folder))
        course.begins(None if tracker is None else tracker.agent, trained)
        for step in range(first, last):
            x = rows(step, dist.get_rank()).to(accelerator.device)
            loss = trained(input_ids=x, labels=x).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.detach()}, step=step + 1)
            course.stepped()
            course.results["losses"].append(float(loss))
        if not first:
            accelerator.save_state(str(folder))
        if tracker is not None:
            tracker.finish()  # end_training would also destroy the process group
        course.ends(trained, last)


def all_trainings(folder: str, device: str, trainer: str) -> dict[str, dict[str, Any]]:
    """All trainings, in the same order on every rank."""
    global DEVICE, SHARDED
    DEVICE, SHARDED = device, not trainer.endswith("DDP")
    if DEVICE == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)  # otherwise even trainings without foreshock differ
    elif SHARDED:
        patch_cpu_sharding()
    results = {}
    for attention in (*REFERENCES, *WATCHED):
        course = ResumedTraining(attention)
        with course.attention():
            (train_with_trainer if trainer == "Trainer" else train_with_accelerate)(Path(folder) / attention, course)
        results[attention] = course.results
    return results
