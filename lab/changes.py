"""Whether healthy training that is changed half-way is warned about: `foreshock lab changes`.

People change what they train: another text, a longer context, a larger batch, another rate. The model is small and
has key biases, so that there is something that rounding can push, at a rate at which it trains well.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.lab.training.arm import UNTREATED
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipe import Recipe
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.monitor import attach

CHANGES: Final[Mapping[str, str]] = {
    "none": "nothing",
    "text": "every byte stands for another",
    "reversed": "the text runs backwards",
    "rate": "the learning rate is three times what it was",
    "warm-up": "a cosine has ended, and the rate warms up again",
    "context": "sequences are four times as long, and a quarter as many",
    "batch": "batches are eight times as large",
    "thaw": "attention trains, which was frozen",
    "agent": "an agent is attached, without the state of the one before",
}
"""What is different from `CHANGED_AFTER` on."""
RECIPE: Final[Recipe] = replace(
    find_recipe("healthy-small-slow"),
    name="changes",
    model=ModelConfig(layers=2, heads=4, width=64, context=128),
    learning_rate=2e-3,
    steps=5000,
)
CHANGED_AFTER: Final = 2000
_LOWEST_RATE: Final = 0.05
_LEVEL: Final = 100
"""Steps of which a loss is the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One training. Losses are means of 100 steps, in nats: before the change, after it, and at the end."""

    change: str
    seed: int
    warnings: list[str]
    """of heads, in the agent's words"""
    first_step: int | None
    loss_before: float
    loss_after: float
    loss_end: float
    processor_seconds: float


class Changed(Training):
    """A training that one of `CHANGES` happens to after `after` steps."""

    def __init__(self, change: str, seed: int, *, recipe: Recipe = RECIPE, after: int = CHANGED_AFTER) -> None:
        self.change, self.after = change, after
        super().__init__(recipe, UNTREATED, seed)

    def advance(self) -> Tensor:
        """One optimizer step, of the batch that the change asks for."""
        if self.step == self.after and self.change == "agent":
            self.agent.close()
            with self.on_stream():
                self.agent = attach(self.model, **self._agent_settings)
            self.agent.begin_at(self.step)
        if self.change == "thaw":
            for name, weight in self.model.named_parameters():
                weight.requires_grad_(self.step >= self.after or "attn" not in name)
        with self.on_stream():
            self._windows = torch.zeros(*self._shape(), dtype=self._corpus.tokens.dtype, device=self.device)
        return super().advance()

    @property
    def _steady(self) -> bool:
        return False  # a GPU would go on with the graph that it captured

    def _shape(self) -> tuple[int, int]:
        """Sequences, and tokens of each with the one that follows."""
        batch, length, changed = self.recipe.batch, self.recipe.model.context // 2, self.step >= self.after
        if self.change == "context":
            batch, length = (batch // 2, 2 * length) if changed else (2 * batch, length // 2)
        if self.change == "batch":
            batch = 2 * batch if changed else batch // 4
        return batch, length + 1

    def _next_windows(self) -> Tensor:
        batch, length = self._shape()
        windows = self._corpus.windows(batch, length - 1, self._batches)
        if self.step >= self.after and self.change == "text":
            windows = self.recipe.model.vocabulary - 1 - windows
        if self.step >= self.after and self.change == "reversed":
            windows = windows.flip(1)
        return windows

    def _rate_share(self, step: int) -> float:
        share = super()._rate_share(step)
        if self.change == "rate" and step > self.after:
            return 3 * share
        if self.change == "warm-up":
            fallen = 0.5 * (1 + math.cos(math.pi * step / self.after))
            share = min(share, fallen) if step <= self.after else super()._rate_share(step - self.after)
            return _LOWEST_RATE + (1 - _LOWEST_RATE) * share
        return share


def measure(change: str, seed: int, *, recipe: Recipe = RECIPE, after: int = CHANGED_AFTER) -> Seen:
    """Train with one change, in this process."""
    torch.set_num_threads(1)
    began = time.process_time()
    warned: list[wire.Verdict] = []

    def listen(event: wire.Event) -> None:
        if isinstance(event, wire.Verdict) and event.state == "raised" and event.severity != "info":
            warned.append(event)

    training, losses = Changed(change, seed, recipe=recipe, after=after), []
    agent = None
    while training.step < recipe.steps:
        if training.agent is not agent:
            agent = training.agent
            agent.subscribe(listen)
        losses.append(float(training.advance()))
    training.agent.close()
    return Seen(
        change=change,
        seed=seed,
        warnings=[each.sentence for each in warned],
        first_step=warned[0].step if warned else None,
        loss_before=float(np.mean(losses[after - _LEVEL : after])),
        loss_after=float(np.mean(losses[after : after + _LEVEL])),
        loss_end=float(np.mean(losses[-_LEVEL:])),
        processor_seconds=round(time.process_time() - began, 1),
    )


def changes(
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    processes: int = 1,
    json_file: Path | None = None,
    on_seen: Callable[[Seen], None] = lambda seen: None,
    **settings: Any,
) -> list[Seen]:
    """Train with each change and seed, and write all that was seen.

    Raises ValueError for a change that does not exist.
    """
    if unknown := set(names) - set(CHANGES):
        raise ValueError(f"no such change: {', '.join(sorted(unknown))}; allowed are {', '.join(CHANGES)}")
    found = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(measure, name, seed, **settings) for seed in seeds for name in names]
        for done in as_completed(made):
            found.append(done.result())
            on_seen(found[-1])
            if json_file is not None:
                json_file.write_text(json.dumps({"runs": [asdict(each) for each in found]}, indent=1) + "\n")
    order = {name: place for place, name in enumerate(CHANGES)}
    return sorted(found, key=lambda each: (order[each.change], each.seed))
