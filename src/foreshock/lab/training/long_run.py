"""A run that stops at SIGTERM or a time limit and can be resumed from its newest checkpoint.

Its folder contains checkpoints/ (the newest ones) and the trace, both written by rank 0.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsFloat

import torch

from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.recording.whole_file import whole_file
from foreshock.lab.texts import Corpus
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import Recipe
from foreshock.lab.training.run import Recorder, Training, train
from foreshock.lab.training.variant import Variant

EVERY_STEPS: Final = 500
KEPT: Final = 3
"""Number of checkpoints that are kept, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """Settings of one run, which starts at the first step or at a checkpoint."""

    recipe: Recipe
    variant: Variant
    seed: int
    folder: Path
    steps: int | None = None
    """by default the recipe's own"""
    resume: bool = False
    """continue from the newest checkpoint of the folder"""
    minutes: float | None = None
    """time limit, after which the run stops with a checkpoint"""
    every_steps: int = EVERY_STEPS
    corpus: Corpus | None = None
    ranks: Ranks = field(default_factory=Ranks)
    say: Callable[[str], None] = lambda sentence: None
    """called with a progress message at each checkpoint, on rank 0"""
    on_step: Callable[[int, SupportsFloat], None] = lambda step, loss: None

    @property
    def last(self) -> int:
        """The last step."""
        return self.steps or self.recipe.steps

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoint files, the oldest first."""
        return sorted(self.folder.glob("checkpoints/step-*.pt"))

    @property
    def trace(self) -> Path:
        """The path of the trace."""
        return self.folder / f"{self.recipe.name}_{self.variant.name}_seed{self.seed}.jsonl.gz"

    def train(self) -> int:
        """Train, and return the last step: less than `last` if the time limit or SIGTERM stopped the run.

        Raises ValueError if the folder contains another run, or no checkpoint to resume from.
        """
        ends_at = math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes
        there = self.checkpoints
        if self.resume and not there:
            raise ValueError(f"{self.folder} holds no checkpoint to resume from; leave --resume out for a first start")
        if there and not self.resume:
            raise ValueError(f"{self.folder} holds a run with {there[-1].name}; give --resume, or another folder")
        with ExitStack() as stack:
            asked = stack.enter_context(_noting_sigterm())
            training = Training(self.recipe, self.variant, self.seed, corpus=self.corpus, ranks=self.ranks)
            stack.callback(training.agent.close, "failed")  # no effect after train(), which closes the agent
            kept_bytes = self._take_up(training, there[-1]) if there else 0
            recorder: Recorder | None = None
            if self.ranks.rank == 0:
                header = self.recipe.header(self.variant, self.seed, training.agent.run)
                recorder = Recorder(training, stack.enter_context(TraceWriter(self.trace, header, kept_bytes)))
            first, began = training.step, time.monotonic()

            def stepped(step: int, loss: SupportsFloat) -> None:
                training.wants_to_end = bool(asked) or time.monotonic() > ends_at
                if recorder is not None:
                    recorder.step(loss)
                if step % self.every_steps == 0 or step == self.last or training.ends:
                    self._save(training, recorder, (time.monotonic() - began) / (step - first))
                self.on_step(step, loss)

            train(training, self.last, stepped)
        return training.step

    def _save(self, training: Training, recorder: Recorder | None, seconds: float) -> None:
        """Write a checkpoint of the whole run; `seconds` is the mean time of a step."""
        mine: dict[str, Any] = training.checkpoint() if recorder is not None else {"agent": training.agent.state_dict()}
        agents = self.ranks.gather(mine["agent"])
        if recorder is None:
            return
        recorder.flush()
        path = self.folder / "checkpoints" / f"step-{training.step:07d}.pt"
        with whole_file(path) as part:
            torch.save(mine | {"agents": agents, "trace_bytes": recorder.writer.size()}, part)
        for older in self.checkpoints[:-KEPT]:
            older.unlink()
        tokens = training.step * training.recipe.batch * training.recipe.model.context
        loss, passes = float(recorder.losses.mean()), tokens / len(training.corpus.tokens)
        self.say(
            f"step {training.step}: loss {loss:.4f}, {passes:.2f} passes over the text, {seconds:.3f} s a step; {path}"
        )

    def _take_up(self, training: Training, path: Path) -> int:
        """Restore a checkpoint, and return the size of the trace at that time.

        Raises ValueError for a checkpoint of another run.
        """
        saved = torch.load(path, map_location=training.device, weights_only=True)
        mine = training.checkpoint()
        for what in ("recipe", "seed", "text", "variant"):
            if saved[what] != mine[what]:
                raise ValueError(
                    f"{path} is of the {what} {saved[what]}, this run of {mine[what]}; give the same, or another folder"
                )
        if saved["step"] >= self.last:
            raise ValueError(f"{path} is of step {saved['step']} already; give more --steps than that")
        agents = saved["agents"]
        training.restore(saved | {"agent": agents[training.ranks.rank % len(agents)]})
        return int(saved["trace_bytes"])


@contextmanager
def _noting_sigterm() -> Iterator[list[int]]:
    """In a with block, append each SIGTERM to the returned list instead of ending the process."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
