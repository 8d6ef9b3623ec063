"""Properties of the detectors on many kinds of growth: gaps, rewinds, resumes, slow and late drifts, permuted heads."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.synthetic_heads import (
    FAILING,
    HEADS,
    INTERVAL,
    Course,
    N,
    explosion,
    healthy,
    linear_drift,
    play,
    raised,
    reading,
    slow_drift,
)

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.scoring.synthetic import FAMILIES, Family, score_family
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.growth import BLOCKS_PER_PAST, HeadSignal
from foreshock.monitor.detect.readings import Readings

KINDS = ("line", "step", "settles", "swings", "doubles")


def drift(kind: str, step: int, since: int, size: float) -> float:
    """Offset change of one head at a step, in nats."""
    elapsed = max(0, step - since)
    return {
        "line": size * elapsed / 1000,
        "step": size * (elapsed > 0),
        "settles": size * (1 - math.exp(-elapsed / 800)),
        "swings": size * math.sin(elapsed / 500),
        "doubles": size * (2 ** min(elapsed / 900, 12.0) - 1),
    }[kind]


def course_of(kind: str, since: int, size: float) -> Course:
    """Healthy heads, and one whose offset and largest score move together."""

    def course(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        moved = drift(kind, step, since, size)
        offset[FAILING] = 0.3 + moved + 0.05 * math.sin(step)
        score[FAILING] += abs(moved)
        return offset, score

    return course


@st.composite
def runs(draw: st.DrawFn) -> list[Readings]:
    """About 90 samples of one run, with gaps (NaN) in some fields and heads, a rewind, or a learning-rate warm-up."""
    course = course_of(draw(st.sampled_from(KINDS)), draw(st.integers(0, 3000)), draw(st.floats(-30.0, 30.0)))
    bias, warmup = draw(st.floats(-1.0, 1.0)), draw(st.sampled_from([1, 900]))
    steps = list(range(INTERVAL, 91 * INTERVAL, INTERVAL))
    back = draw(st.sampled_from([0, 0, 10, 40]))
    steps += list(range(steps[-1] - back * INTERVAL, steps[-1] + 10 * INTERVAL, INTERVAL)) if back else []
    samples = [reading(step, course, bias=bias, learning_rate=1e-3 * min(1.0, step / warmup)) for step in steps]
    gap = st.tuples(st.sampled_from(ARRAYS), st.integers(0, N), st.integers(0, 80), st.integers(1, 30))
    for field, row, begin, length in draw(st.lists(gap, max_size=4)):
        for place in range(begin, min(begin + length, len(samples))):
            values = np.array(getattr(samples[place], field))
            values[row if row < N else slice(None)] = np.nan
            changed: dict[str, Any] = {field: values}
            samples[place] = dataclasses.replace(samples[place], **changed)
    return samples


ARRAYS = ("score_offset", "largest_score", "delta_bias_sum")


@settings(max_examples=12, deadline=None)
@given(run=runs(), cut=st.integers(1, 89))
def test_resumed_detectors_return_the_same_verdicts_as_uninterrupted_ones(run: list[Readings], cut: int) -> None:
    whole, first, second = Detectors(HEADS), Detectors(HEADS), Detectors(HEADS)
    uncut = [whole.update(seen) for seen in run]
    parts = [first.update(seen) for seen in run[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    parts += [second.update(seen) for seen in run[cut:]]
    assert parts == uncut
    np.testing.assert_array_equal(second.warning_ratios, whole.warning_ratios)
    assert np.isfinite(whole.risk).all()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), unknown=st.lists(st.tuples(st.integers(0, 89), st.integers(0, N - 1)), max_size=60))
def test_unknown_offset_affects_neither_scores_nor_other_heads(seed: int, unknown: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(seed)
    course = course_of(str(random.choice(KINDS)), int(random.integers(0, 3000)), float(random.uniform(-30, 30)))
    config = DetectorConfig(horizon_windows=None)  # the forecast combines offset and score
    known, gaps, never = Detectors(HEADS, config), Detectors(HEADS, config), Detectors(HEADS, config)
    for place in range(90):
        seen = reading((place + 1) * INTERVAL, course)
        offset = np.array(seen.score_offset)
        offset[[row for at, row in unknown if at == place]] = np.nan
        known.update(seen)
        gaps.update(dataclasses.replace(seen, score_offset=offset))
        never.update(dataclasses.replace(seen, score_offset=np.full(N, np.nan)))
        whole = np.setdiff1d(np.arange(N), [row for _, row in unknown])
        np.testing.assert_array_equal(gaps.warning_ratios[:, whole], known.warning_ratios[:, whole])
        assert (never.warning_ratios[HeadSignal.SCORE] > 0).any() == (known.warning_ratios[HeadSignal.SCORE] > 0).any()


@pytest.mark.parametrize("since", [6_000, 40_000])
def test_run_watched_from_its_middle_warns_within_300_steps_of_one_watched_from_zero(
    since: int,
) -> None:
    def later(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        for values, failing in zip((offset, score), explosion(max(0, step - since)), strict=True):
            values[FAILING] = failing[FAILING]
        return offset, score

    until = since + 7000
    verdicts = play(later, until, since=since, bias=0.6)[1]
    assert raised(verdicts) == [HEADS[FAILING]]
    rated = play(later, until, since=since, bias=0.6, learning_rate=3e-4)[1]
    assert [(each.step, each.cause, each.state) for each in rated] == [
        (each.step, each.cause, each.state) for each in verdicts
    ]
    from_zero = play(later, until, bias=0.6)[1]
    assert abs(verdicts[0].step - from_zero[0].step) <= 300


@pytest.mark.parametrize(("part", "delay"), [(0.25, 100), (0.5, 300), (0.75, 900)])
def test_agent_attached_during_a_drift_warns_with_a_bounded_delay(part: float, delay: int) -> None:
    [first] = [each for each in play(explosion, 7000, bias=0.6)[1] if each.state == "raised"]
    since = int(part * first.step) // INTERVAL * INTERVAL
    [warned] = [each for each in play(explosion, 9000, since=since, bias=0.6)[1] if each.state == "raised"]
    assert (warned.layer, warned.head, warned.cause) == (first.layer, first.head, first.cause)
    assert warned.step - first.step <= delay


def test_rewound_run_warns_at_the_same_step_with_and_without_a_learning_rate() -> None:
    def replayed(**fields: Any) -> list[int]:
        detectors, verdicts = play(slow_drift, 4000, bias=0.6, **fields)
        assert verdicts == []
        again = play(explosion, 9000, detectors, 3000, bias=0.6, **fields)[1]
        return [verdict.step for verdict in again if verdict.state == "raised"]

    assert replayed(learning_rate=3e-4) == replayed() != []


def reading_at(step: int, every: int, offset: Floats, score: Floats, bias: float, **fields: Any) -> Readings:
    return reading(step, lambda _: (offset, score), bias=bias, since_step=step - every, **fields)


@pytest.mark.parametrize("bias", [0.6, 0.0], ids=["supported", "not supported"])
@pytest.mark.parametrize("length", [10_000, 20_000, 50_000, 100_000])
@pytest.mark.parametrize("kind", ["evenly", "by doublings"])
def test_slow_growth_to_512_warns_at_least_1000_steps_before(length: int, kind: str, bias: float) -> None:
    detectors, verdicts = Detectors(HEADS), []
    every = length // 200
    for step in range(every, length, every):
        offset, score = healthy(step)
        far = DANGEROUS_SCORE * (step / length if kind == "evenly" else 2 ** (9.0 * (step / length - 1)))
        offset[FAILING], score[FAILING] = far + offset[FAILING] - 1.0, score[FAILING] + far
        verdicts += detectors.update(reading_at(step, every, offset, score, bias))
        if raised(verdicts):
            break
    assert raised(verdicts) == [HEADS[FAILING]]
    assert verdicts[0].step <= length - 1000


@pytest.mark.parametrize("doubling", [700, 7_000])
def test_heads_that_pass_512_together_warn_at_any_speed(doubling: int) -> None:
    detectors, verdicts = Detectors(HEADS), []
    every = doubling // 14
    until = 3000 + 5 * doubling
    for step in range(every, until, every):
        offset, score = healthy(step)
        score = score * 2 ** (max(0, step - 3000) / doubling)
        verdicts += detectors.update(reading_at(step, every, offset, score, 0.0))
        assert not verdicts or score.max() > DANGEROUS_SCORE / 2
    assert raised(verdicts)
    assert {verdict.cause for verdict in verdicts} == {"score growth"}


def test_first_warnings_do_not_cluster_at_the_end_of_the_settling_period() -> None:
    firsts = []
    for rate in np.geomspace(27.0, 100.0, 40).tolist():
        verdicts = play(course_of("line", 0, rate), 6000, bias=3.0)[1]
        firsts.append(verdicts[0].step)
    settled = DetectorConfig().settle_steps
    just_after = [step for step in firsts if settled <= step <= settled + 400]
    assert len(just_after) <= len(firsts) / 5
    assert firsts == sorted(firsts, reverse=True)  # faster drifts warn sooner


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda age: 0.1 + 0.45 * (1 + math.cos(math.pi * age)),
    "line": lambda age: 1.0 - age,
    "inverse square root": lambda age: min(1.0, (0.025 / age) ** 0.5),
    "constant": lambda age: 1.0,
}


def steps_of_warning_and_harm(
    schedule: str, doublings: float, steps: int, *, rate_known: bool
) -> tuple[int | None, int | None]:
    """The steps (None: never) at which a head warns and reaches 512 if it grows in proportion to the learning rate.

    doublings: per thousand steps at the full learning rate. rate_known: whether the detectors get the learning rate.
    """
    detectors, drifted, warned = Detectors(HEADS), 0.35, None
    for step in range(INTERVAL, steps + 1, INTERVAL):
        rate = SCHEDULES[schedule](step / steps)
        drifted *= 2 ** (doublings * rate * INTERVAL / 1000)
        offset, score = healthy(step)
        offset[FAILING], score[FAILING] = drifted + 0.02 * math.sin(step), 9 + 1.25 * drifted
        verdicts = detectors.update(
            reading_at(step, INTERVAL, offset, score, 0.6, learning_rate=rate if rate_known else None)
        )
        warned = step if warned is None and raised(verdicts) else warned
        if score[FAILING] >= DANGEROUS_SCORE:
            return warned, step
    return warned, None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("doublings", [1.8, 2.6])
def test_known_learning_rate_schedule_delays_warnings_by_at_most_300_steps(schedule: str, doublings: float) -> None:
    warned, dangerous = steps_of_warning_and_harm(schedule, doublings, 20_000, rate_known=True)
    unaware, _ = steps_of_warning_and_harm(schedule, doublings, 20_000, rate_known=False)
    assert warned is not None
    assert unaware is not None
    assert dangerous is not None
    assert warned <= max(unaware + 300, dangerous / 3)


@pytest.mark.full
@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    since=st.integers(0, 3000),
    size=st.floats(-30.0, 30.0),
    every=st.sampled_from([2, 5, 10, 25]),
)
def test_blocks_without_delta_bias_are_judged_alike_for_any_sample_count(
    kind: str, since: int, size: float, every: int
) -> None:
    """A sample merges the rows of all steps since the previous sample; a recording merges a block into one sample.

    Without a delta bias, because its test uses at most ten samples per bet, so more samples would decide sooner.
    """
    course = course_of(kind, since, size)
    often, seldom = Detectors(HEADS), Detectors(HEADS)
    verdicts: list[wire.Verdict] = []
    seldom_verdicts: list[wire.Verdict] = []
    waiting: list[Readings] = []
    for step in range(every, 5001, every):
        waiting.append(dataclasses.replace(reading(step, course, bias=0.0), since_step=step - every))
        verdicts += often.update(waiting[-1])
        first = waiting[0].since_step
        if step - first < min(DetectorConfig().block_steps, step / BLOCKS_PER_PAST):
            continue
        together: dict[str, Any] = {
            "score_offset": np.mean([each.score_offset for each in waiting], axis=0),
            "largest_score": np.max([each.largest_score for each in waiting], axis=0),
            "delta_bias_sum": np.sum([each.delta_bias_sum for each in waiting], axis=0),
            "rows": np.sum([each.rows for each in waiting], axis=0),
        }
        seldom_verdicts += seldom.update(dataclasses.replace(waiting[-1], since_step=first, **together))
        waiting.clear()
        np.testing.assert_allclose(often.warning_ratios, seldom.warning_ratios, rtol=1e-6, atol=1e-9)
    # Clears and updates may differ: the first sample after their due step sends them.
    assert _first(verdicts) == _first(seldom_verdicts)


def _first(verdicts: list[wire.Verdict]) -> dict[tuple[int | None, int | None], tuple[str, int, str, str]]:
    """The first verdict of each head."""
    found: dict[tuple[int | None, int | None], tuple[str, int, str, str]] = {}
    for each in verdicts:
        found.setdefault((each.layer, each.head), (each.id, each.step, each.cause, each.severity))
    return found


@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(N)))
def test_order_of_the_heads_does_not_change_verdicts(order: list[int]) -> None:
    def shuffled(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset[order], score[order]

    straight, expected = play(explosion, until=4500, delta_bias_sum=np.zeros(N))
    turned, verdicts = play(
        shuffled, until=4500, delta_bias_sum=np.zeros(N), detectors=Detectors([HEADS[i] for i in order])
    )
    assert verdicts == expected
    np.testing.assert_allclose(turned.risk, straight.risk[order], rtol=1e-12)


@settings(max_examples=4, deadline=None)
@given(exponent=st.integers(-20, 20))
def test_unit_of_the_delta_bias_does_not_change_verdicts(exponent: int) -> None:
    scale = 2.0**exponent
    expected: list[wire.Verdict] = []
    verdicts: list[wire.Verdict] = []
    straight, scaled = Detectors(HEADS), Detectors(HEADS)
    for step in range(INTERVAL, 4501, INTERVAL):
        sample = reading(step, linear_drift, bias=0.6)
        expected += straight.update(sample)
        verdicts += scaled.update(reading(step, linear_drift, delta_bias_sum=sample.delta_bias_sum * scale))
    assert raised(expected)
    assert verdicts == expected


def test_sampling_interval_moves_a_warning_by_at_most_600_steps() -> None:
    first = []
    for every in (10, 50, 90):
        detectors = Detectors(HEADS)
        samples = (reading(step, linear_drift, since_step=step - every, bias=4.0) for step in range(every, 6000, every))
        first.append(next(verdict.step for seen in samples for verdict in detectors.update(seen)))
    assert max(first) - min(first) <= 600


@settings(max_examples=4, deadline=None)
@given(course=st.sampled_from([healthy, linear_drift, explosion]), shift=st.integers(1, 90))
def test_negated_offsets_and_shifted_layer_numbers_give_the_same_verdicts(course: Course, shift: int) -> None:
    def mirrored(step: int) -> tuple[Floats, Floats]:
        offset, score = course(step)
        return -offset, score

    _, expected = play(course, until=5000, bias=0.6)
    moved = Detectors([(layer + shift, head) for layer, head in HEADS])
    verdicts: list[wire.Verdict] = []
    for step in range(INTERVAL, 5001, INTERVAL):
        straight = reading(step, course, bias=0.6)
        verdicts += moved.update(reading(step, mirrored, delta_bias_sum=-straight.delta_bias_sum))
    assert [(v.step, v.state, v.layer, v.head, v.cause, v.signal, v.forecast_steps) for v in verdicts] == [
        (v.step, v.state, (v.layer or 0) + shift, v.head, v.cause, v.signal, v.forecast_steps) for v in expected
    ]


NAMED = {family.name: family for family in FAMILIES}


def families(*beginnings: str) -> list[Family]:
    found = [family for name, family in NAMED.items() if name.startswith(beginnings)]
    assert len(found) >= len(beginnings)
    return found


@pytest.mark.parametrize("family", families("score doubles"), ids=lambda family: family.name)
def test_explosion_warns_at_most_150_steps_late_wherever_the_agent_starts(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=1)
    assert row.least_lead is not None
    assert row.least_lead >= -150


@pytest.mark.parametrize(
    "family",
    families(
        *(
            "doubles each 1,000 steps from 2,000",
            "returns by",
            "one spike of 30",
            "gradients fall",
            "a sample each 500",
        ),
        *("learning rate: rises", "offset unknown"),
    ),
    ids=lambda family: family.name,
)
def test_rounding_drift_is_identified_3000_steps_before_512(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2
    assert row.median_lead is not None
    assert row.median_lead >= 3000


@pytest.mark.full
def test_rounding_drift_that_starts_at_step_500_000_is_identified() -> None:
    [family] = families("doubles each 1,000 steps from 500,000")
    row = score_family(family, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2


@pytest.mark.parametrize(
    "family",
    families("plateau, push 0.1", "data or context change, 144", "scores spread"),
    ids=lambda family: family.name,
)
def test_settling_heads_never_warn(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=2)
    assert row.false_heads == 0
    assert row.runs == 2
