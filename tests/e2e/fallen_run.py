"""Trainings whose scores explode or drift, for tests, each a process that is forked from one which has imported all.

Each line of the standard input is an object: trainer, folder, run, lines, environment. Without lines a training saves a
checkpoint every 20 steps, and kills itself once it has exploded and the service knows. With the lines of a resume plan
it trains on by them, word for word. FORESHOCK_URL names the service. Its exit status is a line of the standard output;
what came of it is in the folder: end.json and log.
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
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from tests.monitor import titan_ranks, titan_shape
from torch import Tensor, nn

from foreshock.callbacks import AccelerateTracker, LightningCallback, TransformersCallback, watch_torchtitan
from foreshock.client import Service
from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.monitor import Agent, attach

RATE, WARM_UP, ROWS, CONTEXT = 0.064, 100, 8, 32
EXPLODED, END, EVERY = 200, 300, 20


@dataclass(frozen=True)
class Failure:
    """How a plain loop fails."""

    model: ModelConfig
    rate: float
    rows: int
    fell: int
    """The step after which it kills itself."""
    end: int
    every: int
    severity: str
    """Of the incident that it then has."""
    bias_rate: float = 1.0
    """Of biases, in parts of the rate of all else."""


_SMALL: Final[dict[str, Any]] = {"layers": 2, "heads": 2}
EXPLOSION: Final = Failure(
    ModelConfig(**_SMALL, width=32, context=CONTEXT, qkv_bias=False, attention_dtype="float32"),
    *(RATE, ROWS, EXPLODED, END, EVERY),
    severity="critical",
)
"""Two layers without biases: the scores pass 512 within 160 steps, and the loss stays up."""
ROUNDING: Final = Failure(
    ModelConfig(**_SMALL, width=64, context=64), 0.004, 16, 2000, 2500, 100, severity="warning", bias_rate=32.0
)
"""Under the paper's numerics the key bias, which learns fast, drifts away with the scores of its head."""


class Patient(nn.Module):
    def __init__(self, failure: Failure = EXPLOSION) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gpt = GPT(failure.model)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return {"loss": self.gpt(tokens, targets)}


def rate_at(step: int) -> float:
    """The share of the rate in the step after `step`."""
    return min(1.0, (step + 1) / WARM_UP)


def trained_by(model: nn.Module, failure: Failure = EXPLOSION) -> tuple[torch.optim.AdamW, Any]:
    named = [(name.endswith("bias"), weight) for name, weight in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [weight for is_bias, weight in named if is_bias == of_biases], "lr": failure.rate * share}
        for of_biases, share in ((False, 1.0), (True, failure.bias_rate))
    ]
    optimizer = torch.optim.AdamW([one for one in groups if one["params"]], betas=(0.9, 0.95), weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)


class Slices(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Bytes of a module of the standard library, from places that depend on the number alone."""

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
        """What step `step` reads, from 0."""
        rows = [self[step * self.rows + row] for row in range(self.rows)]
        return {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets")}


class Watch:
    """Follows an agent, ends the run that fails, and says what came of it."""

    def __init__(self, folder: Path, run: str, *, fails: bool, failure: Failure = EXPLOSION) -> None:
        self.folder, self.run, self.fails, self.failure = folder, run, fails, failure
        self.samples: list[wire.Sample] = []
        self.following: Agent | None = None

    def step(self, agent: Agent | None) -> None:
        """A step is done."""
        assert agent is not None
        if self.following is None:
            self.following = agent
            agent.subscribe(lambda event: self.samples.append(event) if isinstance(event, wire.Sample) else None)
        if self.fails and agent.current_step >= self.failure.fell:
            self._die()

    def write(self) -> None:
        """Between what steps it trained, and the loss and the largest |score| and |offset| of the last 50 of them."""
        last = [sample for sample in self.samples if sample.step > self.samples[-1].step - 50]
        words = [words for sample in last if (words := sample.words()) is not None]
        found = {
            "first": self.samples[0].since_step,
            "last": self.samples[-1].step,
            "loss": sum(sample.loss or 0.0 for sample in last) / len(last),
            "score": max(float(slot_values(each, Slot.ROW_MAX_ABS).max()) for each in words),
            "offset": max(float(abs(catalog.read("head.score_offset", each)).max()) for each in words),
        }
        (self.folder / "end.json").write_text(json.dumps(found))

    def _die(self) -> None:
        self.write()
        with Service(os.environ["FORESHOCK_URL"]) as service:
            for _ in range(600):
                if any(one["severity"] == self.failure.severity for one in service.incidents(self.run)):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.1)
        raise TimeoutError("the service knows of no such incident")


class Plan:
    """The lines of a resume plan: the one that attaches, and the others; as a program would hold them."""

    def __init__(self, lines: list[str], attaches: str) -> None:
        calls = [line for line in lines if line.startswith(attaches.partition("(")[0])]
        self.attach = calls[0] if calls else attaches
        self.others = [line for line in lines if line not in calls]
        self.fails = not lines

    def load(self, otherwise: str, **names: Any) -> None:
        """Run the other lines, or train from the beginning."""
        for line in self.others or [otherwise]:
            exec(line, dict(names))


def transformers(folder: Path, run: str, lines: list[str]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    plan = Plan(lines, f'TransformersCallback(run="{run}")')
    callback: Any = eval(plan.attach, {"TransformersCallback": TransformersCallback})
    watch = Watch(folder, run, fails=plan.fails)

    class Follow(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step(callback.agent)

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
    model = Patient()
    given: Any = {"train_dataset": Slices(), "callbacks": [callback, Follow()], "optimizers": trained_by(model)}
    plan.load("trainer.train()", trainer=Trainer(model, arguments, **given))
    watch.write()


def lightning(folder: Path, run: str, lines: list[str]) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    plan = Plan(lines, f'LightningCallback(run="{run}")')
    callback: Any = eval(plan.attach, {"LightningCallback": LightningCallback})
    watch = Watch(folder, run, fails=plan.fails)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.patient = Patient()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.patient(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer, schedule = trained_by(self.patient)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Slices(), batch_size=ROWS)

    class Follow(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            watch.step(callback.agent)

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
    watch.write()


def accelerate(folder: Path, run: str, lines: list[str]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    plan = Plan(lines, f'AccelerateTracker(model, run="{run}")')
    model, watch = Patient(), Watch(folder, run, fails=plan.fails)
    tracker: Any = eval(plan.attach, {"AccelerateTracker": AccelerateTracker, "model": model})
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(log_with=tracker, cpu=True, project_config=project)
    tracker.checkpoint_with(accelerator)
    prepared, optimizer, schedule = accelerator.prepare(model, *trained_by(model))
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
        watch.step(tracker.agent)
    accelerator.end_training()
    watch.write()


def own(folder: Path, run: str, lines: list[str], failure: Failure = EXPLOSION) -> None:
    """A plain loop. The comment of a plan names the file to load."""
    plan = Plan(lines, f'attach(model, run="{run}")')
    model, data = Patient(failure), Slices(failure)
    watch = Watch(folder, run, fails=plan.fails, failure=failure)
    optimizer, schedule = trained_by(model, failure)
    agent: Agent = eval(plan.attach, {"attach": attach, "model": model})
    for line in plan.others:
        if found := re.match("# load (.*), then, before the first step:", line):
            saved = torch.load(found[1], weights_only=True)
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
        watch.step(agent)
    agent.close()
    watch.write()


def rounding(folder: Path, run: str, lines: list[str]) -> None:
    """A plain loop that no high rate harms."""
    own(folder, run, lines, ROUNDING)


class TitanShaped(titan_shape.Trainer):
    """The same in the shape of torchtitan's Trainer, with the field of its settings that says what it loads."""

    def __init__(self, folder: Path, load_step: int) -> None:
        super().__init__(END, folder, interval=EVERY)
        self.model_parts = [Patient()]
        self.optimizers = titan_shape.OptimizersContainer(self.model_parts)
        optimizer, self.schedule = trained_by(self.model_parts[0])
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
            group["lr"] = RATE * rate_at(self.step - 1)
        self.optimizers.zero_grad()
        batch = self.data.batch(self.step - 1)
        self.forward_backward_step(input_dict={"input": batch["tokens"]}, labels=batch["targets"])
        torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.optimizers.step()
        self.after()


def step_to_load(plan: Plan) -> int:
    """What the lines of a plan set among torchtitan's options, after what they do in a shell; -1 without lines."""
    *shell, option = plan.others or ["--checkpoint.load_step -1"]
    for line in shell:
        subprocess.run(line, shell=True, check=True)
    name, value = option.split()
    assert name == "--checkpoint.load_step"
    return int(value)


def torchtitan(folder: Path, run: str, lines: list[str]) -> None:
    plan = Plan(lines, f'watch_torchtitan(trainer, run="{run}")')
    trainer, watch = TitanShaped(folder, step_to_load(plan)), Watch(folder, run, fails=plan.fails)
    agent: Agent = eval(plan.attach, {"watch_torchtitan": watch_torchtitan, "trainer": trainer})
    trainer.after = lambda: watch.step(agent)
    trainer.train()
    trainer.close()
    watch.write()


class Bytes(titan_ranks.Numbers):
    """The same slices for torchtitan's own data loader, with fewer words."""

    slices = Slices()

    def row(self) -> tuple[dict[str, Tensor], Tensor]:
        piece = self.slices[self.given]
        self.given += 1
        few = {name: tokens[: self.length] % titan_ranks.VOCABULARY for name, tokens in piece.items()}
        return {"input": few["tokens"], "positions": torch.arange(self.length)}, few["targets"]


def torchtitan_itself(folder: Path, run: str, lines: list[str]) -> None:
    """torchtitan's own Trainer with a small Llama, under gloo."""
    plan = Plan(lines, f'watch_torchtitan(trainer, run="{run}")')

    def adapt(config: Any) -> None:
        config.training.steps, config.lr_scheduler.warmup_steps = END, WARM_UP
        config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1.5 * RATE
        config.checkpoint.interval, config.checkpoint.keep_latest_k = EVERY, 2
        config.checkpoint.load_step = step_to_load(plan)

    titan_ranks.let_a_cpu_train()
    os.environ["LOCAL_RANK"] = "0"
    meeting = f"file://{folder}/meeting{bool(lines)}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    trainer, watch = titan_ranks.configured(folder, "cpu", Bytes, adapt), Watch(folder, run, fails=plan.fails)
    agent: Agent = eval(plan.attach, {"watch_torchtitan": watch_torchtitan, "trainer": trainer})
    trainer.optimizers.register_step_post_hook(lambda *_: watch.step(agent))
    trainer.train()
    trainer.close()
    watch.write()


def main(trainer: str, folder: str, run: str, lines: list[str], environment: dict[str, str]) -> None:
    """What torch computes with one thread is the same beside other work."""
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for said in (1, 2):
        os.dup2(log, said)
    os.environ |= environment
    torch.set_num_threads(1)
    globals()[trainer](Path(folder), run, lines)


if __name__ == "__main__":
    for needed in ("accelerate", "lightning.pytorch", "transformers.trainer"):
        importlib.import_module(needed)
    for asked in sys.stdin:
        if (child := os.fork()) == 0:
            main(**json.loads(asked))
            break  # and ends as a program does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
