"""Which remedy holds which failure, and what the agent says of it: `foreshock lab matrix`.

One small GPT is trained into each failure, seed by seed: with nothing done, and with each remedy from the first step or
from the agent's first warning on, whatever cause it names. The agent has its default settings and its own detectors.
"""

import functools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Literal, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.decision import cause_of
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.recording.packed import RECORDED
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.recording.whole_file import whole_file
from foreshock.lab.texts.corpus import VOCABULARY, Corpus, standard_library
from foreshock.lab.training.arm import CONTROL, PAPER, UNTREATED, Arm
from foreshock.lab.training.recipe import Recipe
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training, train

_LEVEL: Final = 100
"""Steps that a loss is the mean of."""
_BIASED: Final = replace(find_recipe("key-bias-small"), name="matrix", steps=1500, sample_every_steps=10)
_BASE: Final = replace(_BIASED, model=replace(_BIASED.model, qkv_bias=False), learning_rate=8e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How the model is made to fail."""

    recipe: Recipe
    arm: Arm = UNTREATED
    text_changes: bool = False
    """Half-way every byte stands for another."""


FAILURES: Final[Mapping[str, Failure]] = {
    "rounding": Failure(recipe=replace(_BIASED, learning_rate=4e-3, bias_rate=32.0, steps=3000), arm=PAPER),
    "score growth by AdamW": Failure(recipe=replace(_BASE, learning_rate=6.4e-2)),
    "score growth by Muon": Failure(recipe=replace(_BASE, learning_rate=2.56e-1, optimizer="muon")),
    "entropy collapse": Failure(recipe=replace(_BASE, learning_rate=3.2e-2, warmup_steps=1)),
    "fp8": Failure(recipe=replace(_BASE, model=replace(_BASE.model, float8=True), learning_rate=3.2e-2)),
    "changed text": Failure(recipe=replace(_BASE, steps=3000), text_changes=True),
    "healthy": Failure(recipe=replace(_BASE, steps=3000)),
}
Remedy = Literal["nothing", "row_corrected", "qk_clip", "both", "float32"]
REMEDIES: Final[tuple[Remedy, ...]] = ("nothing", "row_corrected", "qk_clip", "both")
On = Literal["start", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training."""

    failure: str
    remedy: Remedy
    on: On | None
    """When the remedy comes; None where there is none."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training showed. Losses are in nats; `score_end` is the largest |score| of the last 100 steps."""

    failure: str
    remedy: Remedy
    seed: int
    on: On | None
    warned: int | None
    """Step of the first warning of a head or of the run."""
    cause: str | None
    """That the newest warning names."""
    exploded: bool
    """Whether it ends at a loss that is not finite, or above what the byte before tells: its attention is of no use."""
    final_loss: float | None
    """None where it is not finite."""
    score_end: float | None
    sentences: list[str]
    """of all warnings"""
    learning_rate: float
    steps: int
    processor_seconds: float


def cells(failures: Iterable[str], remedies: Iterable[str], ons: Iterable[str], seeds: Iterable[int]) -> Iterator[Cell]:
    """Seed by seed, so that what was stopped has some of everything. Raises ValueError for a name that is unknown."""
    failures, remedies, ons = tuple(failures), tuple(remedies), tuple(ons)
    for what, given, known in (
        ("failure", failures, FAILURES),
        ("remedy", remedies, (*REMEDIES, "float32")),
        ("time", ons, ("start", "warning")),
    ):
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"unknown {what}: {', '.join(unknown)}; allowed are {', '.join(known)}")
    for seed in seeds:
        for remedy in (*REMEDIES, "float32"):
            for failure in FAILURES:
                if remedy in remedies and failure in failures:
                    of = (
                        [None] if remedy in ("nothing", "float32") else [on for on in ("start", "warning") if on in ons]
                    )
                    yield from (Cell(failure=failure, remedy=remedy, on=on, seed=seed) for on in of)


class _Training(Training):
    """A training whose text may change half-way."""

    changed_after: float = math.inf

    def _next_windows(self) -> Tensor:
        windows = super()._next_windows()
        return self.recipe.model.vocabulary - 1 - windows if self.step >= self.changed_after else windows


def measure(cell: Cell, *, steps: int | None = None, traces: Path | None = None) -> Run:
    """Train one cell, in this process, and record it in the folder `traces`; `steps` in place of the recipe's own."""
    torch.set_num_threads(1)
    began = time.process_time()
    failure = FAILURES[cell.failure]
    recipe = replace(failure.recipe, steps=steps or failure.recipe.steps)
    clips, switches = cell.remedy in ("qk_clip", "both"), cell.remedy in ("row_corrected", "both")
    arm = replace(CONTROL, model={"float8": False}) if cell.remedy == "float32" else failure.arm
    if switches and cell.on == "start":
        arm = replace(arm, mode="row_corrected")
    training = _Training(
        recipe,
        arm,
        cell.seed,
        corpus=_text(),
        attention="kernels",
        qk_clip="always" if clips and cell.on == "start" else "never",
    )
    if failure.text_changes:
        training.changed_after = recipe.steps // 2
    verdicts: list[wire.Verdict] = []
    scores: list[tuple[int, float]] = []

    def listen(event: wire.Event) -> None:
        if isinstance(event, wire.Verdict) and event.state != "cleared" and event.severity != "info":
            verdicts.append(event)
        if isinstance(event, wire.Sample) and (words := event.words()) is not None:
            scores.append((event.step, float(slot_values(words, Slot.SCORE_MAX).max())))

    losses: list[float] = []
    waits = cell.on == "warning"

    def act(step: int, loss: SupportsFloat) -> None:
        nonlocal waits
        losses.append(float(loss))
        if verdicts and waits:
            waits = False
            if switches:
                training.agent.set_mode(training.agent.modes(), "row_corrected", reason="the first warning")
            if clips:
                training.agent.set_qk_clip(True, reason="the first warning")

    with ExitStack() as stack:
        writer = None
        if traces is not None:
            header = recipe.header(arm, cell.seed, training.agent.run) | asdict(cell)
            writer = stack.enter_context(TraceWriter(traces / f"{name_of(cell)}{RECORDED}", header))
        train(training, recipe.steps, sinks=(listen,), on_step=act, writer=writer)
    final = float(torch.tensor(losses[-_LEVEL:]).mean())
    last = [score for step, score in scores if step > recipe.steps - _LEVEL]
    return Run(
        **asdict(cell),
        warned=verdicts[0].step if verdicts else None,
        cause=cause_of(verdicts[-1]) if verdicts else None,
        exploded=not final <= entropy_given_last_byte(),
        final_loss=_finite(final),
        score_end=_finite(max(last, default=math.nan)),
        sentences=[verdict.sentence for verdict in verdicts if verdict.state == "raised"],
        learning_rate=recipe.learning_rate,
        steps=recipe.steps,
        processor_seconds=round(time.process_time() - began, 1),
    )


def name_of(cell: Cell) -> str:
    """Of its trace, without the ending."""
    remedy = cell.remedy if cell.on is None else f"{cell.remedy}-{cell.on}"
    return f"{cell.failure}_{remedy}_seed{cell.seed}".replace(" ", "-")


@functools.cache
def _text() -> Corpus:
    return standard_library()


@functools.cache
def entropy_given_last_byte() -> float:
    """The entropy in nats of a byte of the text, given the one before it: what needs no attention."""
    text = _text().tokens.numpy()
    pairs = text[:-1].astype(np.uint16) * VOCABULARY + text[1:]
    counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    seen = counts > 0
    return float(-(counts[seen] * np.log(shares[seen])).sum() / counts.sum())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def matrix(
    chosen: Sequence[Cell],
    *,
    workers: int = 1,
    minutes: float | None = None,
    json_file: Path | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
    **settings: Any,
) -> list[Run]:
    """Train the cells, and keep each in `json_file` as soon as it is done; one that is there is not trained again.

    settings: as of `measure`.
    minutes: after these none is begun; what is under way is ended. What was not reached is left out.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    kept = json.loads(json_file.read_text()) if json_file is not None and json_file.exists() else {}
    known = [Run(**each) for each in (*kept.get("runs", ()), *kept.get("controls", ()))]
    found = {cell_of(run): run for run in known}
    missing = [cell for cell in chosen if cell not in found]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measure, cell, **settings) for cell in missing}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for run in (each.result() for each in done):
                found[cell_of(run)] = run
                on_run(run)
            if json_file is not None:
                _write(json_file, found)
            if time.monotonic() > until:
                waiting = {each for each in waiting if not each.cancel()}
    return [found[cell] for cell in chosen if cell in found]


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """What is shown of all seeds of a failure, a remedy and its time, in words."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.failure, run.remedy, run.on or ""), []).append(run)
    for names, group in groups.items():
        warned = [run.warned for run in group if run.warned is not None]
        causes = Counter(run.cause for run in group if run.cause is not None)
        yield (
            *names,
            f"{sum(run.exploded for run in group)} of {len(group)}",
            *(_median([run.final_loss for run in group], ".2f"), _median([run.score_end for run in group], ",.0f")),
            f"{len(warned)} of {len(group)}" + (f", step {statistics.median(warned):.0f}" if warned else ""),
            ", ".join(f"{cause} {count}" for cause, count in causes.most_common()),
        )


def _median(values: list[float | None], form: str) -> str:
    known = [math.inf if value is None else value for value in values]  # what is not finite is beyond all else
    return f"{statistics.median_high(known):{form}}"


def cell_of(run: Run) -> Cell:
    """The cell that a run is of."""
    return Cell(failure=run.failure, remedy=run.remedy, on=run.on, seed=run.seed)


def _write(path: Path, found: Mapping[Cell, Run]) -> None:
    """In the order of `cells`; float32 is no remedy, but shows which failures are not of rounding."""
    seeds = sorted({cell.seed for cell in found})
    runs = [
        found[cell] for cell in cells(FAILURES, (*REMEDIES, "float32"), ("start", "warning"), seeds) if cell in found
    ]
    controls = [run.remedy == "float32" for run in runs]
    kept = {
        "runs": [asdict(run) for run, control in zip(runs, controls, strict=True) if not control],
        "controls": [asdict(run) for run, control in zip(runs, controls, strict=True) if control],
    }
    with whole_file(path) as part:
        part.write_text(json.dumps(kept, indent=1) + "\n")
