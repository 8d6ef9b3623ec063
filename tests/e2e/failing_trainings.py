"""Trainings whose scores explode or drift. Each is a process forked from this program, which has imported everything.

Each line of standard input is an object: trainer, folder, run, lines, environment. Without lines, a training saves a
checkpoint every 20 steps, and kills itself once it has failed and the service has an incident. With the lines of a
resume plan, it executes them verbatim and continues. FORESHOCK_URL is the service. The exit status is printed to
standard output; the results are in the folder, in end.json and log.
"""

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.utils.data

if __name__ == "__main__":
    sys.path.append(
        str(Path(__file__).parents[2])
    )  # last, so that this repository's kernels/ does not shadow another package

from tests.monitor import titan_ranks, titan_shape
from torch import Tensor, nn

from foreshock.callbacks import AccelerateTracker, LightningCallback, TransformersCallback, watch_torchtitan
from foreshock.client import Service
from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.monitor import Agent, attach

LEARNING_RATE, WARM_UP, ROWS, CONTEXT = 0.064, 100, 8, 32
EXPLODED, END, EVERY = 200, 300, 20


@dataclass(frozen=True)
class Failure:
    """The settings with which a plain loop fails."""

    model: ModelConfig
    rate: float
    rows: int
    killed_after: int
    """The step after which the training kills itself."""
    end: int
    every: int
    severity: str
    """Severity of the incident at that step."""
    bias_rate: float = 1.0
    """Learning rate of biases, relative to the other weights."""


_SMALL: Final[dict[str, Any]] = {"layers": 2, "heads": 2}
EXPLOSION: Final = Failure(
    ModelConfig(**_SMALL, width=32, context=CONTEXT, qkv_bias=False, attention_dtype="float32"),
    *(LEARNING_RATE, ROWS, EXPLODED, END, EVERY),
    severity="critical",
)
"""Two layers without biases: the scores exceed 512 within 160 steps, and the loss stays high."""
ROUNDING: Final = Failure(
    ModelConfig(**_SMALL, width=64, context=64), 0.004, 16, 2000, 2500, 100, severity="warning", bias_rate=32.0
)
"""Under the paper's numerics, the fast-learning key bias drifts, and the scores of its head drift with it."""


class FailingModel(nn.Module):
    def __init__(self, failure: Failure = EXPLOSION) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gpt = GPT(failure.model)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return {"loss": self.gpt(tokens, targets)}


def warm_up_factor(step: int) -> float:
    """The factor of the learning rate in the step after `step`."""
    return min(1.0, (step + 1) / WARM_UP)


def optimizer_and_schedule(model: nn.Module, failure: Failure = EXPLOSION) -> tuple[torch.optim.AdamW, Any]:
    named = [(name.endswith("bias"), weight) for name, weight in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [weight for is_bias, weight in named if is_bias == of_biases], "lr": failure.rate * share}
        for of_biases, share in ((False, 1.0), (True, failure.bias_rate))
    ]
    optimizer = torch.optim.AdamW([one for one in groups if one["params"]], betas=(0.9, 0.95), weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_factor)


class Slices(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Slices of a standard-library module as bytes; their positions depend only on the index."""

    def __init__(self, failure: Failure = EXPLOSION) -> None:
        self.text, self.rows = torch.tensor(list(Path(random.__file__).read_bytes())), failure.rows
        self.context, self.end = failure.model.context, failure.end

    def __len__(self) -> int:
        return self.end * self.rows

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        last = len(self.text) - self.context - 1
        start = int(torch.randint(last, (), generator=torch.Generator().manual_seed(number)))
        piece = self.text[start : start + self.context + 1]
        return {"tokens": piece[:-1], "targets": piece[1:]}

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of step `step`, counted from 0."""
        rows = [self[step * self.rows + row] for row in range(self.rows)]
        return {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets")}


class Outcome:
    """Follows an agent, kills the failing run, and writes its results."""

    def __init__(self, folder: Path, run: str, *, fails: bool, failure: Failure = EXPLOSION) -> None:
        self.folder, self.run, self.fails, self.failure = folder, run, fails, failure
        self.samples: list[wire.Sample] = []
        self.followed: Agent | None = None

    def step(self, agent: Agent | None) -> None:
        """Call after each step."""
        assert agent is not None
        if self.followed is None:
            self.followed = agent
            agent.subscribe(lambda event: self.samples.append(event) if isinstance(event, wire.Sample) else None)
        if self.fails and agent.current_step >= self.failure.killed_after:
            self._kill_after_incident()

    def write(self) -> None:
        """Write the first and last step, and the loss and largest |score| and |offset| of the last 50 steps."""
        last = [sample for sample in self.samples if sample.step > self.samples[-1].step - 50]
        words = [words for sample in last if (words := sample.words()) is not None]
        figures = {
            "first": self.samples[0].since_step,
            "last": self.samples[-1].step,
            "loss": sum(sample.loss or 0.0 for sample in last) / len(last),
            "score": max(float(slot_values(each, Slot.ROW_MAX_ABS).max()) for each in words),
            "offset": max(float(abs(catalog.read("head.score_offset", each)).max()) for each in words),
        }
        (self.folder / "end.json").write_text(json.dumps(figures))

    def _kill_after_incident(self) -> None:
        self.write()
        with Service(os.environ["FORESHOCK_URL"]) as service:
            for _ in range(600):
                if any(one["severity"] == self.failure.severity for one in service.incidents(self.run)):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.1)
        raise TimeoutError("the service did not report the incident")


class Plan:
    """The lines of a resume plan, split into the attach call and the others."""

    def __init__(self, lines: list[str], attaches: str) -> None:
        calls = [line for line in lines if line.startswith(attaches.partition("(")[0])]
        self.attach = calls[0] if calls else attaches
        self.others = [line for line in lines if line not in calls]
        self.fails = not lines

    def load(self, otherwise: str, **names: Any) -> None:
        """Execute the other lines, or start from the beginning."""
        for line in self.others or [otherwise]:
            exec(line, dict(names))


def transformers(folder: Path, run: str, lines: list[str]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    plan = Plan(lines, f'TransformersCallback(run="{run}")')
    callback: Any = eval(plan.attach, {"TransformersCallback": TransformersCallback})
    outcome = Outcome(folder, run, fails=plan.fails)

    class Follow(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            outcome.step(callback.agent)

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=END,
        per_device_train_batch_size=ROWS,
        save_steps=EVERY,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = FailingModel()
    given: Any = {
        "train_dataset": Slices(),
        "callbacks": [callback, Follow()],
        "optimizers": optimizer_and_schedule(model),
    }
    plan.load("trainer.train()", trainer=Trainer(model, arguments, **given))
    outcome.write()


def lightning(folder: Path, run: str, lines: list[str]) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    plan = Plan(lines, f'LightningCallback(run="{run}")')
    callback: Any = eval(plan.attach, {"LightningCallback": LightningCallback})
    outcome = Outcome(folder, run, fails=plan.fails)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.failing_model = FailingModel()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.failing_model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self.failing_model)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Slices(), batch_size=ROWS)

    class Follow(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            outcome.step(callback.agent)

    trainer = Trainer(
        max_steps=END,
        gradient_clip_val=1.0,
        callbacks=[callback, Follow(), ModelCheckpoint(dirpath=folder, every_n_train_steps=EVERY, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    plan.load("trainer.fit(model)", trainer=trainer, model=Module())
    outcome.write()


def accelerate(folder: Path, run: str, lines: list[str]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    plan = Plan(lines, f'AccelerateTracker(model, run="{run}")')
    model, outcome = FailingModel(), Outcome(folder, run, fails=plan.fails)
    tracker: Any = eval(plan.attach, {"AccelerateTracker": AccelerateTracker, "model": model})
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    tracker.checkpoint_with(accelerator)
    prepared, optimizer, schedule = accelerator.prepare(model, *optimizer_and_schedule(model))
    accelerator.init_trackers("test")
    plan.load("", accelerator=accelerator)
    data = Slices()
    for step in range(tracker.agent.current_step, END):
        loss = prepared(**data.batch(step))["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=step + 1)
        if plan.fails and (step + 1) % EVERY == 0:
            accelerator.save_state()
        outcome.step(tracker.agent)
    accelerator.end_training()
    outcome.write()


def own(folder: Path, run: str, lines: list[str], failure: Failure = EXPLOSION) -> None:
    """A plain training loop. A comment in the plan names the file to load."""
    plan = Plan(lines, f'attach(model, run="{run}")')
    model, data = FailingModel(failure), Slices(failure)
    outcome = Outcome(folder, run, fails=plan.fails, failure=failure)
    optimizer, schedule = optimizer_and_schedule(model, failure)
    agent: Agent = eval(plan.attach, {"attach": attach, "model": model})
    for line in plan.others:
        if comment := re.match("# load (.*), then, before the first step:", line):
            saved = torch.load(comment[1], weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
    plan.load("", agent=agent)
    for step in range(agent.current_step, failure.end):
        loss = model(**data.batch(step))["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        agent.step(loss.detach(), norm)
        if agent.should_save or (plan.fails and (step + 1) % failure.every == 0):
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            path = folder / f"{step + 1}.pt"
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)
            agent.checkpoint_saved(path)
        outcome.step(agent)
    agent.close()
    outcome.write()


def rounding(folder: Path, run: str, lines: list[str]) -> None:
    """A plain training loop that fails by rounding, not by a high learning rate."""
    own(folder, run, lines, ROUNDING)


class TitanShaped(titan_shape.Trainer):
    """The same training with the interface of torchtitan's Trainer, including `checkpoint.load_step`."""

    def __init__(self, folder: Path, load_step: int) -> None:
        super().__init__(END, folder, interval=EVERY)
        self.model_parts = [FailingModel()]
        self.optimizers = titan_shape.OptimizersContainer(self.model_parts)
        optimizer, self.schedule = optimizer_and_schedule(self.model_parts[0])
        self.optimizers.optimizers = [optimizer]
        self.data, self.config.checkpoint = Slices(), SimpleNamespace(load_step=load_step)
        self.checkpointer.keep_latest_k = 2
        self.after: Callable[[], None] = lambda: None

    def forward_backward_step(self, *, input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        loss: Tensor = self.model_parts[0](input_dict["input"], labels)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def train_step(self) -> None:
        for group in self.optimizers.optimizers[0].param_groups:
            group["lr"] = LEARNING_RATE * warm_up_factor(self.step - 1)
        self.optimizers.zero_grad()
        batch = self.data.batch(self.step - 1)
        self.forward_backward_step(input_dict={"input": batch["tokens"]}, labels=batch["targets"])
        torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.optimizers.step()
        self.after()


def step_to_load(plan: Plan) -> int:
    """Run the shell lines of a plan and return the step of its torchtitan option; -1 without lines."""
    *shell, option = plan.others or ["--checkpoint.load_step -1"]
    for line in shell:
        subprocess.run(line, shell=True, check=True)
    name, value = option.split()
    assert name == "--checkpoint.load_step"
    return int(value)


def torchtitan(folder: Path, run: str, lines: list[str]) -> None:
    plan = Plan(lines, f'watch_torchtitan(trainer, run="{run}")')
    trainer, outcome = TitanShaped(folder, step_to_load(plan)), Outcome(folder, run, fails=plan.fails)
    agent: Agent = eval(plan.attach, {"watch_torchtitan": watch_torchtitan, "trainer": trainer})
    trainer.after = lambda: outcome.step(agent)
    trainer.train()
    trainer.close()
    outcome.write()


class Bytes(titan_ranks.RandomTokens):
    """The same slices for torchtitan's data loader, with a smaller vocabulary."""

    slices = Slices()

    def row(self) -> tuple[dict[str, Tensor], Tensor]:
        piece = self.slices[self.rows_read]
        self.rows_read += 1
        short = {name: tokens[: self.length] % titan_ranks.VOCABULARY for name, tokens in piece.items()}
        return {"input": short["tokens"], "positions": torch.arange(self.length)}, short["targets"]


def torchtitan_itself(folder: Path, run: str, lines: list[str]) -> None:
    """The real torchtitan Trainer with a small Llama, over gloo."""
    plan = Plan(lines, f'watch_torchtitan(trainer, run="{run}")')

    def configure(config: Any) -> None:
        config.training.steps, config.lr_scheduler.warmup_steps = END, WARM_UP
        config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1.5 * LEARNING_RATE
        config.checkpoint.interval, config.checkpoint.keep_latest_k = EVERY, 2
        config.checkpoint.load_step = step_to_load(plan)

    titan_ranks.patch_cpu_device()
    os.environ["LOCAL_RANK"] = "0"
    rendezvous = f"file://{folder}/meeting{bool(lines)}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    trainer, outcome = (
        titan_ranks.small_trainer(folder, "cpu", Bytes, configure),
        Outcome(folder, run, fails=plan.fails),
    )
    agent: Agent = eval(plan.attach, {"watch_torchtitan": watch_torchtitan, "trainer": trainer})
    trainer.optimizers.register_step_post_hook(lambda *_: outcome.step(agent))
    trainer.train()
    trainer.close()
    outcome.write()


def main(trainer: str, folder: str, run: str, lines: list[str], environment: dict[str, str]) -> None:
    """Run one training. A single thread makes PyTorch's results independent of the machine's load."""
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= environment
    torch.set_num_threads(1)
    globals()[trainer](Path(folder), run, lines)


if __name__ == "__main__":
    for module in ("accelerate", "lightning.pytorch", "transformers.trainer"):
        importlib.import_module(module)
    for request in sys.stdin:
        if (child := os.fork()) == 0:
            main(**json.loads(request))
            break  # the child exits like a normal program
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
