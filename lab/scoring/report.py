"""`foreshock lab score`: the scores of recorded runs as JSON."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.score import Score, score_traces
from foreshock.lab.scoring.sealed import break_seal
from foreshock.lab.scoring.table import as_json
from foreshock.monitor.detect.detectors import DetectorConfig


def lab_score(
    paths: Sequence[Path],
    *,
    report: Path | None = None,
    config: DetectorConfig | None = None,
    seal: Path | None = None,
    on_trace: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Score], dict[str, Any]]:
    """Score every trace; the scores, and what `report` gets as JSON: traces, table, incidents, forecasts.

    `seal` is where it is written down that held-out runs on real text were scored. Raises ValueError for a file that is
    no trace, and for held-out runs that may not be scored (`foreshock.lab.scoring.sealed`).
    """
    break_seal(paths, config or DetectorConfig(), seal)
    scores = score_traces(list(map(read_trace, paths)), config, lambda trace: on_trace(trace.path))
    result = as_json(scores)
    if report is not None:
        report.write_text(json.dumps(_plain(result), indent=1) + "\n")
    return scores, result


def _plain(value: Any) -> Any:
    """The same without what strict JSON lacks: a number that is not finite becomes its name."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
