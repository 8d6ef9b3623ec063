"""Runs on PyTorch's own attention, one line each: what their agents warned about as they trained, and what followed."""

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
class VendorRun:
    """One run of benchmarks/results/vendor_attention.json; None where no warning came or nothing happened."""

    recipe: str
    seed: int
    backend: str
    rows: int
    """of each head, in a measured step"""
    policy: str
    steps: int
    first_warning: int | None
    cause: str | None
    head_right: bool | None
    """whether that warning named the head that reached 512 first, in this run or in the observed one of its seed"""
    step_512: int | None
    """when a head's largest |score| reached 512"""
    switch_step: int | None
    loss_end: float
    """mean over the last 1000 steps"""
    score_end: float
    """largest |score| of any head in the last sample"""


def vendor_runs(paths: Sequence[Path]) -> list[VendorRun]:
    """The runs of `paths` by recipe, backend, policy and seed. Raises ValueError for a file that is no trace, and for a
    run whose attention was not forced to one of PyTorch's backends."""
    traces = [read_trace(path) for path in paths]
    for trace in traces:
        if "backend" not in trace.header:
            raise ValueError(f"{trace.path} is no run on PyTorch's own attention; give runs of a variant BACKEND-...")
    failing = {_key(t): failing_head(t, None) for t in traces if t.header.get("policy") == "observe"}
    runs = [_run(trace, failing_head(trace, None) or failing.get(_key(trace))) for trace in traces]
    return sorted(runs, key=lambda run: (run.recipe, run.backend, run.policy, run.seed))


def _key(trace: Trace) -> tuple[object, ...]:
    return tuple(trace.header.get(name) for name in ("recipe", "seed", "backend"))


def _run(trace: Trace, failing: HeadRef | None) -> VendorRun:
    header, record = trace.header, Record()
    for event in (trace.started, *trace.events):
        record.add(event)
    warning = next((each for each in record.warnings if each.severity != "info"), None)
    return VendorRun(
        recipe=str(header.get("recipe")),
        seed=int(header.get("seed", 0)),
        backend=str(header["backend"]),
        rows=int(header["rows"]),
        policy=str(header.get("policy")),
        steps=int(trace.steps.step[-1]),
        first_warning=None if warning is None else warning.step,
        cause=None if warning is None else warning.cause,
        head_right=None if warning is None or failing is None else (warning.layer, warning.head) == failing,
        step_512=dangerous_step(trace),
        switch_step=record.switches[0].step if record.switches else None,
        loss_end=_final_loss(trace.steps),
        score_end=float(list(readings(trace))[-1].largest_score.max()),
    )


def _final_loss(steps: Steps) -> float:
    """A sample in place of steps counts for its length."""
    last = steps.step > steps.step[-1] - _LAST_STEPS
    return float(np.average(steps.loss[last], weights=steps.span[last]))
