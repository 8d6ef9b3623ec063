"""A run in its folder: it ends at SIGTERM or a time limit, and goes on from its newest checkpoint.

The folder holds checkpoints/ (the newest few, and the one before the first warning), the trace (of the first process)
and progress.jsonl: at each checkpoint the loss of the last steps, and how often the text was read.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsFloat

import torch

from foreshock.contract import wire
from foreshock.lab.recording.trace_writer import TraceWriter, lines_until
from foreshock.lab.recording.whole_file import whole_file
from foreshock.lab.texts import Corpus
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import Recipe
from foreshock.lab.training.run import Recorder, Training, train
from foreshock.lab.training.variant import Variant, shown_name

EVERY_STEPS: Final = 500
KEPT: Final = 3
"""So many of the newest."""


class Checkpoints:
    """Each is written under another name and then renamed, so that every file that ends with .pt is whole."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder

    def all(self) -> list[Path]:
        """Those that are there, the oldest first."""
        return sorted(self._folder.glob("step-*.pt"), key=_step)

    def newest(self) -> Path | None:
        """The last one; None where there is none."""
        there = self.all()
        return there[-1] if there else None

    def write(self, checkpoint: dict[str, Any], *, warned_at: int | None) -> Path:
        """Keep one, named by its step; older ones go, but for the last before the step of the first warning."""
        path = self._folder / f"step-{checkpoint['step']:07d}.pt"
        with whole_file(path) as part, part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        there = self.all()
        before = [each for each in there if warned_at is not None and _step(each) < warned_at][-1:]
        for each in there[:-KEPT]:
            if each not in before:
                each.unlink()
        return path


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """What one command is to train, from the first step or from a checkpoint."""

    recipe: Recipe
    variant: Variant
    seed: int
    folder: Path
    steps: int | None = None
    """by default the recipe's own"""
    resume: bool = False
    """go on from the newest checkpoint of the folder"""
    branch_from: Path | None = None
    """or from this one, of another variant of the same recipe, text and seed"""
    late_agent: bool = False
    """the agent takes up nothing of what another saw before, as one that is attached in the middle of a run"""
    minutes: float | None = None
    """end with a checkpoint when they are over"""
    url: str | None = None
    every_steps: int = EVERY_STEPS
    corpus: Corpus | None = None
    ranks: Ranks = field(default_factory=Ranks)
    say: Callable[[str], None] = lambda sentence: None
    """gets a sentence at each checkpoint, in the first process"""
    on_step: Callable[[int, SupportsFloat], None] = lambda step, loss: None

    @property
    def last(self) -> int:
        """The step that it ends with."""
        return self.steps or self.recipe.steps

    @property
    def checkpoints(self) -> Checkpoints:
        """The files that it resumes from."""
        return Checkpoints(self.folder / "checkpoints")

    @property
    def trace(self) -> Path:
        """The file of its recording."""
        return self.folder / f"{self.recipe.name}_{self.variant.name}_seed{self.seed}.jsonl.gz"

    def train(self) -> int:
        """Train, and return the step that it came to: fewer than `last` where time was over or SIGTERM came.

        Raises ValueError for a folder that holds another run, or nothing to resume.
        """
        ends_at = math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes
        start = self._start()
        with ExitStack() as stack:
            asked = stack.enter_context(_noting_sigterm())
            training = Training(
                self.recipe, self.variant, self.seed, url=self.url, corpus=self.corpus, ranks=self.ranks
            )
            stack.callback(training.agent.close, "failed")  # one that trained to its end is closed by then
            warned = (
                [] if start is None else _take_up(training, start, same_variant=self.resume, late_agent=self.late_agent)
            )
            if training.step >= self.last:
                raise ValueError(f"{start} is of step {training.step} already; give more --steps than that")
            recorder = self._recorder(training, stack) if self.ranks.rank == 0 else None
            first, began = training.step, time.monotonic()

            def hear(event: wire.Event) -> None:
                if isinstance(event, wire.Verdict) and event.state == "raised" and event.severity != "info":
                    warned.append(event.step)

            def stepped(step: int, loss: SupportsFloat) -> None:
                training.wants_to_end = bool(asked) or time.monotonic() > ends_at
                if recorder is not None:
                    recorder.step(loss)
                if step % self.every_steps == 0 or step == self.last or training.ends:
                    self._save(training, recorder, warned, (time.monotonic() - began) / (step - first))
                self.on_step(step, loss)

            training.agent.subscribe(hear)
            train(training, self.last, stepped)
        return training.step

    def _start(self) -> Path | None:
        newest = self.checkpoints.newest()
        if self.resume and newest is None:
            raise ValueError(f"{self.folder} holds no checkpoint to resume from; leave --resume out for a first start")
        if not self.resume and newest is not None:
            raise ValueError(f"{self.folder} holds a run with {newest.name}; give --resume, or another folder")
        if self.late_agent and not self.resume and self.branch_from is None:
            raise ValueError("a run that starts has no earlier agent; give --late-agent with --resume or --branch-from")
        if self.resume and self.branch_from is not None:
            raise ValueError("a run that resumes is branched already; give --branch-from at its first start alone")
        return newest or self.branch_from

    def _recorder(self, training: Training, stack: ExitStack) -> Recorder:
        """Writes the trace and the losses, after what they held up to the step that the run resumes from."""
        path, header = self.trace, self.recipe.header(self.variant, self.seed, training.agent.run)
        earlier = list(lines_until(path, training.step)) if self.resume and path.exists() else []
        lines = self._progress.read_text().splitlines() if self.resume and self._progress.exists() else []
        with whole_file(self._progress) as part:
            part.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= training.step))
        return Recorder(training, stack.enter_context(TraceWriter(path, header, earlier)))

    @property
    def _progress(self) -> Path:
        return self.folder / "progress.jsonl"

    def _save(self, training: Training, recorder: Recorder | None, warned: list[int], seconds: float) -> None:
        """Keep all of the run in a checkpoint; `seconds` a step took."""
        mine: dict[str, Any] = training.checkpoint() if recorder is not None else {"agent": training.agent.state_dict()}
        gathered = self.ranks.gather((mine["agent"], warned))
        if recorder is None:
            return
        recorder.flush()  # first: what the trace lacks nobody can make again
        heard = min((step for _, steps in gathered for step in steps), default=None)
        all_of_it = mine | {"agents": [agent for agent, _ in gathered], "warned": [] if heard is None else [heard]}
        path = self.checkpoints.write(all_of_it, warned_at=heard)
        tokens = training.step * training.recipe.batch * training.recipe.model.context
        loss, passes = float(recorder.losses.mean()), tokens / len(training.corpus.tokens)
        line = {"step": training.step, "loss": loss, "tokens": tokens, "passes": passes, "seconds_per_step": seconds}
        with self._progress.open("a") as file:
            print(json.dumps(line), file=file)
        self.say(
            f"step {training.step}: loss {loss:.4f}, {passes:.2f} passes over the text, {seconds:.3f} s a step; {path}"
        )


def _take_up(training: Training, path: Path, *, same_variant: bool, late_agent: bool = False) -> list[int]:
    """Go on from a checkpoint; the steps of warnings before it. Raises ValueError for one of another run."""
    saved = torch.load(path, map_location=training.device, weights_only=True)
    known = {"recipe": training.recipe.name, "seed": training.seed, "text": training.corpus.sha256}
    recorded = {"recipe": saved["recipe"]["name"], "seed": saved["seed"], "text": saved["text"]}
    if same_variant:
        known |= {"variant": shown_name(training.variant.name)}
        recorded |= {"variant": shown_name(saved["arm"]["name"])}
    for what, value in known.items():
        if recorded[what] != value:
            raise ValueError(
                f"{path} is of the {what} {recorded[what]}, this run of {value}; give the same, or another folder"
            )
    agents = saved["agents"]
    training.restore(saved | {"agent": None if late_agent else agents[training.ranks.rank % len(agents)]})
    return list(saved["warned"]) if same_variant else []


@contextmanager
def _noting_sigterm() -> Iterator[list[int]]:
    """While the block runs, SIGTERM ends nothing: what comes is noted in the list."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
