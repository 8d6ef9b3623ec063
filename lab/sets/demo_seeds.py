"""Whether the demo shows what it promises on seeds and processors it was not made for: `foreshock lab demo-seeds`.

The trainings of the demo without its service and its clock, one process for each seed and kind of processor. The other
kinds of processor are stood in for by this one: PyTorch, oneDNN and MKL are told to do without its vector instructions,
which changes the order of every sum and so every rounding; trajectories part within some steps.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from foreshock.contract import wire
from foreshock.lab.demo_show import Show
from foreshock.lab.recording.record import Record
from foreshock.lab.training.arm import Arm
from foreshock.lab.training.run import Training, train

PROCESSORS: Final[Mapping[str, Mapping[str, str]]] = {
    "own": {},
    "plain": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""Environment variables of each kind of processor."""
_UNDONE_SHARE: Final = 0.5
"""Of the distance between untreated and control, in which a switched head must end."""
_LAST_POINTS: Final = 8
"""Points of a record, 200 steps, that a level is the mean of: a single one is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one seed showed on one kind of processor. Offsets are those of the head that was warned about first (without
    a warning: the one that went furthest), in nats at the end; losses are means of the last 500 steps."""

    recipe: str
    numerics: str
    mitigation: str
    control: str
    seed: int
    processor: str
    steps: int
    warned_step: int | None
    switched_step: int | None
    layer: int
    head: int
    cause: str | None
    offset_untreated: float
    offset_switched: float | None
    offset_control: float
    score_untreated: float
    score_switched: float | None
    score_control: float
    loss_untreated: float
    loss_switched: float | None
    loss_control: float
    control_warnings: int
    processor_seconds: float
    """of all three trainings"""

    @property
    def undone(self) -> bool:
        """Whether the switched head ended nearer to its control than half of what it would have gone."""
        if self.offset_switched is None:
            return False
        left = abs(abs(self.offset_switched) - abs(self.offset_control))
        return left <= _UNDONE_SHARE * abs(abs(self.offset_untreated) - abs(self.offset_control))

    @property
    def kept(self) -> bool:
        """Whether the demo's promise was kept: warned about, undone by the switch, and the control quiet."""
        return self.warned_step is not None and self.undone and not self.control_warnings


def measure(show: Show, seed: int, processor: str = "own") -> Shown:
    """Train the three arms of the demo one after another, in this process."""
    torch.set_num_threads(1)
    began = time.process_time()
    branch: dict[str, Any] = {}

    def warned(_: wire.Verdict, before: dict[str, Any]) -> None:
        branch.update(before)

    untreated = _trained(show, show.untreated, seed, on_warning=warned)
    control = _trained(show, show.control, seed)
    switched = _trained(show, show.rescued, seed, Record() if not branch else untreated.until(branch["step"]), branch)
    first = untreated.warnings[0] if untreated.warnings else None
    if first is not None and first.layer is not None and first.head is not None:
        row = untreated.heads.index((first.layer, first.head))
    else:
        row = int(np.argmax(np.abs(untreated.offsets[-1])))
    layer, head = untreated.heads[row]

    def level(record: Record) -> float:
        return float(np.mean([offsets[row] for offsets in record.offsets[-_LAST_POINTS:]]))

    return Shown(
        recipe=show.recipe.name,
        numerics=show.numerics,
        mitigation=show.rescued.mitigation,
        control=show.control.name,
        seed=seed,
        processor=processor,
        steps=untreated.steps[-1],
        warned_step=first.step if first else None,
        switched_step=switched.switches[0].step if branch and switched.switches else None,
        layer=layer,
        head=head,
        cause=first.cause if first else None,
        offset_untreated=level(untreated),
        offset_switched=level(switched) if branch else None,
        offset_control=level(control),
        score_untreated=float(untreated.scores[-1].max()),
        score_switched=float(switched.scores[-1].max()) if branch else None,
        score_control=float(control.scores[-1].max()),
        loss_untreated=untreated.final_loss,
        loss_switched=switched.final_loss if branch else None,
        loss_control=control.final_loss,
        control_warnings=len(control.warnings),
        processor_seconds=round(time.process_time() - began, 1),
    )


def _trained(
    show: Show,
    arm: Arm,
    seed: int,
    record: Record | None = None,
    branch: dict[str, Any] | None = None,
    on_warning: Callable[[wire.Verdict, dict[str, Any]], None] | None = None,
) -> Record:
    """What one arm showed; with an empty `branch`, of which there is nothing to go on from, nothing."""
    record = record or Record()
    if branch == {}:
        return record
    training = Training(show.recipe, arm, seed)
    if branch:
        training.restore(branch)
    train(training, show.recipe.steps, sinks=(record.add,), on_warning=on_warning)
    return record


def demo_seeds(
    show: Show,
    seeds: Sequence[int],
    *,
    processors: Sequence[str] = tuple(PROCESSORS),
    processes: int = 1,
    json_file: Path | None = None,
    on_shown: Callable[[Shown], None] = lambda shown: None,
) -> list[Shown]:
    """Measure every seed on every kind of processor; what is in `json_file` already is not measured again.

    Raises ValueError for a kind of processor that does not exist, and for a file of another version of the demo.
    """
    if unknown := set(processors) - set(PROCESSORS):
        raise ValueError(
            f"no such kind of processor: {', '.join(sorted(unknown))}; allowed are {', '.join(PROCESSORS)}"
        )
    kept = json.loads(json_file.read_text())["runs"] if json_file is not None and json_file.exists() else []
    try:
        known = [Shown(**each) for each in kept]
    except TypeError:
        raise ValueError(f"{json_file} is of another version of the demo; name another file") from None
    found = {(each.seed, each.processor): each for each in known if each.recipe == show.recipe.name}
    for processor in processors:
        if not (missing := [seed for seed in seeds if (seed, processor) not in found]):
            continue
        # The variables are read once, when a process starts.
        with (
            _environment(PROCESSORS[processor]),
            ProcessPoolExecutor(min(processes, len(missing)), mp_context=get_context("spawn")) as pool,
        ):
            for done in as_completed([pool.submit(measure, show, seed, processor) for seed in missing]):
                shown = done.result()
                found[shown.seed, processor] = shown
                on_shown(shown)
                if json_file is not None:
                    write(json_file, found.values())
    return [found[seed, processor] for processor in processors for seed in seeds]


def write(path: Path, shown: Iterable[Shown]) -> None:
    """The measured seeds as JSON, in order."""
    ordered = sorted(shown, key=lambda each: (each.recipe, each.processor, each.seed))
    path.write_text(json.dumps({"runs": [asdict(each) for each in ordered]}, indent=1) + "\n")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
