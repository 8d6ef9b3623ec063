"""Scores the detectors on recorded runs: who was warned about, when, why, and how good the forecast was."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from foreshock.contract import wire
from foreshock.lab.replay import verdicts
from foreshock.lab.trace import Trace, read_trace, readings
from foreshock.monitor.detectors import DetectorConfig
from foreshock.monitor.foretelling import DANGEROUS_SCORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One trace as the detectors saw it; None where nothing was said or nothing happened."""

    file: str
    steps: int
    first_warning_step: int | None
    layer: int | None
    head: int | None
    cause: str | None
    signal: str | None
    forecast_steps: float | None
    forecast_low_steps: float | None
    forecast_high_steps: float | None
    dangerous_step: int | None
    """when the largest |score| of the named head did reach 512"""
    warnings: int
    """verdicts raised in all"""


def score(path: Path, config: DetectorConfig | None = None) -> Score:
    """Score one trace. Raises ValueError for a file that is none."""
    trace = read_trace(path)
    raised = [verdict for verdict in verdicts(trace, config) if verdict.state == "raised"]
    first: wire.Verdict | None = raised[0] if raised else None
    return Score(
        file=path.name,
        steps=trace.samples[-1].step,
        first_warning_step=first.step if first else None,
        layer=first.layer if first else None,
        head=first.head if first else None,
        cause=first.cause if first else None,
        signal=first.signal if first else None,
        forecast_steps=first.forecast_steps if first else None,
        forecast_low_steps=first.forecast_low_steps if first else None,
        forecast_high_steps=first.forecast_high_steps if first else None,
        dangerous_step=_dangerous_step(trace, first) if first else None,
        warnings=len(raised),
    )


def _dangerous_step(trace: Trace, verdict: wire.Verdict) -> int | None:
    if verdict.layer is None or verdict.head is None:
        return None
    row = trace.heads.index((verdict.layer, verdict.head))
    for reading in readings(trace):
        if np.fmax(reading.row_max_abs[row], reading.score_max[row]) >= DANGEROUS_SCORE:
            return reading.step
    return None


def lab_score(
    paths: Sequence[Path], *, report: Path | None = None, config: DetectorConfig | None = None
) -> list[Score]:
    """Score every trace, and write {"traces": [...]} to `report`."""
    scores = [score(path, config) for path in paths]
    if report is not None:
        report.write_text(json.dumps({"traces": [asdict(each) for each in scores]}, indent=2) + "\n")
    return scores
