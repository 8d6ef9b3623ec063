"""What a sample of rows is worth: recorded failures, known from fewer rows, and judged anew.

A kept attention is measured in a sample of its rows. Whether a drift is named rounding rests on the accumulated delta
bias of its head, the one statistic that is small beside its noise: a failing head's mean is some 0.005 of the standard
deviation of a row. A recording holds the moments of all rows, so it tells what any number of them would have shown. The
sum over a sample of n of N rows misses its share of the whole by a normal error of variance n (1 - n / N) s^2, with the
variance s^2 of a row that the recording tells; ties are drawn without replacement. Offsets, whose noise is far below
what is asked of them, and largest scores are those of all rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words
from foreshock.lab.recording.trace import Trace, counted, reading
from foreshock.lab.scoring.incidents import failing_head
from foreshock.lab.scoring.score import truth
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.readings import Readings

ROWS: Final = (3.2, 32, 102.4, 204.8, 409.6, 819.2, 1638.4)
"""Rows of each head in a step, in the mean, that are tried: 32 in every tenth step is the first."""
ASKED_LAG: Final = 500
"""Steps by which a sample may be behind a count of every row."""
MODELS: Final = {"4 x 4": 16, "12 x 12": 144, "32 x 32": 1024, "80 x 64": 5120}
"""Heads of models; the more there are, the more standard errors are asked of one."""
_NEVER: Final = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRow:
    """One number of rows, over all runs and seeds of the sample."""

    rows: float | None
    """of each head in a step, in the mean; None for all"""
    failures: int
    """runs that failed by rounding, times seeds"""
    bias: float
    """median of the failing head's standardised delta bias where a count of every row warns about it"""
    biased_lag: float | None
    """median of the steps by which it reaches what is asked later than that of every row, whether or not the head is
    looked at by then; None where most never do"""
    named: int
    """failures whose head was warned about with the cause rounding"""
    lag: float | None
    """median of the steps by which that came later than by every row; None where most never were"""
    longest_lag: int | None
    """of those that were"""
    in_time: int
    """failures in which it came no more than ASKED_LAG later"""
    healthy: int
    """healthy runs, times seeds"""
    false: int
    """heads of these that were warned about"""


@dataclass(frozen=True, slots=True)
class _JudgedHead:
    biased: int | None
    """the first step from which on the failing head's delta bias supports its drift until it is warned about"""
    warned: int | None
    """the first step at which it is warned about with the cause rounding"""
    bias: list[tuple[int, float]]
    """by step, standardised, positive the way that the head drifts"""


def rows_needed(bias: float, heads: int, steps: int, whole: float, config: DetectorConfig | None = None) -> float:
    """Rows of each head in a step that give a delta bias what it is asked for within `steps`.

    bias: its mean, in standard deviations of a row. whole: what a count of every row gives by then, in standard errors,
    which the blocks that it is summed over bound. With z as asked of `heads` heads, 1 / z^2 = 1 / whole^2 + 1 / (bias^2
    rows steps). Infinite where every row would not do.
    """
    asked = (config or DetectorConfig()).support_z(heads)
    rest = 1 / asked**2 - 1 / whole**2
    return float("inf") if rest <= 0 else 1 / (rest * bias**2 * steps)


def failures(traces: Sequence[Trace]) -> list[tuple[Trace, int]]:
    """The runs among `traces` that failed by rounding with nothing injected, and the row of the head that did."""
    found = []
    for trace in traces:
        if truth(trace) == "rounding" and trace.header.get("nature", "natural") == "natural" and _has_moments(trace):
            head = failing_head(trace, None)
            if head is not None:
                found.append((trace, trace.heads.index(head)))
    return found


def _has_moments(trace: Trace) -> bool:
    """Whether the squares of the delta bias were recorded."""
    return all(np.isfinite(words.view(np.float64)[:, Slot.DELTA_BIAS_SUMSQ]).all() for _, words in counted(trace))


def thin(words: Words, every: Floats, random: np.random.Generator) -> Words:
    """Counts [N, SLOT_COUNT] as they would be had one in `every` [N] of the rows been measured."""
    thinned, rows = words.copy(), words[:, Slot.ROWS]
    units = np.maximum(rows, 1)
    drawn = np.maximum(units // every.astype(np.int64), 1)
    looked = np.where(every > 1, np.minimum(drawn, rows), rows)
    for slot in (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS):
        tied = np.minimum(words[:, slot], units)
        random.random(len(rows))  # keeps the published draws
        thinned[:, slot] = np.where(every > 1, random.hypergeometric(tied, units - tied, drawn), words[:, slot])
    floats = words.view(np.float64)
    total, squares = floats[:, Slot.DELTA_BIAS_SUM], floats[:, Slot.DELTA_BIAS_SUMSQ]
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.nan_to_num((squares - total**2 / rows).clip(min=0.0))
        error = np.sqrt(spread * (rows / np.maximum(looked, 1) - 1))
        share = np.where(every > 1, looked / np.maximum(rows, 1), 1.0)
    thinned.view(np.float64)[:, Slot.DELTA_BIAS_SUM] = (total + error * random.standard_normal(len(rows))) * share
    thinned[:, Slot.SKIPPED_ROWS] = rows - looked
    return thinned


def _judged(
    trace: Trace, rows: float | None, seed: int, config: DetectorConfig
) -> Iterator[tuple[Detectors, Readings, list[wire.Verdict]]]:
    """The detectors after every sample, of which `rows` rows of each head were measured in a step; None: all."""
    random = np.random.default_rng([seed, round((rows or 0) * 10)])
    detectors = Detectors(trace.heads, config)
    for sample, words in counted(trace):
        if rows is not None:
            every = words[:, Slot.ROWS] / max(rows * (sample.step - sample.since_step), 1)
            words = thin(words, np.maximum(np.rint(every), 1.0), random)
        seen = replace(reading(trace, sample, words), rounds=True)
        yield detectors, seen, detectors.update(seen)


def _judge_head(trace: Trace, head: int, rows: float | None, seed: int, config: DetectorConfig) -> _JudgedHead:
    """What the detectors find of the failing head until they name rounding."""
    asked = config.support_z(len(trace.heads))
    bias: list[tuple[int, float]] = []
    biased = None
    for detectors, seen, verdicts in _judged(trace, rows, seed, config):
        z = float(detectors.run.delta_bias_z[head] * np.sign(seen.score_offset[head]))
        bias.append((seen.step, z))
        biased = (seen.step if biased is None else biased) if z >= asked else None
        own = (verdict for verdict in verdicts if (verdict.layer, verdict.head) == trace.heads[head])
        if any(verdict.cause == "rounding" and verdict.state != "cleared" for verdict in own):
            return _JudgedHead(biased, seen.step, bias)
    return _JudgedHead(biased, None, bias)


def _false(trace: Trace, rows: float | None, seed: int, config: DetectorConfig) -> int:
    """Heads of a healthy run that are warned about."""
    verdicts = (verdict for _, _, verdicts in _judged(trace, rows, seed, config) for verdict in verdicts)
    return len({(v.layer, v.head) for v in verdicts if v.state == "raised" and v.severity != "info"})


def power(
    traces: Sequence[Trace],
    rows: Sequence[float] = ROWS,
    *,
    seeds: int,
    on_row: Callable[[], None] = lambda: None,
) -> list[PowerRow]:
    """A row for each number of rows, over `seeds` samples of every run among `traces`, after one of all rows.

    Raises ValueError where no run failed by rounding with its moments recorded.
    """
    config = DetectorConfig()
    if not (failed := failures(traces)):
        raise ValueError("none of these runs failed by rounding, with the moments of its delta bias recorded")
    healthy = [trace for trace in traces if truth(trace) == "healthy" and _has_moments(trace)]
    whole = [_judge_head(trace, head, None, 0, config) for trace, head in failed]
    kept = [place for place, each in enumerate(whole) if each.warned is not None]
    made = []
    for count in (None, *rows):
        drawn = range(1 if count is None else seeds)
        pairs = [(_judge_head(*failed[place], count, seed, config), whole[place]) for seed in drawn for place in kept]
        false = sum(_false(trace, count, seed, config) for seed in drawn for trace in healthy)
        made.append(_row(count, pairs, healthy=len(healthy) * len(drawn), false=false))
        on_row()
    return made


def _row(rows: float | None, pairs: Sequence[tuple[_JudgedHead, _JudgedHead]], *, healthy: int, false: int) -> PowerRow:
    lags = [_lag(now.warned, before.warned) for now, before in pairs]
    named = [lag for lag in lags if lag != _NEVER]
    return PowerRow(
        rows=rows,
        failures=len(pairs),
        bias=median(_at(now.bias, before.warned) for now, before in pairs),
        biased_lag=_finite(median(_lag(now.biased, before.biased) for now, before in pairs)),
        named=len(named),
        lag=_finite(median(lags)),
        longest_lag=int(max(named)) if named else None,
        in_time=sum(lag <= ASKED_LAG for lag in lags),
        healthy=healthy,
        false=false,
    )


def _lag(now: int | None, before: int | None) -> float:
    return _NEVER if now is None or before is None else now - before


def _finite(lag: float) -> float | None:
    return None if lag == _NEVER else lag


def _at(bias: Sequence[tuple[int, float]], step: int | None) -> float:
    """The bias at the last sample up to `step`."""
    return next(z for at, z in reversed(bias) if step is None or at <= step)


def moments(traces: Sequence[Trace]) -> tuple[float, float, float]:
    """Of the failures among `traces`, where every row warns about them, medians: the mean of the failing head's delta
    bias in standard deviations of a row, what every row gives in standard errors, and the step."""
    config, found = DetectorConfig(), []
    for trace, head in failures(traces):
        judged = _judge_head(trace, head, None, 0, config)
        if judged.warned is None:
            continue
        known = [words[head] for sample, words in counted(trace) if sample.step <= judged.warned]
        rows = sum(int(words[Slot.ROWS]) for words in known)
        total, squares = (
            sum(float(words.view(np.float64)[slot]) for words in known)
            for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_SUMSQ)
        )
        found.append((abs(total / rows) / math.sqrt(squares / rows), judged.bias[-1][1], judged.warned))
    bias, whole, step = (median(each) for each in zip(*found, strict=True))
    return bias, whole, step


def report(traces: Sequence[Trace], *, seeds: int, on_row: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Everything that `markdown` writes, as JSON."""
    bias, whole, step = moments(traces)
    needed = {model: rows_needed(bias, heads, round(step), whole) for model, heads in MODELS.items()}
    return {
        "bias": bias,
        "whole": whole,
        "step": step,
        "needed": needed,
        "rows": [asdict(row) for row in power(traces, seeds=seeds, on_row=on_row)],
    }


def markdown(figures: dict[str, Any]) -> str:
    """The two tables of docs/detectors.md."""
    lines = [
        "| rows of a head in a step | delta bias, standard errors | it is large enough, later by | named rounding | "
        f"later by, and at most | within {ASKED_LAG} steps | false warnings, healthy runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        late = f"{_cell(row['lag'])}, {_cell(row['longest_lag'])}"
        lines.append(
            f"| {'all' if row['rows'] is None else _cell(row['rows'])} | {row['bias']:.2f} "
            f"| {_cell(row['biased_lag'])} "
            f"| {row['named']} of {row['failures']} | {late} | {row['in_time']} | {row['false']} in {row['healthy']} |"
        )
    lines += ["", "| layers x heads | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    config = DetectorConfig()
    asked = (f"{config.support_z(heads):.2f}" for heads in MODELS.values())
    lines.append("| standard errors that are asked for | " + " | ".join(asked) + " |")
    lines.append("| rows of a head in a step | " + " | ".join(map(_cell, figures["needed"].values())) + " |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}" if value >= 100 else f"{value:g}"
