"""A small training under each trainer with a foreshock callback, behind one interface."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.monitor import titan_shape
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt, train_step
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent
from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.callbacks.huggingface import ForeshockCallback
from foreshock.monitor.callbacks.lightning import ForeshockCallback as LightningCallback
from foreshock.monitor.callbacks.torchtitan import watch

LIGHTNING_WARNINGS = (
    "ignore:.*treespec, LeafSpec:FutureWarning",
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)
"""Warning filters: deprecated PyTorch functions that Lightning calls, and Lightning's advice."""


class Training:
    """The options and results of a training.

    `begun` gets the agent before the first step, `during` after each step. `resume` continues from step 4. A checkpoint
    is saved every `every` steps; the newest `keep` of them remain.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        begun: Callable[[Agent], object] = lambda agent: None,
        during: Callable[[Agent], None] = lambda agent: None,
        resume: bool = False,
        accumulate: int = 1,
        every: int = 4,
        keep: int | None = None,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.folder, self.steps, self.begun, self.during, self.resume = folder, steps, begun, during, resume
        self.accumulate, self.every, self.keep, self.dtype = accumulate, every, keep, dtype
        self.settings = EVERY_STEP | settings
        self.agent: Any = None
        self.listener = Listener()
        self.losses: list[float] = []
        self.norms: list[float] = []
        """Gradient norms of all steps, as the trainer reports them."""

    def begins(self, agent: Agent | None) -> None:
        assert agent is not None
        self.agent = agent
        agent.subscribe(self.listener)
        self.begun(agent)

    @property
    def samples(self) -> list[wire.Sample]:
        return self.listener.of(wire.Sample)

    @property
    def intervals(self) -> list[tuple[int, int]]:
        return [(sample.since_step, sample.step) for sample in self.samples]

    @property
    def rows(self) -> list[set[int]]:
        """The distinct row counts of the heads, per sample."""
        return [{*slot_values(sample.words(), Slot.ROWS).astype(int).tolist()} for sample in self.samples]  # type: ignore[arg-type]


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 48, "n_positions": 64}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss"))


class Tokens(torch.utils.data.Dataset[Any]):
    """Sequences of 12 tokens; `named` adds the keys that transformers' Trainer expects."""

    def __init__(self, *, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        ids = batch(index)[0]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} if self.named else ids


class ObservedCallback(ForeshockCallback):
    """A callback that reports to the training in a class variable, because the Trainer may recreate the callback."""

    of: ClassVar[Training]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self.of.begins(self.agent)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.of.during(self.of.agent)


def trainer_of(training: Training, *, model: nn.Module | None = None, watched: bool = True, **changes: Any) -> Trainer:
    """transformers' Trainer with the options of this training."""
    settings: dict[str, Any] = {
        "max_steps": training.steps, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": training.accumulate,
        "save_steps": training.every, "save_total_limit": training.keep, "logging_steps": 1, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 5,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(training.folder), **settings | changes)
    ObservedCallback.of = training
    model = gpt2().to(training.dtype) if model is None else model
    callbacks = [ObservedCallback(**training.settings)] if watched else []
    return Trainer(model, args, train_dataset=Tokens(named=True), callbacks=callbacks)


def with_transformers(training: Training, **changes: Any) -> None:
    trainer = trainer_of(training, **changes)
    trainer.train(resume_from_checkpoint=str(training.folder / "checkpoint-4") if training.resume else None)
    training.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    training.norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


class Module(LightningModule):  # type: ignore[misc]
    """The tiny GPT; records the losses of its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = next_token_loss(self.gpt(ids), ids)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LightningObserver(Callback):  # type: ignore[misc]
    """Forwards Lightning's events to the training."""

    def __init__(self, training: Training, callback: LightningCallback) -> None:
        self.asked, self.callback = training, callback

    def on_train_start(self, *_: Any) -> None:
        self.asked.begins(self.callback.agent)

    def on_train_batch_end(self, *_: Any) -> None:
        self.asked.during(self.asked.agent)


def with_lightning(training: Training, **options: Any) -> None:
    callback, module = LightningCallback(**training.settings), Module().to(training.dtype)
    keep = -1 if training.keep is None else training.keep
    saving = ModelCheckpoint(
        dirpath=training.folder, every_n_train_steps=training.every, save_top_k=keep, filename="{step}"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options |= {"max_steps": training.steps, "accumulate_grad_batches": training.accumulate, **quiet}
    trainer = LightningTrainer(callbacks=[callback, LightningObserver(training, callback), saving], **options)
    loader: Any = torch.utils.data.DataLoader(Tokens(named=False), batch_size=4)
    try:
        trainer.fit(module, loader, ckpt_path=str(training.folder / "step=4.ckpt") if training.resume else None)
    finally:
        assert "_foreshock_layer" not in vars(module.gpt.blocks[0])  # detached, also after an error
    parts = module.losses
    training.losses = [
        sum(parts[n : n + training.accumulate]) / training.accumulate for n in range(0, len(parts), training.accumulate)
    ]


def with_accelerate(training: Training, *, late: bool = False) -> None:
    """late: load_state runs before init_trackers."""
    model = tiny_gpt().to(training.dtype)
    tracker = ForeshockTracker(model, **training.settings)
    folder = str(training.folder)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=training.keep)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    tracker.checkpoint_with(accelerator)
    saved = str(training.folder / "checkpoints" / "checkpoint_0")
    if training.resume and late:
        accelerator.load_state(saved)
    accelerator.init_trackers("test")
    if training.resume:
        project.iteration = 1
        if not late:
            accelerator.load_state(saved)
    training.begins(tracker.agent)
    for step in range(5 if training.resume else 1, training.steps + 1):
        loss = train_step(model, optimizer, step, batch(step, rows=4))
        accelerator.log({"loss": loss, "lr": 0.01, "speed": 7.0}, step=step)
        accelerator.log({"evaluated": 1.0})  # without a loss or a step, so the tracker ignores it
        training.during(training.agent)
        training.losses.append(float(loss.detach()))
        if step % training.every == 0:
            accelerator.save_state()
    accelerator.end_training()


def with_torchtitan(training: Training) -> None:
    trainer = titan_shape.Trainer(
        training.steps, training.folder, interval=training.every, accumulation=training.accumulate
    )
    trainer.checkpointer.keep_latest_k = training.keep or 0
    for part in trainer.model_parts:
        part.to(training.dtype)
    training.begins(watch(trainer, **training.settings))
    inner, parts = trainer.forward_backward_step, list[float]()

    def record_loss(**inputs: Any) -> Tensor:
        loss: Tensor = inner(**inputs)
        parts.append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = record_loss  # type: ignore[method-assign]
    trainer.optimizers.register_step_post_hook(lambda *_: training.during(training.agent))
    trainer.train()
    trainer.close()
    training.losses = [sum(parts[n : n + training.accumulate]) for n in range(0, len(parts), training.accumulate)]


TRAINERS: dict[str, Callable[[Training], None]] = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "torchtitan": with_torchtitan,
}
