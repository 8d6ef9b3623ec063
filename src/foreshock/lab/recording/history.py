"""What a recorded or live run says of every head, whichever of the two it comes from."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from foreshock.client import Service, path_of
from foreshock.contract import wire
from foreshock.contract.metrics.catalog import HEAD_METRICS
from foreshock.contract.slots import Floats
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import Trace, read_trace

METRICS: Final = {metric.key: metric for metric in HEAD_METRICS}
READ: Final = (
    "head.score_offset",
    "head.row_max_abs",
    "head.tied_rows_one",
    "head.delta_bias",
)
_BLOCKS: Final = 100
_POINTS: Final = 40
"""Points of a live run that are asked for; a recorded one is read whole."""
_VERDICTS: Final = 100
"""Of a live run, the newest."""


@dataclass(frozen=True, slots=True)
class History:
    """Every head of a run at every recorded step."""

    name: str
    heads: list[tuple[int, int]]
    steps: Floats
    """[T]"""
    values: dict[str, Floats]
    """by metric of the catalogue, [T, N]; NaN where not recorded"""
    verdicts: list[wire.Verdict]

    def course(self, metric: str, head: tuple[int, int]) -> Floats:
        """One metric of one head, [T]. Raises ValueError for a head that the run does not have."""
        if head not in self.heads:
            has = " to ".join(f"{layer}.{number}" for layer, number in (min(self.heads), max(self.heads)))
            raise ValueError(f"{self.name} has no head {head[0]}.{head[1]}; it has {has}")
        return self.values[metric][:, self.heads.index(head)]

    def blocks(self, metric: str, head: tuple[int, int]) -> tuple[Floats, Floats]:
        """`course` as means over blocks of steps, about a hundred to a run: steps [T'] and values [T'], all finite.

        An agent samples every step near a warning; a block weighs all its steps alike, however many samples it has.
        """
        values, spans = self.course(metric, head), np.diff(self.steps, prepend=0.0)
        known = np.isfinite(values) & (spans > 0)
        block = np.floor(self.steps[known] / max(self.steps[-1] / _BLOCKS, 1.0)).astype(np.int64)
        _, index = np.unique(block, return_inverse=True)
        weight = np.bincount(index, spans[known])
        ends = np.zeros(len(weight))
        np.maximum.at(ends, index, self.steps[known])
        return ends, np.bincount(index, spans[known] * values[known]) / weight


def recorded(trace: Path | Trace) -> History:
    """The history of a trace, with today's verdicts. Raises ValueError for a file that is none."""
    trace = read_trace(trace) if isinstance(trace, Path) else trace
    counted = [(sample, words) for sample in trace.samples if (words := sample.words()) is not None]
    values: dict[str, list[Floats]] = {}
    for key in READ:
        reading = METRICS[key].head
        assert reading is not None
        assert reading.read is not None
        values[key] = [reading.read(words) for _, words in counted]
    return History(
        trace.path.name,
        trace.heads,
        np.array([sample.step for sample, _ in counted], dtype=np.float64),
        {key: np.array(rows, dtype=np.float64).reshape(len(counted), len(trace.heads)) for key, rows in values.items()},
        verdicts(trace),
    )


def live(run: str, service: Service) -> History:
    """The history of a run that a service knows, thinned to some steps.

    Raises ServiceError when the service does not answer or refuses, ValueError for a run that has sent no sample.
    """
    detail = service.run(run)
    heads = [(layer["layer"], head) for layer in detail["layers"] for head in layer["heads"]]
    steps: list[int] = service.get(path_of("runs", run, "matrix"), metric=READ[0], max_steps=_POINTS)["steps"]
    if not steps:
        raise ValueError(f"{run} has sent no sample to {service.url} yet")
    layers, numbers = [layer for layer, _ in heads], [head for _, head in heads]
    values = {key: np.full((len(steps), len(heads)), np.nan) for key in READ}
    for row, step in enumerate(steps):
        for key in READ:
            shown = service.matrix(run, key, step)
            rows, columns = (np.searchsorted(*each) for each in ((shown.layers, layers), (shown.heads, numbers)))
            values[key][row] = shown.values[rows, columns]
    events = islice(service.events(run, "verdict"), _VERDICTS)
    found = [wire.Verdict.model_validate(each["verdict"]) for each in events if each["verdict"]]
    return History(run, heads, np.array(steps, dtype=np.float64), values, found[::-1])
