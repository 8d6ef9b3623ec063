"""`ForeshockTracker`: foreshock among the trackers of Accelerate.

    tracker = ForeshockTracker(model, run="my-run")
    accelerator = Accelerator(log_with=tracker)
    ...
    accelerator.init_trackers("project")                 # attaches
    accelerator.log({"loss": loss, "lr": rate}, step=n)  # after optimizer step n
    accelerator.end_training()                           # closes

`tracker.checkpoint_with(accelerator)`, before init_trackers, adds modes and detector state to every checkpoint, in one
file per process: `foreshock_0.json` and so on. It also makes foreshock watch all processes, because Accelerate calls
its trackers only on the first one. And it passes the optimizers to QK-Clip, which needs them for 16-bit weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

from foreshock.monitor.agent import Agent
from foreshock.monitor.attaching import attach
from foreshock.monitor.callbacks.shared import read_state, save_if_asked, write_state
from foreshock.monitor.config import AgentSettings
from foreshock.monitor.guard import logger

_FILE: Final = "foreshock_{}.json"
_LOSS: Final = ("loss", "train_loss", "train/loss")
_GRAD_NORM: Final = ("grad_norm", "train/grad_norm")
_LEARNING_RATE: Final = ("lr", "learning_rate", "train/lr", "train/learning_rate")


class ForeshockTracker(GeneralTracker):  # type: ignore[misc]
    """Watches `model` (before or after `prepare`). `overrides` are fields of AgentConfig, as for `attach`.

    `accelerator.init_trackers` raises ValueError with a sentence if a setting is wrong. If the model cannot be watched,
    training continues, as described in `attach`.
    """

    name = "foreshock"
    requires_logging_directory = False
    main_process_only = False
    """False, because every process counts its own rows."""

    def __init__(self, model: nn.Module, **overrides: Unpack[AgentSettings]) -> None:
        super().__init__()
        self._model = model
        self._overrides = overrides
        self._saved: dict[str, Any] | None = None
        self._optimizers: list[Any] = []
        """Optimizers of `checkpoint_with`'s Accelerator, which may add them at any time before the first step."""
        self._everywhere = False
        """Whether processes other than the first are watched too."""
        self._save: Callable[[], object] | None = None
        """Writes a checkpoint, if Accelerate names checkpoints automatically."""
        self.agent: Agent | None = None
        """The agent; None before `init_trackers`."""

    @property
    def tracker(self) -> Agent | None:
        """The agent, as returned by `accelerator.get_tracker("foreshock", unwrap=True)`."""
        return self.agent

    def start(self) -> None:
        """Attach. Raises ValueError with a sentence for a wrong setting."""
        if not self._everywhere and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            logger.warning(
                "foreshock watches only the first of %d processes; call tracker.checkpoint_with(accelerator) before "
                "init_trackers, on all of them",
                torch.distributed.get_world_size(),
            )
        self.agent = attach(self._model, **self._overrides)
        if self._saved is not None:
            self.agent.load_state_dict(self._saved)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record a step boundary after `step` optimizer steps. Without `step`, values with a loss mean one more step.

        Counts since the last call belong to the steps up to this one, so a loop that logs only every tenth step loses
        no counts. Values other than loss, gradient norm and learning rate are ignored.
        """
        loss = _first(values, _LOSS)
        if self.agent is None or (step is None and loss is None):
            return
        if self._optimizers:
            self.agent.qk_clip_with(optimizer=self._optimizers)
            self._optimizers = []
        self.agent.step(loss, _first(values, _GRAD_NORM), _first(values, _LEARNING_RATE), step=step)
        if self._save is not None:
            save_if_asked(self.agent, self._save)

    def finish(self) -> None:
        """Send the remaining data, and detach from the model."""
        if self.agent is not None:
            self.agent.close("completed")

    def checkpoint_with(self, accelerator: Accelerator) -> None:
        """Make `accelerator.save_state` and `load_state` save and load the agent's state too, on every process.

        Load before the first step, before or after `init_trackers`. A process without a saved state, because the saving
        run had fewer processes, loads the first process's state.
        """

        def save(models: Any, weights: Any, folder: str) -> None:
            if self.agent is not None:
                write_state(self.agent, Path(folder) / _FILE.format(accelerator.process_index))

        save_state = accelerator.save_state

        def reporting(*args: Any, **kwargs: Any) -> Any:
            folder = save_state(*args, **kwargs)
            if self.agent is not None:
                self.agent.checkpoint_saved(folder, trainer="accelerate")
            return folder

        accelerator.save_state = reporting

        def load(models: Any, folder: str) -> None:
            saved = read_state(*(Path(folder) / _FILE.format(index) for index in (accelerator.process_index, 0)))
            if saved is None:
                return  # saved by a training without foreshock
            self._saved = saved
            if self.agent is not None:
                self.agent.load_state_dict(saved)

        backward = accelerator.backward

        def first_backward(*args: Any, **kwargs: Any) -> None:
            accelerator.backward = backward
            if self.agent is None:
                logger.warning("foreshock is not attached: call accelerator.init_trackers before the first step")
            backward(*args, **kwargs)

        accelerator.backward = first_backward
        if accelerator.project_configuration.automatic_checkpoint_naming:
            self._save = accelerator.save_state
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        self._everywhere, self._optimizers = True, getattr(accelerator, "_optimizers", [])
        if accelerator.process_index > 0:
            self._follow(accelerator)

    def _follow(self, accelerator: Accelerator) -> None:
        """Start, log and end on a process on which Accelerate does not call trackers."""

        def init_trackers(*args: Any, **kwargs: Any) -> None:
            accelerator.trackers.append(self)  # end_training finishes these on every process
            self.start()

        def log(values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
            self.log(values, step=step)

        accelerator.init_trackers, accelerator.log = init_trackers, log


def _first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)
