"""Synthetic runs with a label: what the detectors say of long, late, resumed and unusual runs.

Nothing here was trained. A run is a made-up course of offset, largest score and delta bias of every head, and reaches
the detectors as any sample does. The noise of a block of 100 steps is 1, so a push of 0.65 is what a sample of rows
shows of a failing head, and one of 0.15 what it shows of a healthy head late in a long run.

Rules were tuned on seeds below 1000 and on families that say so; tables are made of seeds from 1000 on.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from foreshock.contract.slots import Floats
from foreshock.contract.wire import Verdict
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.readings import Readings

SCORING_SEED: Final = 1000
"""The first seed of a published table; smaller ones are for tuning."""
_PUSH: Final = 0.65
_IN_ONE_OF_TEN: Final = math.sqrt(10.0)
"""A push that one step in ten shows in a block is as much larger in all of its steps."""
_BASE: Final = 40.0
_HEADS_OF_A_LAYER: Final = 12
Truth = Literal["failing", "healthy"]
Shape = Callable[[np.random.Generator, Floats, int], Floats]
"""Offsets [T, N] of so many heads at some steps [T, 1]."""


@dataclass(slots=True, kw_only=True)
class Course:
    """What the samples of one run show; arrays [T, N], and [T] where a value is of the whole run."""

    step: npt.NDArray[np.int64]
    offset: Floats
    score: Floats
    bias: Floats
    rate: Floats | None
    rows: Floats
    """of a head in each sample"""
    since: int = 0
    """where the first sample begins"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Runs of one kind. `make` gives the course of a run from its generator."""

    name: str
    truth: Truth
    make: Callable[[np.random.Generator], Course]
    runs: int = 10
    tuned: bool = True
    """whether its runs were looked at while the rule was chosen"""
    stride: int = 1
    """A course of every step is sampled as the agent does: one step in so many, and every one where that decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run; leads count to a largest |score| of 512 and are negative after it."""

    lead: int | None
    """of the first warning about the head that fails"""
    rounding_lead: int | None
    """of the first that names rounding"""
    heads_warned: int
    """other heads where one fails"""
    rounding_heads: int
    heads_of_stretches: tuple[int, ...] = ()
    """heads warned about in each sixth of the run"""


@dataclass(slots=True, kw_only=True)
class Row:
    """The outcomes of a family."""

    family: str
    truth: Truth
    tuned: bool
    runs: int
    warned: int
    """failing: runs that were warned about before 512; healthy: runs with a warning"""
    as_rounding: int
    """of these runs, as rounding"""
    median_lead: float | None = None
    least_lead: float | None = None
    false_heads: int = 0
    """heads warned about that do not fail"""
    most_in_a_stretch: int = 0
    """of all runs together, in the worst sixth of their length"""
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    """one for each run"""


def play(
    course: Course, until: int | None = None, stride: int = 1, close_steps: int = AgentConfig.close_watch_steps
) -> Iterator[tuple[Detectors, list[Verdict]]]:
    """Feed a run to fresh detectors, sample by sample. close_steps: every step is sampled so long after a warning or an
    undecided drift."""
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


def outcome(course: Course, truth: Truth, stride: int = 1) -> Outcome:
    """Play one run. Of a failing run head 0 fails, and the run ends 3,500 steps after its score of 512."""
    dangerous = np.flatnonzero(course.score[:, 0] >= DANGEROUS_SCORE) if truth == "failing" else np.zeros(0, dtype=int)
    end = None
    if len(dangerous):
        after = course.step[dangerous[0] :] >= course.step[dangerous[0]] + 3500
        end = int(dangerous[0] + after.argmax()) if after.any() else None
    reported = [
        verdict for _, verdicts in play(course, end, stride) for verdict in verdicts if verdict.severity != "info"
    ]
    raised = [verdict for verdict in reported if verdict.state == "raised"]
    at = int(course.step[dangerous[0]]) if len(dangerous) else None

    def lead(of: Sequence[Verdict]) -> int | None:
        own = [each.step for each in of if (each.layer, each.head) == (0, 0)]
        return None if at is None or not own else at - own[0]

    rounding = [each for each in reported if each.cause == "rounding" and each.state != "cleared"]
    others = {(each.layer, each.head) for each in raised if truth == "healthy" or (each.layer, each.head) != (0, 0)}
    named = {(each.layer, each.head) for each in rounding} & others
    sixth = max(int(course.step[-1] - course.since), 1) / 6
    stretches = [{(e.layer, e.head) for e in raised if (e.step - course.since - 1) // sixth == k} for k in range(6)]
    return Outcome(
        lead=lead(raised),
        rounding_lead=lead(rounding),
        heads_warned=len(others),
        rounding_heads=len(named),
        heads_of_stretches=tuple(map(len, stretches)),
    )


def score_family(family: Family, first_seed: int = SCORING_SEED, runs: int | None = None) -> Row:
    """Play the runs of a family, those with the seeds from `first_seed` on."""
    found = [
        outcome(family.make(np.random.default_rng([seed, len(family.name)])), family.truth, family.stride)
        for seed in range(first_seed, first_seed + (runs or family.runs))
    ]
    row = Row(family=family.name, truth=family.truth, tuned=family.tuned, runs=len(found), warned=0, as_rounding=0)
    row.outcomes, row.false_heads = found, sum(each.heads_warned for each in found)
    if family.truth == "failing":
        leads, rounding = (
            [x or 0 for x in each] for each in zip(*((o.lead, o.rounding_lead) for o in found), strict=True)
        )
        row.warned, row.as_rounding = sum(x > 0 for x in leads), sum(x > 0 for x in rounding)
        row.median_lead, row.least_lead = float(np.median(leads)), float(min(leads))
    else:
        row.warned = sum(each.heads_warned > 0 for each in found)
        row.as_rounding = sum(each.rounding_heads > 0 for each in found)
        row.most_in_a_stretch = max(map(sum, zip(*(each.heads_of_stretches for each in found), strict=True)))
    return row


def _blank(
    rng: np.random.Generator, steps: npt.NDArray[np.int64], *, heads: int, push: float = 0.0, rate: Any = "constant"
) -> Course:
    """Heads that do nothing but tremble, with a push away from zero of every head."""
    count, since = len(steps), int(2 * steps[0] - steps[1])
    every = np.diff(steps, prepend=since).clip(1)[:, None] / 100  # in blocks
    offset = rng.uniform(0.0, 2.0, heads) + 0.15 * rng.standard_normal((count, heads))
    bias = push * every + np.sqrt(every) * rng.standard_normal((count, heads))
    course = Course(
        step=steps, offset=offset, score=offset, bias=bias, rate=None, rows=4096.0 * every[:, 0], since=since
    )
    return _scored(rng, replace(course, rate=_rate(rate, steps)))


def _scored(rng: np.random.Generator, course: Course, base: Floats | float = _BASE) -> Course:
    """The same with the largest scores that follow from its offsets."""
    tremble = 4.0 * np.abs(rng.standard_normal(course.offset.shape))
    return replace(course, score=base + np.abs(course.offset) + tremble)


def _rate(kind: Any, steps: npt.NDArray[np.int64]) -> Floats | None:
    """A learning rate of 1e-3 after a warm-up of 500 steps, and what follows."""
    if kind is None or callable(kind):
        return None if kind is None else np.asarray(kind(steps), dtype=np.float64)
    top, end = 1e-3 * np.minimum(steps / 500.0, 1.0), steps[-1]
    shape = {
        "constant": np.ones(len(steps)),
        "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * steps / end)),
        "rises": steps / end,
        "rises by a trifle": 1.0 + 1e-9 * np.arange(len(steps)),
        "long warm-up": np.minimum(steps / 10_000.0, 1.0),
        "restart": np.where(steps < 8000, 1.0, 1.0 + np.clip((steps - 8000) / 3000.0, 0.0, 1.0)),
    }
    return np.asarray(top * shape[kind], dtype=np.float64)


def doubling(every: float) -> Callable[[Floats], Floats]:
    """An offset that doubles in so many steps."""
    return lambda age: 0.5 * (2.0 ** np.minimum(age / every, 40.0) - 1.0)


_EACH_THOUSAND: Final = doubling(1000.0)


def drifting(
    course: Callable[[Floats], Floats] = _EACH_THOUSAND,
    *,
    onset: int = 2000,
    last: int = 14_000,
    every: int = 100,
    heads: int = 144,
    rate: Any = "constant",
    before: float = 0.0,
    push: float = _PUSH,
    steps: npt.NDArray[np.int64] | None = None,
    change: Callable[[Course, np.random.Generator], Course] = lambda course, rng: course,
) -> Callable[[np.random.Generator], Course]:
    """Runs whose head 0 drifts from `onset` on, and is pushed from then on; `change` does the rest."""

    def make(rng: np.random.Generator) -> Course:
        at = np.arange(every, last + 1, every) if steps is None else steps
        run = _blank(rng, at, heads=heads, rate=rate)
        age = np.maximum(at - onset, 0).astype(np.float64)
        run.offset[:, 0] = 1.0 + course(age) + 0.15 * rng.standard_normal(len(at))
        blocks = np.diff(at, prepend=run.since).clip(1) / 100
        run.bias[:, 0] += blocks * np.where(at <= onset, before, push)
        return change(_scored(rng, run), rng)

    return make


def _spike(size: float, step: int) -> Callable[[Course, np.random.Generator], Course]:
    def change(run: Course, rng: np.random.Generator) -> Course:
        run.bias[np.searchsorted(run.step, step)] += size * rng.choice([-1.0, 1.0], run.bias.shape[1])
        return run

    return change


def _scaled(
    factor: Callable[[Floats], Floats], *, rows: bool = False
) -> Callable[[Course, np.random.Generator], Course]:
    """Delta bias in other units, as gradients fall, or with more rows, as batches grow."""

    def change(run: Course, rng: np.random.Generator) -> Course:
        times = factor(run.step.astype(np.float64))
        bias = run.bias * (np.sqrt(times) if rows else times)[:, None]
        return replace(run, bias=bias, rows=run.rows * times if rows else run.rows)

    return change


def _unknown(run: Course, rng: np.random.Generator) -> Course:
    run.offset[::3, 0] = np.nan
    return run


def _alike(run: Course, rng: np.random.Generator) -> Course:
    """Every head of the layer as head 0, to the bit."""
    offset, score = (np.repeat(part[:, :1], part.shape[1], axis=1) for part in (run.offset, run.score))
    return replace(run, offset=offset, score=score, bias=np.repeat(run.bias[:, :1], run.bias.shape[1], axis=1))


def _jumps_back(every: int, back: int, last: int) -> npt.NDArray[np.int64]:
    """The steps of a run that returns by `back` steps after `every` steps, again and again."""
    steps: list[int] = []
    reached = 0
    while reached < last:
        end = min(reached + every, last)
        steps += range(reached + 100, end + 1, 100)
        reached = end - back if end < last else end
    return np.array(steps, dtype=np.int64)


def exploding(begin: int, set_back: bool = False) -> Callable[[np.random.Generator], Course]:
    """The largest score doubles each 100 steps from where the agent begins, or after a return by 500 steps; the offset
    does not move."""

    def make(rng: np.random.Generator) -> Course:
        after = np.arange(10, 6001, 10)
        at = np.concatenate([np.arange(10, 10_001, 10), 9500 + after]) if set_back else begin + after
        run = _blank(rng, at, heads=16)
        run.since = 0 if set_back else begin
        tail = slice(-len(after), None)
        run.score[tail, 0] = np.minimum(_BASE * 2.0 ** (np.maximum(after - 100.0 * set_back, 0.0) / 100.0), 1e9)
        return run

    return make


def settling(
    course: Shape,
    *,
    push: float = 0.0,
    rate: str = "constant",
    heads: int = 144,
    every: int = 100,
    steps: int = 20_000,
    since: int = 0,
) -> Callable[[np.random.Generator], Course]:
    """Runs whose heads all follow a course that does no harm, under a push that does nothing."""

    def make(rng: np.random.Generator) -> Course:
        at = since + np.arange(every, steps + 1, every)
        run = _blank(rng, at, heads=heads, push=push, rate=rate)
        offset = course(rng, at[:, None].astype(np.float64), heads) + 0.15 * rng.standard_normal((len(at), heads))
        return _scored(rng, replace(run, offset=offset), rng.uniform(10, 90, heads))

    return make


def _plateau(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
    tau = np.exp(rng.uniform(math.log(300), math.log(4000), heads))
    return np.asarray(rng.uniform(3, 60, heads) * (1 - np.exp(-at / tau)))


def _linear(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
    return np.asarray(rng.uniform(3, 60, heads) * np.minimum(at / (rng.uniform(0.05, 0.7, heads) * at[-1]), 1))


def _jumping(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
    offset = np.zeros_like(at) + rng.uniform(1, 20, heads)
    for _ in range(3):
        here = (rng.random(heads) < 0.67) * rng.uniform(2, 20, heads) * rng.choice([-1, 1], heads)
        offset = offset + here * (at >= rng.uniform(0.1, 0.95, heads) * at[-1])
    return np.asarray(offset)


def _periodic(shape: Callable[[Floats], Floats]) -> Shape:
    def course(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
        level = rng.uniform(3, 40, heads)
        swing = np.minimum(rng.uniform(1, 10, heads), level - 1)
        period = np.exp(rng.uniform(math.log(1000), math.log(20_000), heads))
        return np.asarray(level + swing * shape(np.sin(2 * np.pi * (at / period + rng.random(heads)))))

    return course


def _bursts(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
    offset = np.zeros_like(at) + rng.uniform(2, 20, heads)
    for _ in range(3):
        begin, length = rng.uniform(0.05, 0.95, heads) * at[-1], rng.uniform(50, 600, heads)
        within = (at >= begin) & (at < begin + length)
        offset = offset + within * np.abs(rng.standard_normal(offset.shape)) * rng.uniform(5, 30, heads)
    return np.asarray(offset)


def _wandering(deviations: tuple[float, float], shortest: float) -> Shape:
    """Offsets of 5 to 50 nats that wander over `shortest` to 8,000 steps, as an Ornstein-Uhlenbeck process does."""

    def course(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
        tau = np.exp(rng.uniform(math.log(shortest), math.log(8000), heads))
        level, deviation = rng.uniform(5, 50, heads), rng.uniform(*deviations, heads)
        decay, now = np.exp(-(at[1] - at[0]) / tau), deviation * rng.standard_normal(heads)
        offset = np.empty((len(at), heads))
        for place in range(len(at)):
            now = decay * now + np.sqrt(1 - decay * decay) * deviation * rng.standard_normal(heads)
            offset[place] = now
        return np.asarray(np.maximum(level + offset, 0.0) * (1 - np.exp(-at / 800.0)))

    return course


def _changed(rng: np.random.Generator, at: Floats, heads: int) -> Floats:
    """Half-way the data or the context changes: every head goes to another level within some hundred steps."""
    half = at[len(at) // 2]
    moved = 1 - np.exp(-np.maximum(at - half, 0) / rng.uniform(200, 1000, heads))
    return np.asarray(_plateau(rng, at, heads) + moved * rng.normal(0, 4, heads))


def sharpening(peak: float) -> Callable[[np.random.Generator], Course]:
    """Heads whose scores spread to less than 512 and stay there; no offset moves."""

    def make(rng: np.random.Generator) -> Course:
        at = np.arange(100, 20_001, 100)
        run = _blank(rng, at, heads=144)
        tau = np.exp(rng.uniform(math.log(300), math.log(4000), 144))
        level = rng.uniform(0.1, 1.0, 144) * peak
        score = level * (1 - np.exp(-at[:, None] / tau)) * np.exp(0.05 * rng.standard_normal(run.score.shape))
        return replace(run, score=score)

    return make


def _fails(name: str, *, runs: int = 10, tuned: bool = True, stride: int = 1, **course: Any) -> Family:
    """Runs whose head 0 drifts as `drifting` says."""
    return Family(name=name, truth="failing", make=drifting(**course), runs=runs, tuned=tuned, stride=stride)


def _settles(name: str, course: Shape, *, runs: int = 10, tuned: bool = True, stride: int = 1, **rest: Any) -> Family:
    """Runs whose heads all follow a course that does no harm."""
    return Family(name=name, truth="healthy", make=settling(course, **rest), runs=runs, tuned=tuned, stride=stride)


_LATE: Final = ((2000, 14_000), (20_000, 32_000), (100_000, 112_000), (500_000, 512_000))
_HEALTHY: Final[dict[str, Shape]] = {
    "flat": lambda rng, at, heads: np.zeros_like(at) + rng.uniform(0, 5, heads),
    "plateau": _plateau,
    "linear, then settles": _linear,
    "jumps": _jumping,
    "periodic, sine": _periodic(lambda wave: wave),
    "periodic, square": _periodic(np.sign),
    "logarithm of the step": lambda rng, at, heads: rng.uniform(1, 8, heads) * np.log1p(at / 300),
    "square root of the step": lambda rng, at, heads: rng.uniform(0.02, 0.2, heads) * np.sqrt(at),
    "bursts of noise": _bursts,
    "wander of 1 to 4 nats": _wandering((1, 4), shortest=500),
}
FAMILIES: Final = (
    *(
        Family(name=f"score doubles each 100 steps, {name}", truth="failing", make=exploding(begin, set_back), runs=3)
        for begin, set_back, name in (
            *((begin, False, f"begun at {begin:,}") for begin in (0, 2000, 8000, 300_000)),
            (0, True, "set back"),
        )
    ),
    *(_fails(f"doubles each 1,000 steps from {onset:,}", onset=onset, last=last) for onset, last in _LATE),
    *(
        _fails(f"from {onset:,}, a push of -0.1 before", onset=onset, last=last, before=-0.1, tuned=False)
        for onset, last in _LATE[1:3]
    ),
    _fails("one spike of 30 deviations", change=_spike(30.0, 1500)),
    _fails("one spike of 100 deviations", change=_spike(100.0, 6000), tuned=False),
    _fails("gradients fall 30-fold", change=_scaled(lambda step: 1 + 29 * np.exp(-step / 600.0))),
    _fails("batches grow 16-fold at 4,000", change=_scaled(lambda step: np.where(step > 4000, 16.0, 1.0), rows=True)),
    _fails(
        "gradients of eight micro-batches", change=_scaled(lambda step: np.full(len(step), 8.0), rows=True), tuned=False
    ),
    *(
        _fails(f"learning rate: {kind}", rate=kind, tuned=kind != "rises")
        for kind in ("rises", "rises by a trifle", "restart", "cosine")
    ),
    _fails("learning rate not given", rate=None, tuned=False),
    _fails("warm-up of 10,000 steps, drift from 4,000", rate="long warm-up", onset=4000, last=16_000, tuned=False),
    *(_fails(f"a sample each {every:,} steps", every=every, tuned=every == 500) for every in (500, 1000)),
    _fails("a sample each 1 step", every=1, heads=24, runs=3, tuned=False),
    _fails("a sample each 10 steps", every=10, heads=24, runs=3, tuned=False),
    _fails("one head", heads=1),
    _fails("twelve heads equal to the bit", heads=12, change=_alike, tuned=False),
    _fails("80 x 64 heads", heads=5120, runs=3, tuned=False),
    _fails("offset unknown in one block of three", change=_unknown),
    _fails("returns by 500 steps each 1,500 without a state", steps=_jumps_back(1500, 500, 14_000), heads=12),
    _fails("5 nats in 1,000 steps", course=lambda age: 0.005 * age, last=100_000),
    _fails("30 nats in 1,000 steps", course=lambda age: 0.03 * age, last=20_000),
    _fails("square of the step", course=lambda age: 512 * (age / 1e4) ** 2, tuned=False),
    _fails("doubles each 300 steps from 5,000", course=doubling(300.0), onset=5000),
    *(
        _fails(
            f"doubles each {pace} steps from 5,000, closer samples decide",
            course=doubling(pace),
            onset=5000,
            last=10_000,
            every=1,
            heads=24,
            push=_IN_ONE_OF_TEN * _PUSH,
            tuned=False,
            stride=10,
        )
        for pace in (300, 500)
    ),
    _fails("no bias is measured", push=0.0),
    *(
        _settles(f"{name}, push {push:g}, {rate}", course, push=push, rate=rate, tuned=rate == "constant")
        for name, course in _HEALTHY.items()
        for push, rate in ((0.0, "constant"), (0.1, "constant"), (0.1, "cosine"))
    ),
    *(
        _settles(
            f"{name}, push {push:g}, closer samples decide",
            _HEALTHY[name],
            push=_IN_ONE_OF_TEN * push,
            heads=24,
            every=1,
            tuned=False,
            stride=10,
        )
        for name in ("plateau", "wander of 1 to 4 nats")
        for push in (0.0, 0.1)
    ),
    *(
        _settles(
            f"wander of 0.75 nats, push {push:g}, 300,000 steps",
            _wandering((0.75, 0.75), shortest=1000),
            push=push,
            heads=288,
            steps=300_000,
            runs=1,
        )
        for push in (0.0, 0.15)
    ),
    _settles(
        "wander of 1.5 nats, push 0.35, begun at 300,000",
        _wandering((1.5, 1.5), shortest=1000),
        push=0.35,
        since=300_000,
        tuned=False,
    ),
    *(
        _settles(
            f"data or context change, {heads} heads, a sample each {every}",
            _changed,
            heads=heads,
            every=every,
            push=0.1,
            tuned=heads == 144,
        )
        for heads, every in ((144, 100), (1, 10), (16, 1000))
    ),
    Family(name="scores spread to 300 and stay", truth="healthy", make=sharpening(300.0)),
)


def supported_by_noise(heads: int, runs: int, blocks: int = 1000, first_seed: int = SCORING_SEED) -> Row:
    """Runs of pure noise whose delta bias supports a drift at any block, where every head drifts in a random direction.

    The drift is slow enough to end in no warning by its scores.
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


def score_synthetic(
    families: Sequence[Family] = FAMILIES,
    *,
    report: Path | None = None,
    runs: int | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Score every family, and noise; `report` gets the rows as JSON. runs: of a family, at most."""
    rows = []
    for family in families:
        rows.append(score_family(family, runs=runs and min(runs, family.runs)))
        on_row(rows[-1])
    rows.append(supported_by_noise(144, runs or 200))
    on_row(rows[-1])
    if report is not None:
        report.write_bytes(to_json(rows, indent=1) + b"\n")
    return rows
