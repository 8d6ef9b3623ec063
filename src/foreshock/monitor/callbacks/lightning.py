"""`ForeshockCallback`: foreshock for programs that use the Trainer of `lightning.pytorch`, in one line.

    trainer = Trainer(callbacks=[ForeshockCallback(run="my-run")])

It attaches before the first step, steps when Lightning's `global_step` does, and closes when training ends or fails.
Modes and detector state are saved in every checkpoint and restored when training resumes from it.
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from foreshock.monitor.agent import Agent, Status
from foreshock.monitor.attaching import attach
from foreshock.monitor.callbacks.shared import GradientNorm, save_if_asked, take_up
from foreshock.monitor.config import AgentSettings


class ForeshockCallback(Callback):  # type: ignore[misc]
    """Watches the LightningModule. Arguments are fields of AgentConfig; rank and world size come from the Trainer.

    The gradient norm is the one that Lightning computes for clipping (`gradient_clip_val`); without clipping, it is not
    recorded. Raises ValueError with a sentence when training begins, if a setting is wrong. If the model cannot be
    watched, training continues, as described in `attach`.
    """

    def __init__(self, **overrides: Unpack[AgentSettings]) -> None:
        self._overrides = overrides
        self.agent: Agent | None = None
        """The agent of the current training, or of the last one."""
        self._saved: dict[str, Any] | None = None
        self._micro_losses: list[Tensor] = []
        self._learning_rate: float | None = None
        self._norm = GradientNorm()
        self._undo: Callable[[], object] = lambda: None

    # ---- training ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, and restore the state if training resumes from a checkpoint."""
        self._end("failed")
        placed = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        self.agent = attach(pl_module, **{**placed, **self._overrides})
        self.agent.qk_clip_with(optimizer=trainer.optimizers or None)
        take_up(self.agent, self._saved, trainer.global_step)
        self._norm.start()
        self._report_checkpoints(trainer)

    def _report_checkpoints(self, trainer: Trainer) -> None:
        save = trainer.save_checkpoint  # ModelCheckpoint calls it too; Lightning's hooks do not get the path

        def reporting(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            if self.agent is not None:
                self.agent.checkpoint_saved(filepath, step=trainer.global_step, trainer="lightning")

        trainer.save_checkpoint = reporting
        self._undo = lambda: vars(trainer).pop("save_checkpoint", None)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the learning rate of this step, before the scheduler changes it."""
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a batch, and the step if gradients are not accumulated further."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._micro_losses.append(loss.detach().reshape(()).clone())  # a captured step overwrites it
        if self.agent is None or trainer.global_step <= self.agent.current_step:
            return
        # Lightning has divided each micro-batch's loss by the number of micro-batches per step
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        loss = torch.stack(self._micro_losses).mean() * parts if self._micro_losses else None
        self._micro_losses = []
        self.agent.step(loss, self._norm.take(), self._learning_rate, step=trainer.global_step)
        own = trainer.checkpoint_callback  # None if the program disables checkpoints
        if own is not None:
            folder = getattr(own, "dirpath", None) or trainer.default_root_dir  # which may be a URL
            path = f"{folder}/foreshock-step={trainer.global_step}.ckpt"
            save_if_asked(self.agent, lambda: trainer.save_checkpoint(path))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send the remaining data, and detach from the model."""
        self._end("completed")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close with the status that training failed or was interrupted."""
        self._end("stopped" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach from the model in every case."""
        self._end("stopped")

    def _end(self, status: Status) -> None:
        self._micro_losses = []
        self._norm.stop()
        self._undo()
        self._undo = lambda: None
        if self.agent is not None:
            self.agent.close(status)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning writes into a checkpoint."""
        if self.agent is not None:
            self._saved = self.agent.state_dict()
        return {"agent": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state of a checkpoint; Lightning calls this before training begins."""
        self._saved = state_dict.get("agent")
