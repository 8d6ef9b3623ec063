"""One small training under each trainer that foreshock has a callback for: the same to ask for, and the same told."""

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
from tests.monitor.executions import EVERY_STEP
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

OF_LIGHTNING = (
    "ignore:.*treespec, LeafSpec:FutureWarning",
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)
"""Filters of warnings: what Lightning calls in PyTorch that is on its way out, and its advice."""


class Training:
    """What is asked of a training, and what came of it.

    `begun` is given the agent before the first step, `during` after each. `resume` continues from step 4; every `every`
    steps there is a checkpoint, and `keep` of them stay.
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
        """Of each step, as the trainer itself has them."""

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
        """Rows that heads counted, sample by sample."""
        return [{*slot_values(sample.words(), Slot.ROWS).astype(int).tolist()} for sample in self.samples]  # type: ignore[arg-type]


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 48, "n_positions": 64}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss"))


class Tokens(torch.utils.data.Dataset[Any]):
    """Sequences of 12 tokens; for transformers with all that its Trainer wants."""

    def __init__(self, *, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        ids = batch(index)[0]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} if self.named else ids


class Observed(ForeshockCallback):
    """The callback, which the Trainer may create again; it names the training that it belongs to."""

    of: ClassVar[Training]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self.of.begins(self.agent)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.of.during(self.of.agent)


def trainer_of(asked: Training, *, model: nn.Module | None = None, watched: bool = True, **changes: Any) -> Trainer:
    """transformers' Trainer for this training."""
    settings: dict[str, Any] = {
        "max_steps": asked.steps, "per_device_train_batch_size": 4, "gradient_accumulation_steps": asked.accumulate,
        "save_steps": asked.every, "save_total_limit": asked.keep, "logging_steps": 1, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 5,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(asked.folder), **settings | changes)
    Observed.of = asked
    model = gpt2().to(asked.dtype) if model is None else model
    callbacks = [Observed(**asked.settings)] if watched else []
    return Trainer(model, args, train_dataset=Tokens(named=True), callbacks=callbacks)


def with_transformers(asked: Training, **changes: Any) -> None:
    trainer = trainer_of(asked, **changes)
    trainer.train(resume_from_checkpoint=str(asked.folder / "checkpoint-4") if asked.resume else None)
    asked.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    asked.norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


class Module(LightningModule):  # type: ignore[misc]
    """The tiny GPT; keeps the losses of its micro-batches."""

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


class Follower(Callback):  # type: ignore[misc]
    """Tells a training of what Lightning does."""

    def __init__(self, asked: Training, callback: LightningCallback) -> None:
        self.asked, self.callback = asked, callback

    def on_train_start(self, *_: Any) -> None:
        self.asked.begins(self.callback.agent)

    def on_train_batch_end(self, *_: Any) -> None:
        self.asked.during(self.asked.agent)


def with_lightning(asked: Training, **options: Any) -> None:
    callback, module = LightningCallback(**asked.settings), Module().to(asked.dtype)
    keep = -1 if asked.keep is None else asked.keep
    saving = ModelCheckpoint(dirpath=asked.folder, every_n_train_steps=asked.every, save_top_k=keep, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options |= {"max_steps": asked.steps, "accumulate_grad_batches": asked.accumulate, **quiet}
    trainer = LightningTrainer(callbacks=[callback, Follower(asked, callback), saving], **options)
    loader: Any = torch.utils.data.DataLoader(Tokens(named=False), batch_size=4)
    try:
        trainer.fit(module, loader, ckpt_path=str(asked.folder / "step=4.ckpt") if asked.resume else None)
    finally:
        assert "_foreshock_layer" not in vars(module.gpt.blocks[0])  # given back, whatever happened
    parts = module.losses
    asked.losses = [
        sum(parts[n : n + asked.accumulate]) / asked.accumulate for n in range(0, len(parts), asked.accumulate)
    ]


def with_accelerate(asked: Training, *, late: bool = False) -> None:
    """`late`: what was saved is loaded before init_trackers."""
    model = tiny_gpt().to(asked.dtype)
    tracker = ForeshockTracker(model, **asked.settings)
    folder = str(asked.folder)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=asked.keep)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    tracker.checkpoint_with(accelerator)
    saved = str(asked.folder / "checkpoints" / "checkpoint_0")
    if asked.resume and late:
        accelerator.load_state(saved)
    accelerator.init_trackers("test")
    if asked.resume:
        project.iteration = 1
        if not late:
            accelerator.load_state(saved)
    asked.begins(tracker.agent)
    for step in range(5 if asked.resume else 1, asked.steps + 1):
        loss = train_step(model, optimizer, step, batch(step, rows=4))
        accelerator.log({"loss": loss, "lr": 0.01, "speed": 7.0}, step=step)
        accelerator.log({"evaluated": 1.0})  # no loss, no step: nothing of ours
        asked.during(asked.agent)
        asked.losses.append(float(loss.detach()))
        if step % asked.every == 0:
            accelerator.save_state()
    accelerator.end_training()


def with_torchtitan(asked: Training) -> None:
    trainer = titan_shape.Trainer(asked.steps, asked.folder, interval=asked.every, accumulation=asked.accumulate)
    trainer.checkpointer.keep_latest_k = asked.keep or 0
    for part in trainer.model_parts:
        part.to(asked.dtype)
    asked.begins(watch(trainer, **asked.settings))
    inner, parts = trainer.forward_backward_step, list[float]()

    def keep(**inputs: Any) -> Tensor:
        loss: Tensor = inner(**inputs)
        parts.append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = keep  # type: ignore[method-assign]
    trainer.optimizers.register_step_post_hook(lambda *_: asked.during(asked.agent))
    trainer.train()
    trainer.close()
    asked.losses = [sum(parts[n : n + asked.accumulate]) for n in range(0, len(parts), asked.accumulate)]


TRAINERS: dict[str, Callable[[Training], None]] = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "torchtitan": with_torchtitan,
}
