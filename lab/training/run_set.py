"""Many runs side by side: processes over cores and GPUs, several runs in each, a trace of every one.

Processes share nothing but a folder: a run is taken by making its claim file, and a trace that is there already is not
made again, so that a set can be stopped and gone on with. Entries are taken in their order; a branch starts as soon as
its trunk has left a checkpoint, in addition to the runs under way, since the trunk's folder may not outlive the set.
"""

import os
import shutil
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from foreshock.contract import wire
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.training.arm import Arm
from foreshock.lab.training.corpus import Corpus
from foreshock.lab.training.milestones import Milestone, Milestones
from foreshock.lab.training.offset_removal import remove_offset
from foreshock.lab.training.recipes import Recipe, Text
from foreshock.lab.training.run import HISTORY_STEPS, Recorder, Training, text_of

_DEAD_STEPS = 500
"""A run whose loss was no number for so long is over."""


Point = tuple[Milestone, int]
"""A milestone of a trunk and steps after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What is done, once, to a run of an arm, `delay_steps` after a milestone."""

    name: str
    after: Milestone = "warning"
    delay_steps: int = 0
    mode: wire.ModeName = DEFAULT_MITIGATION
    heads: Literal["warned", "layer", "all"] = "warned"
    """the head that the warning named, its layer, or every head"""
    remove_offset: bool = False
    """also take out the offset that has grown, exactly"""

    @property
    def point(self) -> Point:
        """Where of the trunk it starts."""
        return self.after, self.delay_steps

    @property
    def when(self) -> str:
        """The same in words, for the trace."""
        return self.after + (f"+{self.delay_steps}" if self.delay_steps else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run of a set."""

    recipe: Recipe
    arm: Arm
    seed: int
    branch: Branch | None = None

    @property
    def name(self) -> str:
        """Of its trace, without the ending."""
        arm = self.branch.name if self.branch else self.arm.name
        return f"{self.recipe.name}_{arm}_seed{self.seed}"


def chosen(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """The runs whose name matches one of `patterns` (shell wildcards), in their order; all of them without patterns.

    A branch is made only where its trunk is chosen too. Raises ValueError for a pattern that no run matches.
    """
    for pattern in patterns:
        if not any(fnmatchcase(entry.name, pattern) for entry in entries):
            raise ValueError(
                f"no run of this set matches {pattern!r}; runs are named RECIPE_ARM_seedSEED, such as {entries[0].name}"
            )
    return [entry for entry in entries if not patterns or any(fnmatchcase(entry.name, each) for each in patterns)]


def run_set(
    entries: Sequence[Entry],
    folder: Path,
    *,
    processes: int,
    runs_per_process: int = 1,
    gpus: Sequence[int] = (),
    seconds: float = 1e9,
    rivals: bool = True,
    say: Any = print,
) -> list[str]:
    """Make the traces of `entries` in `folder`; the names of those that are not there when time is out.

    Without `gpus` the processes train on the CPU, with them they are spread over these devices; cores are dealt out to
    them. Every process trains `runs_per_process` runs at once, each on a GPU in a stream of its own, and twice as
    many branches beside them. `rivals` False leaves out what only rival monitors read. A run that fails stops no
    other; one that time cuts short leaves its trace in the folder "unfinished".
    """
    shutil.rmtree(folder / "claims", ignore_errors=True)
    (folder / "claims").mkdir(parents=True)
    context = get_context("spawn")  # CUDA does not survive a fork
    deadline = time.time() + seconds
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    started = []
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        for number in range(processes if any(not _trace(folder, entry).exists() for entry in entries) else 0):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[number % len(gpus)]) if gpus else ""
            own = set(cores[number % len(cores) :: processes]) if cores else None
            work = (list(entries), folder, runs_per_process, deadline, own, rivals)
            process = context.Process(target=_work, args=work)
            process.start()
            started.append(process)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    for process in started:
        process.join()
    missing = [entry.name for entry in entries if not _trace(folder, entry).exists()]
    say(f"{len(entries) - len(missing)} of {len(entries)} traces are in {folder}")
    return missing


def _trace(folder: Path, entry: Entry) -> Path:
    return folder / f"{entry.name}.jsonl.gz"


def _checkpoint(folder: Path, entry: Entry, point: Point) -> Path:
    at = f"{point[0]}{point[1]}"
    return folder / "checkpoints" / f"{entry.recipe.name}_{entry.arm.name}_seed{entry.seed}_{at}.pt"


class _Run:
    """One entry under way."""

    def __init__(
        self, entry: Entry, folder: Path, corpus: Corpus, points: Collection[Point], *, rivals: bool = True
    ) -> None:
        self.entry, self._folder = entry, folder
        self._waiting = sorted(points) if entry.branch is None else []
        self._milestones = Milestones()
        self._warning: wire.Verdict | None = None
        self._largest_score = 0.0
        self._blocks = 0
        self._began = time.monotonic()
        arm = replace(entry.arm, name=entry.branch.name) if entry.branch else entry.arm
        self.training = Training(entry.recipe, arm, entry.seed, corpus=corpus)
        self._first_step = 0
        self._path = _trace(folder, entry).with_suffix(".part")
        header = entry.recipe.header(arm, entry.seed, self.training.agent.run)
        if entry.branch is not None:
            header |= {"when": entry.branch.when, "trunk": entry.arm.name}
        self._open = ExitStack()
        self._writer = self._open.enter_context(TraceWriter(self._path, header))
        self.training.agent.subscribe(self._hear)
        if entry.branch is not None:
            saved = torch.load(_checkpoint(folder, entry, entry.branch.point), weights_only=True)
            self.training.restore(saved["checkpoint"])
            self._first_step = self.training.step
        self._recorder = Recorder(self.training, self._writer, rivals=rivals)
        if entry.branch is not None:
            self._treat(entry.branch, tuple(saved["head"]))

    def _treat(self, branch: Branch, warned: tuple[int, int]) -> None:
        every = list(self.training.agent.modes())
        chosen = {"warned": [warned], "layer": [head for head in every if head[0] == warned[0]], "all": every}
        heads = chosen[branch.heads]
        with self.training.on_stream():
            if branch.remove_offset:
                remove_offset(self.training.model, self.training.peek_loss, heads, self.training.optimizers)
            if branch.mode != "plain":
                self.training.agent.set_mode(heads, branch.mode, reason=f"branch {branch.name}")

    def _hear(self, event: wire.Event) -> None:
        if isinstance(event, wire.Verdict) and event.state == "raised" and event.severity != "info":
            self._warning = self._warning or event
            self._milestones.passed.setdefault("warning", event.step)
        elif isinstance(event, wire.Sample) and (words := event.words()) is not None:
            self._largest_score = max(self._largest_score, float(slot_values(words, Slot.ROW_MAX_ABS).max()))

    def turn(self) -> bool:
        """One step; False when it was the last."""
        training = self.training
        training.advance()
        self._recorder.step()
        for losses, norms in self._recorder.steps[self._blocks :]:
            self._blocks += 1
            judged = self._warning is not None and len(losses) == HISTORY_STEPS
            self._milestones.block(training.step, losses, norms, self._largest_score, judge=judged)
        passed = self._milestones.passed
        for after, delay in [p for p in self._waiting if p[0] in passed and training.step >= passed[p[0]] + p[1]]:
            self._waiting.remove((after, delay))
            self._leave((after, delay))
        return training.step < self.entry.recipe.steps and self._recorder.dead_steps < _DEAD_STEPS

    def _leave(self, point: Point) -> None:
        warning = self._warning
        path = _checkpoint(self._folder, self.entry, point)
        path.parent.mkdir(exist_ok=True)
        head = [0, 0] if warning is None else [warning.layer or 0, warning.head or 0]
        torch.save({"checkpoint": self.training.checkpoint(), "head": head}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        print(f"{self.entry.name}: {point[0]}+{point[1]} at step {self.training.step}", flush=True)

    def end(self, status: str) -> None:
        """Close the trace, and put it in its place when the run is whole."""
        training = self.training
        with training.on_stream():
            self._recorder.flush()
            training.agent.close("completed" if status == "completed" else "stopped")
        self._open.close()
        if status == "completed":
            self._path.rename(_trace(self._folder, self.entry))
        else:
            (self._folder / status).mkdir(exist_ok=True)
            self._path.rename(self._folder / status / _trace(self._folder, self.entry).name)
        rate = (training.step - self._first_step) / (time.monotonic() - self._began)
        passed = ", ".join(f"{what} {step}" for what, step in self._milestones.passed.items()) or "quiet"
        print(f"{self.entry.name}: {status} at step {training.step}, {rate:.0f} steps/s, {passed}", flush=True)


def _work(entries: list[Entry], folder: Path, runs: int, deadline: float, cores: set[int] | None, rivals: bool) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    texts: dict[Text, Corpus] = {}
    active: list[_Run] = []
    while time.time() < deadline:
        while (entry := _next(entries, folder, len(active), runs)) is not None:
            points = {e.branch.point for e in entries if e.branch and _trunk(e) == _trunk(entry)}
            try:
                text = texts.setdefault(entry.recipe.text, texts.get(entry.recipe.text) or text_of(entry.recipe.text))
                active.append(_Run(entry, folder, text, points, rivals=rivals))
            except Exception:
                _failed(entry, folder)
        if not active:
            if not _undecided(entries, folder):
                break
            time.sleep(1.0)
        for run in list(active):
            try:
                if (run.training.busy and len(active) > 1) or run.turn():
                    continue
                run.end("completed")
            except Exception:
                _failed(run.entry, folder)
            active.remove(run)
    for run in active:
        run.end("unfinished")


def _next(entries: list[Entry], folder: Path, active: int, runs: int) -> Entry | None:
    """What a process with so many active runs may take on: a branch does not wait for a place."""
    if active < runs:
        return _claim(entries, folder)
    return _claim([e for e in entries if e.branch], folder) if active < 3 * runs else None


def _failed(entry: Entry, folder: Path) -> None:
    print(f"{entry.name} failed:\n{traceback.format_exc()}", flush=True)
    (folder / "claims" / f"{entry.name}.failed").touch()


def _trunk(entry: Entry) -> tuple[str, str, int]:
    return entry.recipe.name, entry.arm.name, entry.seed


def _ready(entry: Entry, folder: Path) -> bool:
    return entry.branch is None or _checkpoint(folder, entry, entry.branch.point).exists()


def _claim(entries: list[Entry], folder: Path) -> Entry | None:
    for entry in entries:
        if _ready(entry, folder) and not _trace(folder, entry).exists():
            try:
                os.close(os.open(folder / "claims" / entry.name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return entry
    return None


def _undecided(entries: list[Entry], folder: Path) -> bool:
    """Whether a branch may yet become ready: its trunk is under way."""
    ended = [e for e in entries if _trace(folder, e).exists() or (folder / "claims" / f"{e.name}.failed").exists()]
    under_way = {_trunk(e) for e in entries if e.branch is None and e not in ended}
    return any(_trunk(e) in under_way for e in entries if e.branch and not (folder / "claims" / e.name).exists())
