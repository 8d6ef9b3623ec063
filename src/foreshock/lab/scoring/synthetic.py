"""Synthetic runs with known truth, which test the detectors on long, late, resumed and unusual runs.

Nothing is trained: a run is a generated time series of offset, largest score and delta bias for every head, given to
the detectors in the same form as samples of an agent. The delta bias of a block of 100 steps has noise with a standard
deviation of 1, plus a mean, the push. Measured on a sample of rows, failing heads have a push of about 0.65, and
healthy heads late in a long run about 0.15.

synthetic.toml lists the families of runs. Rules were tuned on seeds below 1000, and on the families with `tuned`;
published tables use seeds from 1000.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.contract.wire import Verdict
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.readings import Readings

SCORING_SEED: Final = 1000
"""The first seed of a published table; smaller ones are for tuning."""
_BASE: Final = 40.0
_HEADS_OF_A_LAYER: Final = 12
Truth = Literal["failing", "healthy"]
Random = np.random.Generator


@dataclass(slots=True, kw_only=True)
class Course:
    """The samples of one run: arrays [T, N] for N heads, and [T] for values of the whole run."""

    step: npt.NDArray[np.int64]
    offset: Floats
    score: Floats
    bias: Floats
    rate: Floats | None
    rows: Floats
    """rows that each sample counts per head"""
    since: int = 0
    """the step before the first step that the first sample covers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of runs, as described in synthetic.toml."""

    name: str
    kind: str
    given: dict[str, Any]
    runs: int = 10
    tuned: bool = True
    """whether its runs were inspected while the detection rule was chosen"""
    stride: int = 1
    """Steps between samples, as in the agent; every step is sampled while the detectors need closer samples."""

    @property
    def truth(self) -> Truth:
        """`failing` if head 0 fails."""
        return "failing" if self.kind in ("exploding", "drifting") else "healthy"

    def make(self, rng: Random) -> Course:
        """Generate one run."""
        return _KINDS[self.kind](rng, **self.given)


@dataclass(slots=True, kw_only=True)
class Row:
    """Results for the runs of one family; a lead is the steps from the warning to a largest |score| of 512."""

    family: str
    truth: Truth
    tuned: bool
    runs: int
    warned: int = 0
    """failing: runs with a warning before 512; healthy: runs with any warning"""
    as_rounding: int = 0
    """those of these runs whose warning gave the cause rounding"""
    median_lead: float | None = None
    least_lead: float | None = None
    false_heads: int = 0
    """heads with a warning that do not fail"""


def play(
    course: Course, until: int | None = None, stride: int = 1, close_steps: int = AgentConfig.close_watch_steps
) -> Iterator[tuple[Detectors, list[Verdict]]]:
    """Feed a run to new detectors, and yield them with their verdicts after each sample.

    close_steps: steps after a warning or an undecided drift in which every step is sampled.
    """
    count = course.offset.shape[1]
    detectors = Detectors([(index // _HEADS_OF_A_LAYER, index % _HEADS_OF_A_LAYER) for index in range(count)])
    zeros, plain, before, close_until = np.zeros(count), np.zeros(count, dtype=np.int32), course.since, -1
    for place, step in enumerate(course.step[:until].tolist()):
        if step % stride and step > close_until:
            continue
        readings = Readings(
            step=step,
            since_step=min(before, step - 1),
            rows=np.full(count, course.rows[place]),
            score_offset=course.offset[place],
            largest_score=course.score[place],
            delta_bias_sum=course.bias[place],
            nonfinite_rows=zeros,
            modes=plain,
            loss=3.0,
            grad_norm=1.0,
            learning_rate=None if course.rate is None else float(course.rate[place]),
        )
        reported = detectors.update(readings)
        yield detectors, reported
        if stride > 1 and (detectors.undecided or any(verdict.state == "raised" for verdict in reported)):
            close_until = step + close_steps
        before = step


def score_family(family: Family, first_seed: int = SCORING_SEED, runs: int | None = None) -> Row:
    """Score `runs` runs of a family, with seeds from `first_seed`.

    In a failing run, head 0 fails, and the run ends 3,500 steps after the score of head 0 reaches 512.
    """
    row = Row(family=family.name, truth=family.truth, tuned=family.tuned, runs=runs or family.runs)
    failing, leads = family.truth == "failing", list[int]()
    for seed in range(first_seed, first_seed + row.runs):
        course, end = family.make(np.random.default_rng([seed, len(family.name)])), None
        at = int(course.step[-1])
        if failing:
            dangerous = int((course.score[:, 0] >= DANGEROUS_SCORE).argmax())
            at = int(course.step[dangerous])
            after = np.flatnonzero(course.step[dangerous:] >= at + 3500)
            end = dangerous + int(after[0]) if len(after) else None
        raised, named = dict[Any, int](), dict[Any, int]()
        for each in (verdict for _, reported in play(course, end, family.stride) for verdict in reported):
            if each.severity != "info" and each.state == "raised":
                raised.setdefault((each.layer, each.head), each.step)
            if each.severity != "info" and each.state != "cleared" and each.cause == "rounding":
                named.setdefault((each.layer, each.head), each.step)
        others = raised.keys() - ({(0, 0)} if failing else set())
        row.false_heads += len(others)
        if failing:
            leads.append(at - raised.get((0, 0), at))
            row.warned += leads[-1] > 0
            row.as_rounding += named.get((0, 0), at) < at
        else:
            row.warned += bool(others)
            row.as_rounding += bool(others & named.keys())
    if leads:
        row.median_lead, row.least_lead = float(np.median(leads)), float(min(leads))
    return row


_RATES: Final[dict[str, Callable[[Floats, float], Any]]] = {
    "constant": lambda at, end: 1.0,
    "cosine": lambda at, end: 0.1 + 0.45 * (1 + np.cos(np.pi * at / end)),
    "rises": lambda at, end: at / end,
    "rises by a trifle": lambda at, end: 1.0 + 1e-9 * np.arange(len(at)),
    "long warm-up": lambda at, end: np.minimum(at / 10_000.0, 1.0),
    "restart": lambda at, end: 1.0 + np.clip((at - 8000) / 3000.0, 0.0, 1.0),
}
"""Learning rate as a fraction of 1e-3, in addition to a linear warm-up over 500 steps."""


def _blank(
    rng: Random,
    steps: npt.NDArray[np.int64],
    *,
    heads: int,
    push: float = 0.0,
    rate: str = "constant",
) -> Course:
    """Generate heads with noise but without drift; `push` is the mean delta bias of every head in a block."""
    count, since = len(steps), int(2 * steps[0] - steps[1])
    every = np.diff(steps, prepend=since).clip(1)[:, None] / 100  # in blocks
    offset = rng.uniform(0.0, 2.0, heads) + 0.15 * rng.standard_normal((count, heads))
    bias = push * every + np.sqrt(every) * rng.standard_normal((count, heads))
    at = steps.astype(np.float64)
    rates = None if rate == "none" else 1e-3 * np.minimum(at / 500.0, 1.0) * _RATES[rate](at, at[-1])
    course = Course(
        step=steps, offset=offset, score=offset, bias=bias, rate=rates, rows=4096.0 * every[:, 0], since=since
    )
    return _scored(rng, course)


def _scored(rng: Random, course: Course, base: Floats | float = _BASE) -> Course:
    """Return the run with largest scores computed from its offsets."""
    tremble = 4.0 * np.abs(rng.standard_normal(course.offset.shape))
    return replace(course, score=base + np.abs(course.offset) + tremble)


_COURSES: Final[dict[str, Callable[[Floats, float], Floats]]] = {
    "doubles": lambda age, every: 0.5 * (2.0 ** np.minimum(age / every, 40.0) - 1.0),
    "line": lambda age, each: each * age,
    "square": lambda age, reached: 512 * (age / reached) ** 2,
}
"""Offset of a failing head as a function of the steps since its onset."""


def _drifting(
    rng: Random,
    course: tuple[str, float] = ("doubles", 1000.0),
    *,
    onset: int = 2000,
    last: int = 14_000,
    every: int = 100,
    heads: int = 144,
    rate: str = "constant",
    before: float = 0.0,
    push: float = 0.65,
    returns: bool = False,
    change: Sequence[Any] = (),
) -> Course:
    """Generate a run whose head 0 drifts, with a push, from step `onset`; `change` names a modification from _CHANGES.

    before: push of head 0 before `onset`. returns: the run repeatedly goes back 500 steps after every 1,500.
    """
    at = np.arange(every, last + 1, every)
    if returns:
        begins = range(0, last - 500, 1000)
        at = np.concatenate([np.arange(begin + 100, min(begin + 1500, last) + 1, 100) for begin in begins])
    run = _blank(rng, at, heads=heads, rate=rate)
    age = np.maximum(at - onset, 0).astype(np.float64)
    run.offset[:, 0] = 1.0 + _COURSES[course[0]](age, course[1]) + 0.15 * rng.standard_normal(len(at))
    blocks = np.diff(at, prepend=run.since).clip(1) / 100
    run.bias[:, 0] += blocks * np.where(at <= onset, before, push)
    run = _scored(rng, run)
    return _CHANGES[change[0]](run, rng, *change[1:]) if change else run


def _spike(run: Course, rng: Random, size: float, step: int) -> Course:
    run.bias[np.searchsorted(run.step, step)] += size * rng.choice([-1.0, 1.0], run.bias.shape[1])
    return run


def _batches_grow(run: Course, rng: Random, factor: float, after: int) -> Course:
    times = np.where(run.step > after, factor, 1.0)
    return replace(run, bias=run.bias * np.sqrt(times)[:, None], rows=run.rows * times)


def _unknown(run: Course, rng: Random) -> Course:
    run.offset[::3, 0] = np.nan
    return run


def _alike(run: Course, rng: Random) -> Course:
    """Copy head 0 to every head, bit for bit."""
    offset, score, bias = (np.repeat(each[:, :1], each.shape[1], axis=1) for each in (run.offset, run.score, run.bias))
    return replace(run, offset=offset, score=score, bias=bias)


_CHANGES: Final[dict[str, Callable[..., Course]]] = {
    "spike": _spike,
    "batches grow": _batches_grow,
    "gradients fall": lambda run, rng: replace(run, bias=run.bias * (1 + 29 * np.exp(-run.step / 600.0))[:, None]),
    "unknown": _unknown,
    "alike": _alike,
}
"""Modifications of a run whose head 0 drifts."""


def _exploding(rng: Random, begin: int, set_back: bool = False) -> Course:
    """Generate a run whose largest score doubles every 100 steps with a constant offset.

    Growth starts when the agent starts at step `begin`, or with `set_back` 100 steps after the run went back by 500.
    """
    after = np.arange(10, 6001, 10)
    at = np.concatenate([np.arange(10, 10_001, 10), 9500 + after]) if set_back else begin + after
    run = _blank(rng, at, heads=16)
    run.since = 0 if set_back else begin
    tail = slice(-len(after), None)
    run.score[tail, 0] = np.minimum(_BASE * 2.0 ** (np.maximum(after - 100.0 * set_back, 0.0) / 100.0), 1e9)
    return run


def _settling(
    rng: Random,
    shape: str,
    *,
    push: float = 0.0,
    rate: str = "constant",
    heads: int = 144,
    every: int = 100,
    steps: int = 20_000,
    since: int = 0,
    **given: float,
) -> Course:
    """Generate a healthy run: all offsets follow a harmless `shape`, and `push` does not change them."""
    at = since + np.arange(every, steps + 1, every)
    run = _blank(rng, at, heads=heads, push=push, rate=rate)
    course = _SHAPES[shape](rng, at[:, None].astype(np.float64), heads, **given)
    offset = course + 0.15 * rng.standard_normal((len(at), heads))
    return _scored(rng, replace(run, offset=offset), rng.uniform(10, 90, heads))


def _plateau(rng: Random, at: Floats, heads: int) -> Floats:
    tau = np.exp(rng.uniform(math.log(300), math.log(4000), heads))
    return np.asarray(rng.uniform(3, 60, heads) * (1 - np.exp(-at / tau)))


def _rising(rng: Random, at: Floats, heads: int) -> Floats:
    """Rise early from a few nats to 15 to 40 within 300 to 2,000 steps, then stay there."""
    low, high = rng.uniform(1, 6, heads), rng.uniform(15, 40, heads)
    length = np.exp(rng.uniform(math.log(300), math.log(2000), heads))
    gone = (at - rng.uniform(300, 5000, heads)) / length
    return np.asarray(low + (high - low) / (1 + np.exp(np.minimum(4 - 8 * gone, 50.0))))


def _jumping(rng: Random, at: Floats, heads: int) -> Floats:
    offset = np.zeros_like(at) + rng.uniform(1, 20, heads)
    for _ in range(3):
        here = (rng.random(heads) < 0.67) * rng.uniform(2, 20, heads) * rng.choice([-1, 1], heads)
        offset = offset + here * (at >= rng.uniform(0.1, 0.95, heads) * at[-1])
    return np.asarray(offset)


def _periodic(rng: Random, at: Floats, heads: int, square: bool) -> Floats:
    level = rng.uniform(3, 40, heads)
    swing = np.minimum(rng.uniform(1, 10, heads), level - 1)
    period = np.exp(rng.uniform(math.log(1000), math.log(20_000), heads))
    wave = np.sin(2 * np.pi * (at / period + rng.random(heads)))
    return np.asarray(level + swing * (np.sign(wave) if square else wave))


def _bursts(rng: Random, at: Floats, heads: int) -> Floats:
    offset = np.zeros_like(at) + rng.uniform(2, 20, heads)
    for _ in range(3):
        begin, length = rng.uniform(0.05, 0.95, heads) * at[-1], rng.uniform(50, 600, heads)
        within = (at >= begin) & (at < begin + length)
        offset = offset + within * np.abs(rng.standard_normal(offset.shape)) * rng.uniform(5, 30, heads)
    return np.asarray(offset)


def _wandering(rng: Random, at: Floats, heads: int, least: float, most: float, shortest: float) -> Floats:
    """Vary around 5 to 50 nats as an Ornstein-Uhlenbeck process.

    Its standard deviation is `least` to `most` nats, its time constant `shortest` to 8,000 steps.
    """
    tau = np.exp(rng.uniform(math.log(shortest), math.log(8000), heads))
    level, deviation = rng.uniform(5, 50, heads), rng.uniform(least, most, heads)
    decay, now = np.exp(-(at[1] - at[0]) / tau), deviation * rng.standard_normal(heads)
    offset = np.empty((len(at), heads))
    for place in range(len(at)):
        now = decay * now + np.sqrt(1 - decay * decay) * deviation * rng.standard_normal(heads)
        offset[place] = now
    return np.asarray(np.maximum(level + offset, 0.0) * (1 - np.exp(-at / 800.0)))


def _changed(rng: Random, at: Floats, heads: int) -> Floats:
    """Move every head to another level within a few hundred steps half-way, as a change of data or context does."""
    half = at[len(at) // 2]
    moved = 1 - np.exp(-np.maximum(at - half, 0) / rng.uniform(200, 1000, heads))
    return np.asarray(_plateau(rng, at, heads) + moved * rng.normal(0, 4, heads))


_SHAPES: Final[dict[str, Callable[..., Any]]] = {
    "flat": lambda rng, at, heads: np.zeros_like(at) + rng.uniform(0, 5, heads),
    "plateau": _plateau,
    "line": lambda rng, at, heads: (
        rng.uniform(3, 60, heads) * np.minimum(at / (rng.uniform(0.05, 0.7, heads) * at[-1]), 1)
    ),
    "rises": _rising,
    "jumps": _jumping,
    "periodic": _periodic,
    "logarithm": lambda rng, at, heads: rng.uniform(1, 8, heads) * np.log1p(at / 300),
    "root": lambda rng, at, heads: rng.uniform(0.02, 0.2, heads) * np.sqrt(at),
    "bursts": _bursts,
    "wander": _wandering,
    "changed": _changed,
}
"""Functions that return the offsets [T, N] of N heads at the steps [T, 1]."""


def _sharpening(rng: Random, peak: float) -> Course:
    """Generate a run whose scores spread to at most about `peak` and stay there, while offsets do not move."""
    at = np.arange(100, 20_001, 100)
    run = _blank(rng, at, heads=144)
    tau = np.exp(rng.uniform(math.log(300), math.log(4000), 144))
    level = rng.uniform(0.1, 1.0, 144) * peak
    score = level * (1 - np.exp(-at[:, None] / tau)) * np.exp(0.05 * rng.standard_normal(run.score.shape))
    return replace(run, score=score)


_KINDS: Final[dict[str, Callable[..., Course]]] = {
    "exploding": _exploding,
    "drifting": _drifting,
    "settling": _settling,
    "sharpening": _sharpening,
}


def _read_families(text: str) -> Iterator[Family]:
    for kind, written in tomllib.loads(text).items():
        for given in written:
            own = {name: given.pop(name) for name in ("name", "runs", "tuned", "stride") if name in given}
            yield Family(kind=kind, given=given, **own)


FAMILIES: Final = tuple(_read_families(Path(__file__).with_suffix(".toml").read_text()))


def supported_by_noise(heads: int, runs: int, blocks: int = 1000, first_seed: int = SCORING_SEED) -> Row:
    """Count runs of pure noise in which the delta bias of any head supports its drift at any block.

    Every head drifts in a random direction, too slowly for a warning based on scores.
    """
    hits = 0
    for seed in range(first_seed, first_seed + runs):
        rng = np.random.default_rng([seed, heads, blocks])
        at = 100 * np.arange(1, blocks + 1)
        run = _blank(rng, at, heads=heads)
        offset = rng.choice([-1.0, 1.0], heads) * (at[:, None] / 1000.0 + 3.0)
        hits += any(detectors.supported.any() for detectors, _ in play(_scored(rng, replace(run, offset=offset))))
    name = f"noise that supports a drift at any look, {heads} heads that all drift"
    return Row(family=name, truth="healthy", tuned=True, runs=runs, warned=hits, as_rounding=hits)


def score_synthetic(families: Sequence[Family] = FAMILIES, runs: int | None = None) -> Iterator[Row]:
    """Score every family, then noise; `runs` is the largest number of runs per family."""
    for family in families:
        yield score_family(family, runs=runs and min(runs, family.runs))
    yield supported_by_noise(144, runs or 200)
