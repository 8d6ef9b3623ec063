"""Trains one arm of a recipe under a watching agent, from the first step or from another arm's checkpoint."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from foreshock.contract import wire
from foreshock.lab.corpus import Corpus, standard_library
from foreshock.lab.model import GPT
from foreshock.lab.recipes import Arm, Recipe
from foreshock.lab.trace import TraceWriter
from foreshock.monitor import Agent, attach

Sink = Callable[[wire.Event], None]
_RECIPE, _ARM = TypeAdapter(Recipe), TypeAdapter(Arm)


class Training:
    """One run: model, optimizer, text and agent, at some step.

    Equal recipes, arms and seeds give equal runs on one kind of machine; `checkpoint` and `restore` carry a run into
    another arm, which is then identical to the first until something is switched.
    """

    def __init__(
        self,
        recipe: Recipe,
        arm: Arm,
        seed: int,
        *,
        run: str = "",
        url: str | None = None,
        corpus: Corpus | None = None,
        labels: dict[str, str] | None = None,
        **agent_settings: Any,
    ) -> None:
        self.recipe, self.arm, self.seed, self.step = recipe, arm, seed, 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._corpus = corpus or standard_library()
        torch.manual_seed(seed)
        self.model = GPT(recipe.shaped(arm)).to(self.device)
        self._batches = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        known = {"recipe": recipe.name, "arm": arm.name, "seed": str(seed), "corpus": self._corpus.sha256[:16]}
        settings: dict[str, Any] = {
            "run": run or f"{recipe.name}-{arm.name}-seed{seed}",
            "url": url,
            "numerics": arm.numerics,
            "policy": arm.policy,
            "labels": known | (labels or {}),
            "sample_every_steps": recipe.sample_every_steps,
            "sample_every_seconds": 0.0,
            "spool_directory": None,
            "quiet": True,
        }
        self.agent: Agent = attach(self.model, **(settings | agent_settings))
        self._begun = False

    def advance(self) -> float:
        """One optimizer step; the loss in nats."""
        if not self._begun and self.arm.mode != "plain" and self.step == 0:
            self.agent.set_mode(self.agent.modes(), self.arm.mode, reason=f"arm {self.arm.name}")
        self._begun = True
        rate = self.recipe.learning_rate * min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.next_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        clip = float("inf") if self.recipe.clip is None else self.recipe.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.agent.step(loss=loss.detach(), grad_norm=norm, learning_rate=rate, step=self.step)
        return float(loss.detach())

    def next_loss(self) -> Tensor:
        """The loss of the run's next batch, [] in nats, with its graph."""
        tokens, targets = self._corpus.batch(self.recipe.batch, self.recipe.model.context, self._batches)
        loss: Tensor = self.model(tokens.to(self.device), targets.to(self.device))
        return loss

    def checkpoint(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied, and what was run; `torch.save` takes it."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        copied = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, state)
        return {
            **copied,
            "batches": self._batches.get_state(),
            "agent": self.agent.state_dict(),
            "step": self.step,
            "recipe": _RECIPE.dump_python(self.recipe, mode="json"),
            "arm": _ARM.dump_python(self.arm, mode="json"),
            "seed": self.seed,
        }

    @classmethod
    def resumed(cls, checkpoint: dict[str, Any], **settings: Any) -> "Training":
        """The run that left `checkpoint`, at its step; `settings` are the class's other arguments."""
        recipe, arm = _RECIPE.validate_python(checkpoint["recipe"]), _ARM.validate_python(checkpoint["arm"])
        training = cls(recipe, arm, int(checkpoint["seed"]), **settings)
        training.restore(checkpoint)
        return training

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from `checkpoint`, which may be another arm's. Call it before the first step."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self._batches.set_state(checkpoint["batches"])
        self.agent.load_state_dict(checkpoint["agent"])
        self.step = int(checkpoint["step"])


def train(
    training: Training,
    steps: int,
    *,
    sinks: tuple[Sink, ...] = (),
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_warning: Callable[[wire.Verdict, dict[str, Any]], None] | None = None,
    deadline: float | None = None,
) -> wire.Finished:
    """Run `training` up to step `steps`, or until the monotonic clock passes `deadline`; closes its agent.

    on_warning gets the first warning and the checkpoint of the last sample before it.
    """
    warned: list[wire.Verdict] = []
    finished: list[wire.Finished] = []
    sampled: list[int] = []

    def listen(event: wire.Event) -> None:
        if isinstance(event, wire.Sample):
            sampled.append(event.step)
        if isinstance(event, wire.Verdict) and event.state == "raised" and event.severity != "info":
            warned.append(event)
        if isinstance(event, wire.Finished):
            finished.append(event)

    for sink in (*sinks, listen):
        training.agent.subscribe(sink)
    before = training.checkpoint() if on_warning else {}
    with training.agent:
        while training.step < steps and (deadline is None or time.monotonic() < deadline):
            loss = training.advance()
            on_step(training.step, loss)
            if on_warning and warned:
                on_warning(warned[0], before)
                on_warning = None
            elif on_warning and sampled and sampled[-1] == training.step:
                before = training.checkpoint()
    return finished[0]


def lab_run(
    recipe: Recipe,
    arm: Arm,
    *,
    seed: int,
    trace: Path,
    steps: int | None = None,
    url: str | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train one arm from the first step and write its trace (every head, every sample)."""
    training = Training(recipe, arm, seed, url=url)
    header = {"recipe": recipe.name, "arm": arm.name, "seed": seed, "run": training.agent.run}
    with TraceWriter(trace, header) as writer:
        train(training, steps or recipe.steps, sinks=(writer,), on_step=on_step)
