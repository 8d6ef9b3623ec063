"""Many runs side by side: processes over cores and GPUs, several runs in each, a trace of every one.

Processes share nothing but a folder: a run is taken by making its claim file, and a trace that is there already is not
made again, so that a set can be stopped and gone on with. Entries are taken in their order.
"""

import os
import shutil
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from foreshock.lab.recording.packed import PACKED, RECORDED
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.texts.corpus import Corpus
from foreshock.lab.training.arm import Arm
from foreshock.lab.training.recipes import Recipe, Text
from foreshock.lab.training.recorder import Recorder
from foreshock.lab.training.run import Training, text_of

_DEAD_STEPS = 500
"""A run whose loss was no number for so long is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run of a set."""

    recipe: Recipe
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Of its trace, without the ending."""
        return f"{self.recipe.name}_{self.arm.name}_seed{self.seed}"


def chosen(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """The runs whose name matches one of `patterns` (shell wildcards), in their order; all of them without patterns.

    Raises ValueError for a pattern that no run matches.
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
    say: Any = print,
) -> list[str]:
    """Make the traces of `entries` in `folder`; the names of those that are not there when time is out.

    Without `gpus` the processes train on the CPU, with them they are spread over these devices; cores are dealt out to
    them. Every process trains `runs_per_process` runs at once, each on a GPU in a stream of its own. A run that fails
    stops no other; one that time cuts short leaves its trace in the folder "unfinished".
    """
    shutil.rmtree(folder / "claims", ignore_errors=True)
    (folder / "claims").mkdir(parents=True)
    context = get_context("spawn")  # CUDA does not survive a fork
    deadline = time.time() + seconds
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    started = []
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        for number in range(processes if any(not _recorded(folder, entry) for entry in entries) else 0):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[number % len(gpus)]) if gpus else ""
            own = set(cores[number % len(cores) :: processes]) if cores else None
            process = context.Process(target=_work, args=(list(entries), folder, runs_per_process, deadline, own))
            process.start()
            started.append(process)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    for process in started:
        process.join()
    missing = [entry.name for entry in entries if not _recorded(folder, entry)]
    say(f"{len(entries) - len(missing)} of {len(entries)} traces are in {folder}")
    return missing


def _trace(folder: Path, entry: Entry) -> Path:
    return folder / f"{entry.name}{RECORDED}"


def _recorded(folder: Path, entry: Entry) -> bool:
    """Whether the run was recorded, be it packed since."""
    return any((folder / f"{entry.name}{ending}").exists() for ending in (RECORDED, PACKED))


class _Run:
    """One entry under way."""

    def __init__(self, entry: Entry, folder: Path, corpus: Corpus) -> None:
        self.entry, self._folder = entry, folder
        self._began = time.monotonic()
        self.training = Training(entry.recipe, entry.arm, entry.seed, corpus=corpus)
        self._path = _trace(folder, entry).with_suffix(".part")
        self._open = ExitStack()
        header = entry.recipe.header(entry.arm, entry.seed, self.training.agent.run)
        self._recorder = Recorder(self.training, self._open.enter_context(TraceWriter(self._path, header)))

    def turn(self) -> bool:
        """One step; False when it was the last."""
        self.training.advance()
        self._recorder.step()
        return self.training.step < self.entry.recipe.steps and self._recorder.dead_steps < _DEAD_STEPS

    def end(self, status: str) -> None:
        """Close the trace, and put it in its place when the run is whole."""
        training = self.training
        with training.on_stream():
            self._recorder.flush()
            training.agent.close("completed" if status == "completed" else "stopped")
        self._open.close()
        place = self._folder if status == "completed" else self._folder / status
        place.mkdir(exist_ok=True)
        self._path.rename(place / _trace(self._folder, self.entry).name)
        rate = training.step / (time.monotonic() - self._began)
        print(f"{self.entry.name}: {status} at step {training.step}, {rate:.0f} steps/s", flush=True)


def _work(entries: list[Entry], folder: Path, runs: int, deadline: float, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    texts: dict[Text, Corpus] = {}
    active: list[_Run] = []
    while time.time() < deadline:
        while len(active) < runs and (entry := _claim(entries, folder)) is not None:
            try:
                text = texts.setdefault(entry.recipe.text, texts.get(entry.recipe.text) or text_of(entry.recipe.text))
                active.append(_Run(entry, folder, text))
            except Exception:
                _failed(entry)
        if not active:
            break
        for run in list(active):
            try:
                if (run.training.busy and len(active) > 1) or run.turn():
                    continue
                run.end("completed")
            except Exception:
                _failed(run.entry)
            active.remove(run)
    for run in active:
        run.end("unfinished")


def _failed(entry: Entry) -> None:
    print(f"{entry.name} failed:\n{traceback.format_exc()}", flush=True)


def _claim(entries: list[Entry], folder: Path) -> Entry | None:
    for entry in entries:
        if not _recorded(folder, entry):
            try:
                os.close(os.open(folder / "claims" / entry.name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return entry
    return None
