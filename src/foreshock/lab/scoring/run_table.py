"""Recorded runs, one line each: what their agents warned about as they trained, and what followed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from foreshock.contract.wire import HeadRef
from foreshock.lab.recording.record import Record
from foreshock.lab.recording.trace import Steps, Trace, read_trace, readings
from foreshock.lab.scoring.incidents import failing_head
from foreshock.lab.scoring.score import dangerous_step

_LAST_STEPS: Final = 1000
"""Steps whose mean loss is called final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run; None where no warning came or nothing happened."""

    recipe: str
    arm: str
    seed: int
    backend: str | None
    """of PyTorch's own attention, which it was forced to"""
    rows: int | None
    """of each head, in a step that measures a sample of it"""
    policy: str
    steps: int
    first_warning: int | None
    cause: str | None
    head_right: bool | None
    """whether that warning named the head that reached 512 first, here or in the observed run of the seed"""
    step_512: int | None
    """when a head's largest |score| reached 512"""
    switch_step: int | None
    loss_end: float
    """mean over the last 1000 steps"""
    score_end: float
    """largest |score| of any head in the last sample"""
    offset_end: float
    """largest |score offset| of any head there, in nats"""


def run_rows(paths: Sequence[Path]) -> list[RunRow]:
    """The runs of `paths` by recipe, backend, arm and seed. Raises ValueError for a file that is no trace."""
    traces = [read_trace(path) for path in paths]
    heads = [failing_head(trace, None) for trace in traces]
    observed: dict[tuple[object, ...], HeadRef | None] = {}
    for trace, head in zip(traces, heads, strict=True):
        if trace.header.get("policy") == "observe":
            observed[_key(trace)] = observed.get(_key(trace)) or head
    runs = [_run(trace, head or observed.get(_key(trace))) for trace, head in zip(traces, heads, strict=True)]
    return sorted(runs, key=lambda run: (run.recipe, run.backend or "", run.arm, run.seed))


def _key(trace: Trace) -> tuple[object, ...]:
    return tuple(trace.header.get(name) for name in ("recipe", "seed", "backend"))


def _run(trace: Trace, failing: HeadRef | None) -> RunRow:
    header, record = trace.header, Record()
    for event in (trace.started, *trace.events):
        record.add(event)
    *_, last = readings(trace)
    warning = next((each for each in record.warnings if each.severity != "info"), None)
    return RunRow(
        recipe=str(header.get("recipe")),
        arm=str(header.get("arm")),
        seed=int(header.get("seed", 0)),
        backend=header.get("backend"),
        rows=header.get("rows"),
        policy=str(header.get("policy")),
        steps=int(trace.steps.step[-1]),
        first_warning=None if warning is None else warning.step,
        cause=None if warning is None else warning.cause,
        head_right=None if warning is None or failing is None else (warning.layer, warning.head) == failing,
        step_512=dangerous_step(trace),
        switch_step=record.switches[0].step if record.switches else None,
        loss_end=_final_loss(trace.steps),
        score_end=float(np.abs(last.largest_score).max()),
        offset_end=float(np.abs(last.score_offset).max()),
    )


def _final_loss(steps: Steps) -> float:
    """A sample in place of steps counts for its length."""
    last = steps.step > steps.step[-1] - _LAST_STEPS
    return float(np.average(steps.loss[last], weights=steps.span[last]))
