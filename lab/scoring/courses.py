"""How the arms of a recipe ended, beside the float32 control that saw the same batches; a picture of their courses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from foreshock.contract import wire
from foreshock.lab.picture import draw
from foreshock.lab.recording.record import Record
from foreshock.lab.recording.trace import Steps, Trace, read_trace
from foreshock.lab.scoring.harm import first_harm
from foreshock.lab.training.arm import CONTROL

LAST_STEPS: Final = 1000
"""Steps whose mean loss is called final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One run's end."""

    recipe: str
    arm: str
    seed: int
    steps: int
    loss: float
    """mean over the last steps"""
    excess: float | None
    """share by which the loss lies above the control's, over the last steps that both made; None without a control"""
    harm_step: int | None
    largest_score: float
    offset: float
    """largest |score offset| of any head at the end, in nats"""
    first_warning: wire.Verdict | None
    switches: int


def courses(paths: Iterable[Path]) -> list[Course]:
    """The runs of `paths`, by recipe, seed and arm. Raises ValueError for a file that is no trace."""
    traces = [read_trace(path) for path in paths]
    controls = {
        (t.header.get("recipe"), t.header.get("seed")): t for t in traces if t.header.get("arm") == CONTROL.name
    }
    ended = [_course(t, controls.get((t.header.get("recipe"), t.header.get("seed")))) for t in traces]
    return sorted(ended, key=lambda course: (course.recipe, course.seed, course.arm))


def _course(trace: Trace, control: Trace | None) -> Course:
    record = recorded(trace)
    steps = trace.steps
    excess = None if control is None or control is trace else excess_over(steps, control.steps)
    harm = first_harm(trace.steps, None if control is None or control is trace else control.steps)
    return Course(
        recipe=str(trace.header.get("recipe", trace.path.name)),
        arm=str(trace.header.get("arm", "")),
        seed=int(trace.header.get("seed", 0)),
        steps=int(trace.steps.step[-1]),
        loss=_mean_loss(steps, steps.step[0], steps.step[-1]),
        excess=excess,
        harm_step=None if harm is None else harm.step,
        largest_score=record.largest_score,
        offset=final_offset(trace),
        first_warning=next((warning for warning in record.warnings if warning.severity != "info"), None),
        switches=len(record.switches),
    )


def excess_over(steps: Steps, control: Steps) -> float | None:
    """The share by which the mean loss of the last steps that both made lies above the control's; None without any."""
    first, last = (end(steps.step[i], control.step[i]) for end, i in ((max, 0), (min, -1)))
    return _mean_loss(steps, first, last) / _mean_loss(control, first, last) - 1 if first <= last else None


def final_offset(trace: Trace) -> float:
    """The largest |score offset| of any head at the end, in nats; NaN where none was recorded."""
    offsets = recorded(trace).offsets
    return float(np.max(np.abs(offsets[-1]))) if offsets else float("nan")


def _mean_loss(steps: Steps, first: int, last: int) -> float:
    """Over the last steps of [first, last], NaN without any; a sample in place of steps counts for its length."""
    chosen = (steps.step >= max(first, last - LAST_STEPS + 1)) & (steps.step <= last)
    return float(np.average(steps.loss[chosen], weights=steps.span[chosen])) if chosen.any() else float("nan")


def recorded(trace: Trace) -> Record:
    """A trace as the record that pictures are drawn from."""
    record = Record()
    record.add(trace.started)
    for event in trace.events:
        record.add(event)
    return record


def draw_courses(path: Path, traces: Sequence[Path], head: tuple[int, int] | None = None) -> None:
    """A PNG of offset, score and loss of one head in several arms of one recipe and seed.

    `head` is by default the first that the arm `untreated` was warned about. Raises ValueError when the traces are of
    several recipes or seeds, or no head was named or warned about.
    """
    read = [read_trace(each) for each in traces]
    kinds = {(trace.header.get("recipe"), trace.header.get("seed")) for trace in read}
    if len(kinds) != 1:
        raise ValueError(f"the traces are of {len(kinds)} recipes and seeds; give traces of one recipe and seed")
    records: Mapping[str, Record] = {str(trace.header.get("arm")): recorded(trace) for trace in read}
    untreated = records.get("untreated")
    warning = untreated.warnings[0] if untreated is not None and untreated.warnings else None
    if head is None and warning is not None and warning.layer is not None and warning.head is not None:
        head = (warning.layer, warning.head)
    if head is None:
        raise ValueError(
            "no head to draw: name one with --head, or give the trace of a baseline (untreated) that was warned about"
        )
    recipe, seed = kinds.pop()
    draw(path, records, head, f"{recipe}, seed {seed}", {"warned": warning.step if warning else None})
