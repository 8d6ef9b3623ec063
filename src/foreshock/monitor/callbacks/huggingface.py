"""`ForeshockCallback`: foreshock for programs that use the Trainer of transformers, in one line.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[ForeshockCallback(run="my-run")])

It attaches when training begins, steps at every optimizer step, and closes when training ends. Modes and detector state
are saved in every checkpoint and restored when training resumes from it. The first process's state is in
trainer_state.json; the other processes' states are in files next to it.
"""

import json
from pathlib import Path
from typing import Any, Final, Unpack
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from foreshock.contract.environment import why_removed
from foreshock.monitor.agent import Agent
from foreshock.monitor.attaching import attach
from foreshock.monitor.attention.watched_layer import leave_no_trace_in_copies
from foreshock.monitor.callbacks.shared import GradientNorm, read_state, take_up, write_state
from foreshock.monitor.config import AgentSettings, make_config
from foreshock.monitor.guard import logger

_FILE: Final = "foreshock_{}.json"
_NO_MODEL: Final = (
    "this version of transformers does not pass the model to its callbacks; transformers 5 does. Use attach(model) "
    "before the training and agent.step(loss) after every step"
)


_given: Final["WeakKeyDictionary[nn.Module, tuple[AgentSettings, ref[ForeshockCallback]]]"] = WeakKeyDictionary()
"""By the Trainer's model: the settings of the program's own callback, and that callback. Needed because a Trainer that
restores callbacks replaces it by one with the checkpoint's settings."""


class ForeshockCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Watches the Trainer's model. Arguments are fields of AgentConfig; set secrets as FORESHOCK_TOKEN.

    Raises ValueError with a sentence when training begins, if a setting is wrong. If the model cannot be watched,
    training continues, as described in `attach`.
    """

    def __init__(self, **overrides: Unpack[AgentSettings]) -> None:
        self._overrides = overrides
        self.agent: Agent | None = None
        """The agent of the current training, or of the last one."""
        self.saved: dict[str, Any] | None = None
        """The agent's state in the last checkpoint."""
        self.restored = False
        """Whether the Trainer created this callback from a checkpoint, in place of the program's own."""
        self._hook: Any = None
        self._stay_clean: Any = None
        self._micro_losses: list[Tensor] = []
        self._summed = False
        self._learning_rate: float | None = None
        self._norm = GradientNorm()
        self._logged_norm: float | None = None

    # ---- training ---------------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the settings that the program passed."""
        if (model := kwargs.get("model")) is not None:
            _given[model] = self._overrides, ref(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach, and restore the state if training resumes from a checkpoint."""
        self._end("failed")  # a training that raised never reached on_train_end
        model: nn.Module | None = kwargs.get("model")
        if model is None:
            if make_config(None, dict(self._overrides)).must_watch:
                raise ValueError(_NO_MODEL)
            logger.warning("foreshock: nothing is watched, training continues: %s", _NO_MODEL)
            return
        own, program = _given.get(model, (None, lambda: None)) if self.restored else (self._overrides, lambda: None)
        if own is None:
            logger.warning(
                "foreshock: the Trainer restored its callbacks, so foreshock uses the settings of the checkpoint, not "
                "those of this program"
            )
            own = _without_removed(self._overrides)
        self._overrides = own
        # with several GPUs and no launcher, the Trainer wraps the model later, and attach has to know that
        self.agent = attach(nn.DataParallel(model) if args.n_gpu > 1 else model, **self._overrides)
        if (callback := program()) is not None:
            callback.agent = self.agent
        self.agent.qk_clip_with(optimizer=kwargs.get("optimizer"))
        file = _checkpoint(args, state) / _FILE.format(args.process_index)  # the Trainer saves only the first one's
        own_state = read_state(file) if args.process_index > 0 else None
        saved = own_state or _saved_in(state, type(self).__name__) or self.saved
        take_up(self.agent, saved, state.global_step)
        if state.stateful_callbacks is not None:
            # after resuming from a checkpoint without foreshock, the Trainer would miss this entry at the next save
            state.stateful_callbacks.setdefault(type(self).__name__, {})
        self._hook = model.register_forward_hook(self._keep_loss, with_kwargs=True)
        self._stay_clean = leave_no_trace_in_copies(model)
        self._norm.start()

    def _keep_loss(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # on_log's loss is filtered and rounded; the model's own output is the raw one
        if not module.training or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # with the token count of the whole step, each micro-batch returns its part of the step's mean
            self._summed = kwargs.get("num_items_in_batch") is not None
            self._micro_losses.append(loss.detach().reshape(()).clone())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the learning rate of this step, before the scheduler changes it."""
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record a completed optimizer step."""
        if self.agent is None:
            return
        loss = None
        if self._micro_losses:
            total = torch.stack(self._micro_losses)
            # the Trainer divides a rank's part by the tokens of all ranks
            shares = args.world_size if args.average_tokens_across_devices else 1
            loss = total.sum() * shares if self._summed else total.mean()
        self._micro_losses = []
        norm = self._norm.take()
        self.agent.step(loss, self._logged_norm if norm is None else norm, self._learning_rate, step=state.global_step)
        self._logged_norm = None
        # with a limit of 1, it would replace the clean checkpoint; with save_strategy "no", saving may not work
        if args.save_strategy != "no" and args.save_total_limit != 1 and self.agent.should_save:
            control.should_save = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store the logged gradient norm for the next step; needed if DeepSpeed or FSDP clips."""
        norm = (kwargs.get("logs") or {}).get("grad_norm")
        if norm is not None:
            self._logged_norm = float(norm)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Send the remaining data, and detach from the model."""
        self._end("completed")

    def _end(self, status: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._stay_clean()
            self._hook = None
        self._norm.stop()
        self._micro_losses = []
        if self.agent is not None:
            self.agent.close(status)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the checkpoint, and save this process's state in it; the Trainer saves only the first process's."""
        folder = _checkpoint(args, state)
        if self.agent is not None:
            self.agent.checkpoint_saved(folder, step=state.global_step, trainer="transformers")
        if self.agent is not None and args.process_index > 0 and folder.is_dir():
            write_state(self.agent, folder / _FILE.format(args.process_index))

    def state(self) -> dict[str, Any]:
        """Return the entry that the Trainer writes into a checkpoint's trainer_state.json."""
        if self.agent is not None:
            self.saved = self.agent.state_dict()
        settings = {name: value for name, value in self._overrides.items() if name != "token" and _is_json(value)}
        return {"args": settings, "attributes": {"saved": self.saved, "restored": True}}


def _without_removed(settings: AgentSettings) -> AgentSettings:
    """Return the settings of a checkpoint without those that only earlier builds of foreshock had."""
    present: Any = dict(settings)
    for name in settings:
        if why := why_removed(name):
            logger.warning(
                "foreshock: the checkpoint's setting %s is ignored; it is no longer a setting: %s", name, why
            )
            del present[name]
    return present  # type: ignore[no-any-return]


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved_in(state: TrainerState, name: str) -> dict[str, Any] | None:
    """Return the agent's state in a loaded checkpoint, whether or not the Trainer restores callbacks."""
    entry = (state.stateful_callbacks or {}).get(name)
    entry = entry[0] if isinstance(entry, list) and entry else entry
    attributes = entry.get("attributes") if isinstance(entry, dict) else None
    return attributes.get("saved") if isinstance(attributes, dict) else None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
