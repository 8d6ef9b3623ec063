"""Many runs side by side: processes over cores and GPUs, several runs in each, a trace of every one.

Processes share nothing but a folder: a run is taken by making its claim file, and a trace that is there already is not
made again, so that a set can be stopped and gone on with.
"""

import os
import shutil
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from foreshock.contract import wire
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.recording.trace import TraceWriter
from foreshock.lab.training.corpus import Corpus, standard_library
from foreshock.lab.training.offset_removal import remove_offset
from foreshock.lab.training.recipes import Arm, Recipe
from foreshock.lab.training.run import Recorder, Training

_DEAD_STEPS = 500
"""A run whose loss was no number for so long is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What is done, once, to a run of an arm, `delay_steps` after its first warning."""

    name: str
    delay_steps: int = 0
    mode: wire.ModeName = DEFAULT_MITIGATION
    heads: Literal["warned", "layer", "all"] = "warned"
    """the head that the warning named, its layer, or every head"""
    remove_offset: bool = False
    """also take out the offset that has grown, exactly"""


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


def run_set(
    entries: Sequence[Entry],
    folder: Path,
    *,
    processes: int,
    runs_per_process: int = 1,
    gpus: Sequence[int] = (),
    seconds: float = 1e9,
    say: Any = print,
) -> list[str]:
    """Make the traces of `entries` in `folder`; the names of those that are not there when time is out.

    Without `gpus` the processes train on the CPU, one core each; with them they are spread over these devices, and
    every process trains `runs_per_process` runs at once. A run that fails stops no other.
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
            core = cores[number % len(cores)] if cores else None
            process = context.Process(target=_work, args=(list(entries), folder, runs_per_process, deadline, core))
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


def _checkpoint(folder: Path, entry: Entry, delay: int) -> Path:
    return folder / "checkpoints" / f"{entry.recipe.name}_{entry.arm.name}_seed{entry.seed}_{delay}.pt"


class _Run:
    """One entry under way."""

    def __init__(self, entry: Entry, folder: Path, corpus: Corpus, delays: Collection[int]) -> None:
        self.entry, self._folder = entry, folder
        self._waiting = sorted(delays) if entry.branch is None else []
        self._warning: wire.Verdict | None = None
        self._began = time.monotonic()
        arm = replace(entry.arm, name=entry.branch.name) if entry.branch else entry.arm
        self.training = Training(entry.recipe, arm, entry.seed, corpus=corpus)
        self._first_step = 0
        self._path = _trace(folder, entry).with_suffix(".part")
        header = entry.recipe.header(arm, entry.seed, self.training.agent.run)
        self._open = ExitStack()
        self._writer = self._open.enter_context(TraceWriter(self._path, header))
        self.training.agent.subscribe(self._hear)
        if entry.branch is None:
            self._recorder = Recorder(self.training, self._writer)
        else:
            saved = torch.load(_checkpoint(folder, entry, entry.branch.delay_steps), weights_only=True)
            self.training.restore(saved["checkpoint"])
            self._first_step = self.training.step
            self._recorder = Recorder(self.training, self._writer)
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

    def turn(self) -> bool:
        """One step; False when it was the last."""
        training = self.training
        training.advance()
        self._recorder.step()
        while self._waiting and self._warning and training.step >= self._warning.step + self._waiting[0]:
            path = _checkpoint(self._folder, self.entry, self._waiting.pop(0))
            path.parent.mkdir(exist_ok=True)
            head = [self._warning.layer or 0, self._warning.head or 0]
            torch.save({"checkpoint": training.checkpoint(), "head": head}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        return training.step < self.entry.recipe.steps and self._recorder.dead_steps < _DEAD_STEPS

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
        steps = training.step - self._first_step
        warned = f"warned at {self._warning.step}" if self._warning else "quiet"
        rate = steps / (time.monotonic() - self._began)
        print(f"{self.entry.name}: {status} at step {training.step}, {rate:.0f} steps/s, {warned}", flush=True)


def _work(entries: list[Entry], folder: Path, runs: int, deadline: float, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    corpus = standard_library()
    active: list[_Run] = []
    while time.time() < deadline:
        while len(active) < runs and (entry := _claim(entries, folder)) is not None:
            delays = {e.branch.delay_steps for e in entries if e.branch and _trunk(e) == _trunk(entry)}
            try:
                active.append(_Run(entry, folder, corpus, delays))
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


def _failed(entry: Entry, folder: Path) -> None:
    print(f"{entry.name} failed:\n{traceback.format_exc()}", flush=True)
    (folder / "claims" / f"{entry.name}.failed").touch()


def _trunk(entry: Entry) -> tuple[str, str, int]:
    return entry.recipe.name, entry.arm.name, entry.seed


def _ready(entry: Entry, folder: Path) -> bool:
    return entry.branch is None or _checkpoint(folder, entry, entry.branch.delay_steps).exists()


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
