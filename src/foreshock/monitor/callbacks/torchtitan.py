"""`watch`: foreshock for programs that use the Trainer of torchtitan, in one line between creating and training.

    trainer = config.build()
    watch(trainer, run="my-run")          # before trainer.train()
    trainer.train()

The agent steps with the trainer's optimizers. Each rank saves its state in every checkpoint's folder, and restores it
before the first step when training resumes. Written for torchtitan 0.2.2 and 0.3.0; it uses the trainer's
`model_parts`, `optimizers`, `checkpointer`, `forward_backward_step`, `parallel_dims`, `config` (0.2: `job_config`),
`step` and `close`.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn

from foreshock.monitor.agent import Agent
from foreshock.monitor.attaching import attach
from foreshock.monitor.callbacks.shared import GradientNorm, log_unsaved, read_state, take_up, write_state
from foreshock.monitor.config import AgentSettings
from foreshock.monitor.model.discovery import find_attention

_USED: Final = ("model_parts", "optimizers", "checkpointer", "forward_backward_step", "step", "close")
_CONFIG: Final = ("config", "job_config")
"""Its name in torchtitan 0.3 and 0.2."""
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def watch(trainer: Any, **overrides: Unpack[AgentSettings]) -> Agent:
    """Watch the model parts of a torchtitan Trainer. `overrides` are fields of AgentConfig, as for `attach`.

    Layers have torchtitan's numbers (`layers.7`), on every rank of a pipeline. Raises ValueError with a sentence for a
    trainer of another library or a wrong setting. If the model cannot be watched, training continues.
    """
    missing = [name for name in _USED if not hasattr(trainer, name)]
    if not any(hasattr(trainer, name) for name in _CONFIG):
        missing.append(_CONFIG[0])
    if missing:
        raise ValueError(
            f"{type(trainer).__name__} does not have {', '.join(missing)}: it is not a Trainer of torchtitan 0.2 or "
            "0.3; use attach(model) and agent.step(loss) in a custom training loop"
        )
    parts: list[nn.Module] = list(trainer.model_parts)
    model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    with _compiled_but_not_yet_run(model):
        settings: AgentSettings = {"first_layer": _numbers(model), **overrides}
        agent = attach(model, **settings)
    agent.qk_clip_with(optimizer=list(trainer.optimizers) or None)
    _Hooks(trainer, agent)
    return agent


def _numbers(model: nn.Module) -> dict[str, int]:
    """Return the layer numbers in torchtitan's names; {} unless every attention module has a different one."""
    names = [found.name for found in find_attention(model, {})]
    numbers = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
    return numbers if len(set(numbers.values())) == len(names) else {}


@contextmanager
def _compiled_but_not_yet_run(model: nn.Module) -> Iterator[None]:
    # torchtitan compiles its blocks when the Trainer is created, but they are traced only in the first step, together
    # with attach's changes. attach cannot know that and would raise an error, so hide the compiled calls from it.
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


class _Hooks:
    """Hooks into the trainer: after its optimizers' step, around a checkpoint, and at the end."""

    def __init__(self, trainer: Any, agent: Agent) -> None:
        self._trainer, self._agent = trainer, agent
        self._losses: list[Tensor] = []
        # torchtitan clips with its own function, whose norm covers all ranks
        self._norm = GradientNorm(sys.modules.get("torchtitan.distributed.utils", torch.nn.utils))
        self._norm.start()
        self._forward_backward_step = trainer.forward_backward_step
        self._save, self._load, self._close = trainer.checkpointer.save, trainer.checkpointer.load, trainer.close
        trainer.forward_backward_step = self.forward_backward_step
        trainer.checkpointer.save, trainer.checkpointer.load, trainer.close = self.save, self.load, self.close
        trainer.optimizers.register_step_post_hook(self.stepped)

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        """Store a copy of each micro-batch's loss on its device, because a captured step overwrites its memory."""
        loss = self._forward_backward_step(*args, **kwargs)
        if isinstance(loss, Tensor) and loss.numel() == 1 and getattr(self._trainer, "pp_has_last_stage", True):
            self._losses.append(loss.detach().reshape(()).clone())
        return loss

    def stepped(self, optimizers: Any, *_: Any) -> None:
        """Record a completed optimizer step."""
        # each part of the loss is divided by the tokens of all data-parallel ranks
        loss = torch.stack(self._losses).sum() * self._ranks() if self._losses else None
        self._losses = []
        self._agent.step(loss, self._norm.take(), self._learning_rate(), step=self._trainer.step)

    def _ranks(self) -> int:
        dims = getattr(self._trainer, "parallel_dims", None)
        return int(getattr(dims, "dp_replicate", 1) * getattr(dims, "dp_shard", 1) * getattr(dims, "cp", 1))

    def _learning_rate(self) -> float | None:
        first = next(iter(self._trainer.optimizers), None)
        return None if first is None else float(first.param_groups[0]["lr"])

    def _folder(self, step: int) -> str:
        return f"{self._trainer.checkpointer.folder}/step-{step}"  # may be a URL

    def _file(self, step: int, rank: int) -> str:
        return f"{self._folder(step)}/foreshock_{rank}.json"

    def save(self, curr_step: int, last_step: bool = False) -> Any:
        """Save the agent's state in a checkpoint, if torchtitan saves one or a warning requested one."""
        checkpointer = self._trainer.checkpointer
        interval = getattr(checkpointer, "interval", None)  # None if checkpoints are off
        additional = interval is not None and self._agent.should_save and curr_step % interval != 0 and not last_step
        if additional:
            checkpointer.interval = 1
        try:
            saved = self._save(curr_step, last_step=last_step)
            # torchtitan 0.2 returns None
            asked: bool = checkpointer._should_save(curr_step, last_step) if saved is None else saved
        except Exception as error:
            if not additional:
                raise
            log_unsaved(error)
            return False
        finally:
            if additional:
                checkpointer.interval = interval
        # by default, the last checkpoint has no optimizer, so training cannot resume from it
        if asked and not (last_step and getattr(checkpointer, "last_save_model_only", False)):
            write_state(self._agent, self._file(curr_step, self._agent.config.rank))
            self._agent.checkpoint_saved(self._folder(curr_step), step=curr_step, trainer="torchtitan")
        return saved

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """After torchtitan loaded a checkpoint, restore this rank's state, or rank 0's if there were fewer ranks."""
        loaded = self._load(*args, **kwargs)
        if loaded and self._trainer.step:
            saved = read_state(*(self._file(self._trainer.step, rank) for rank in (self._agent.config.rank, 0)))
            take_up(self._agent, saved, self._trainer.step)
        return loaded

    def close(self) -> None:
        """Send the remaining data, and detach from the model."""
        self._norm.stop()
        config = next(getattr(self._trainer, name) for name in _CONFIG if hasattr(self._trainer, name))
        done = self._trainer.step >= config.training.steps
        self._agent.close("completed" if done else "stopped")
        self._close()
