"""Laws of the detectors over courses of many kinds: what is unknown, set back, resumed, slow, early, late or turned."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.courses import EVERY, HEADS, SICK, Course, N, creep, explosion, healthy, line, play, raised, reading

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.scoring.synthetic import FAMILIES, Family, score_family
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.growth import BLOCKS_PER_PAST, HeadSignal
from foreshock.monitor.detect.readings import Readings

KINDS = ("line", "step", "settles", "swings", "doubles")


def drift(kind: str, step: int, since: int, size: float) -> float:
    """Nats that one head has moved by at a step."""
    late = max(0, step - since)
    return {
        "line": size * late / 1000,
        "step": size * (late > 0),
        "settles": size * (1 - math.exp(-late / 800)),
        "swings": size * math.sin(late / 500),
        "doubles": size * (2 ** min(late / 900, 12.0) - 1),
    }[kind]


def course_of(kind: str, since: int, size: float) -> Course:
    """Healthy heads, and one that moves, its largest score with it."""

    def told(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        moved = drift(kind, step, since, size)
        offset[SICK] = 0.3 + moved + 0.05 * math.sin(step)
        score[SICK] += abs(moved)
        return offset, score

    return told


@st.composite
def runs(draw: st.DrawFn) -> list[Readings]:
    """Some 90 samples of one run: NaN in any field of any head for a while, a run set back, a rate that rises."""
    course = course_of(draw(st.sampled_from(KINDS)), draw(st.integers(0, 3000)), draw(st.floats(-30.0, 30.0)))
    bias, warmup = draw(st.floats(-1.0, 1.0)), draw(st.sampled_from([1, 900]))
    steps = list(range(EVERY, 91 * EVERY, EVERY))
    back = draw(st.sampled_from([0, 0, 10, 40]))
    steps += list(range(steps[-1] - back * EVERY, steps[-1] + 10 * EVERY, EVERY)) if back else []
    told = [reading(step, course, bias=bias, learning_rate=1e-3 * min(1.0, step / warmup)) for step in steps]
    gap = st.tuples(st.sampled_from(ARRAYS), st.integers(0, N), st.integers(0, 80), st.integers(1, 30))
    for field, row, begin, length in draw(st.lists(gap, max_size=4)):
        for place in range(begin, min(begin + length, len(told))):
            values = np.array(getattr(told[place], field))
            values[row if row < N else slice(None)] = np.nan
            changed: dict[str, Any] = {field: values}
            told[place] = dataclasses.replace(told[place], **changed)
    return told


ARRAYS = ("score_offset", "largest_score", "delta_bias_sum")


@settings(max_examples=12, deadline=None)
@given(run=runs(), cut=st.integers(1, 89))
def test_a_run_of_any_course_that_is_resumed_at_any_sample_says_what_it_would_have_said(
    run: list[Readings], cut: int
) -> None:
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
def test_an_offset_that_is_unknown_hushes_no_score_and_where_it_is_unknown_for_a_while_others_go_on_as_before(
    seed: int, unknown: list[tuple[int, int]]
) -> None:
    random = np.random.default_rng(seed)
    course = course_of(str(random.choice(KINDS)), int(random.integers(0, 3000)), float(random.uniform(-30, 30)))
    config = DetectorConfig(horizon_windows=None)  # a forecast joins offset and score
    known, gaps, never = Detectors(HEADS, config), Detectors(HEADS, config), Detectors(HEADS, config)
    for place in range(90):
        seen = reading((place + 1) * EVERY, course)
        offset = np.array(seen.score_offset)
        offset[[row for at, row in unknown if at == place]] = np.nan
        known.update(seen)
        gaps.update(dataclasses.replace(seen, score_offset=offset))
        never.update(dataclasses.replace(seen, score_offset=np.full(N, np.nan)))
        whole = np.setdiff1d(np.arange(N), [row for _, row in unknown])
        np.testing.assert_array_equal(gaps.warning_ratios[:, whole], known.warning_ratios[:, whole])
        assert (never.warning_ratios[HeadSignal.SCORE] > 0).any() == (known.warning_ratios[HeadSignal.SCORE] > 0).any()


@pytest.mark.parametrize("since", [6_000, 40_000])
def test_a_run_that_is_watched_from_its_middle_on_is_judged_as_soon_whatever_its_constant_learning_rate(
    since: int,
) -> None:
    def later(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        for values, failing in zip((offset, score), explosion(max(0, step - since)), strict=True):
            values[SICK] = failing[SICK]
        return offset, score

    until = since + 7000
    told = play(later, until, since=since, bias=0.6)[1]
    assert raised(told) == [HEADS[SICK]]
    rated = play(later, until, since=since, bias=0.6, learning_rate=3e-4)[1]
    assert [(each.step, each.cause, each.state) for each in rated] == [
        (each.step, each.cause, each.state) for each in told
    ]
    from_zero = play(later, until, bias=0.6)[1]
    assert abs(told[0].step - from_zero[0].step) <= 300


@pytest.mark.parametrize(("part", "late"), [(0.25, 100), (0.5, 300), (0.75, 900)])
def test_an_agent_that_is_attached_on_the_way_to_a_warning_warns_about_as_soon_as_one_that_was_there_before(
    part: float, late: int
) -> None:
    [first] = [each for each in play(explosion, 7000, bias=0.6)[1] if each.state == "raised"]
    since = int(part * first.step) // EVERY * EVERY
    [warned] = [each for each in play(explosion, 9000, since=since, bias=0.6)[1] if each.state == "raised"]
    assert (warned.layer, warned.head, warned.cause) == (first.layer, first.head, first.cause)
    assert warned.step - first.step <= late


def test_a_run_set_back_after_its_warm_up_does_not_wait_for_it_again() -> None:
    def replayed(**fields: Any) -> list[int]:
        detectors, told = play(creep, 4000, bias=0.6, **fields)
        assert told == []
        again = play(explosion, 9000, detectors, 3000, bias=0.6, **fields)[1]
        return [verdict.step for verdict in again if verdict.state == "raised"]

    assert replayed(learning_rate=3e-4) == replayed() != []


def now(step: int, every: int, offset: Floats, score: Floats, bias: float, **fields: Any) -> Readings:
    return reading(step, lambda _: (offset, score), bias=bias, since_step=step - every, **fields)


@pytest.mark.parametrize("bias", [0.6, 0.0], ids=["supported", "not supported"])
@pytest.mark.parametrize("length", [10_000, 20_000, 50_000, 100_000])
@pytest.mark.parametrize("kind", ["evenly", "by doublings"])
def test_no_head_reaches_512_without_a_word_however_slowly_it_goes_there(length: int, kind: str, bias: float) -> None:
    detectors, told = Detectors(HEADS), []
    every = length // 200
    for step in range(every, length, every):
        offset, score = healthy(step)
        far = DANGEROUS_SCORE * (step / length if kind == "evenly" else 2 ** (9.0 * (step / length - 1)))
        offset[SICK], score[SICK] = far + offset[SICK] - 1.0, score[SICK] + far
        told += detectors.update(now(step, every, offset, score, bias))
        if raised(told):
            break
    assert raised(told) == [HEADS[SICK]]
    assert told[0].step <= length - 1000


@pytest.mark.parametrize("doubling", [700, 7_000])
def test_heads_that_pass_512_together_fast_or_slowly_are_warned_about(doubling: int) -> None:
    detectors, told = Detectors(HEADS), []
    every = doubling // 14
    until = 3000 + 5 * doubling
    for step in range(every, until, every):
        offset, score = healthy(step)
        score = score * 2 ** (max(0, step - 3000) / doubling)
        told += detectors.update(now(step, every, offset, score, 0.0))
        assert not told or score.max() > DANGEROUS_SCORE / 2
    assert raised(told)
    assert {verdict.cause for verdict in told} == {"score growth"}


def test_first_warnings_of_drifts_of_many_paces_do_not_gather_where_the_run_is_said_to_have_settled() -> None:
    firsts = []
    for rate in np.geomspace(27.0, 100.0, 40).tolist():
        told = play(course_of("line", 0, rate), 6000, bias=3.0)[1]
        firsts.append(told[0].step)
    settled = DetectorConfig().settle_steps
    just_after = [step for step in firsts if settled <= step <= settled + 400]
    assert len(just_after) <= len(firsts) / 5
    assert firsts == sorted(firsts, reverse=True)  # the faster the sooner


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda age: 0.1 + 0.45 * (1 + math.cos(math.pi * age)),
    "line": lambda age: 1.0 - age,
    "inverse square root": lambda age: min(1.0, (0.025 / age) ** 0.5),
    "constant": lambda age: 1.0,
}


def under(schedule: str, pace: float, steps: int, *, told: bool) -> tuple[int | None, int | None]:
    """Steps at which a head that compounds as its learning rate lets it is warned about, and reaches 512; None: never.

    pace: doublings in a thousand steps of the full rate.
    """
    detectors, drifted, warned = Detectors(HEADS), 0.35, None
    for step in range(EVERY, steps + 1, EVERY):
        rate = SCHEDULES[schedule](step / steps)
        drifted *= 2 ** (pace * rate * EVERY / 1000)
        offset, score = healthy(step)
        offset[SICK], score[SICK] = drifted + 0.02 * math.sin(step), 9 + 1.25 * drifted
        verdicts = detectors.update(now(step, EVERY, offset, score, 0.6, learning_rate=rate if told else None))
        warned = step if warned is None and raised(verdicts) else warned
        if score[SICK] >= DANGEROUS_SCORE:
            return warned, step
    return warned, None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pace", [1.8, 2.6])
def test_a_head_that_reaches_512_under_a_falling_rate_is_warned_about_as_soon_or_in_the_first_third_of_its_life(
    schedule: str, pace: float
) -> None:
    warned, dangerous = under(schedule, pace, 20_000, told=True)
    unaware, _ = under(schedule, pace, 20_000, told=False)
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
def test_a_block_without_bias_says_the_same_however_many_samples_it_is_made_of(
    kind: str, since: int, size: float, every: int
) -> None:
    """A sample holds the rows of all steps since the one before; a recording holds a block's samples as one.

    A bias is bet on once for ten samples at most, so that more samples decide sooner.
    """
    course = course_of(kind, since, size)
    often, seldom = Detectors(HEADS), Detectors(HEADS)
    told: list[wire.Verdict] = []
    said: list[wire.Verdict] = []
    waiting: list[Readings] = []
    for step in range(every, 5001, every):
        waiting.append(dataclasses.replace(reading(step, course, bias=0.0), since_step=step - every))
        told += often.update(waiting[-1])
        first = waiting[0].since_step
        if step - first < min(DetectorConfig().block_steps, step / BLOCKS_PER_PAST):
            continue
        together: dict[str, Any] = {
            "score_offset": np.mean([each.score_offset for each in waiting], axis=0),
            "largest_score": np.max([each.largest_score for each in waiting], axis=0),
            "delta_bias_sum": np.sum([each.delta_bias_sum for each in waiting], axis=0),
            "rows": np.sum([each.rows for each in waiting], axis=0),
        }
        said += seldom.update(dataclasses.replace(waiting[-1], since_step=first, **together))
        waiting.clear()
        np.testing.assert_allclose(often.warning_ratios, seldom.warning_ratios, rtol=1e-6, atol=1e-9)
    # A warning is cleared, and told again, by the sample that comes first when its time is over.
    assert _first(told) == _first(said)


def _first(told: list[wire.Verdict]) -> dict[tuple[int | None, int | None], tuple[str, int, str, str]]:
    """The first warning about each head."""
    found: dict[tuple[int | None, int | None], tuple[str, int, str, str]] = {}
    for each in told:
        found.setdefault((each.layer, each.head), (each.id, each.step, each.cause, each.severity))
    return found


@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(N)))
def test_the_order_of_the_heads_does_not_matter(order: list[int]) -> None:
    def shuffled(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset[order], score[order]

    straight, expected = play(explosion, until=4500, delta_bias_sum=np.zeros(N))
    turned, told = play(
        shuffled, until=4500, delta_bias_sum=np.zeros(N), detectors=Detectors([HEADS[i] for i in order])
    )
    assert told == expected
    np.testing.assert_allclose(turned.risk, straight.risk[order], rtol=1e-12)


@settings(max_examples=4, deadline=None)
@given(exponent=st.integers(-20, 20))
def test_the_unit_of_the_delta_bias_does_not_matter(exponent: int) -> None:
    scale = 2.0**exponent
    expected: list[wire.Verdict] = []
    told: list[wire.Verdict] = []
    straight, scaled = Detectors(HEADS), Detectors(HEADS)
    for step in range(EVERY, 4501, EVERY):
        sample = reading(step, line, bias=0.6)
        expected += straight.update(sample)
        told += scaled.update(reading(step, line, delta_bias_sum=sample.delta_bias_sum * scale))
    assert raised(expected)
    assert told == expected


def test_the_length_of_a_sample_moves_a_warning_by_little() -> None:
    first = []
    for every in (10, 50, 90):
        detectors = Detectors(HEADS)
        samples = (reading(step, line, since_step=step - every, bias=4.0) for step in range(every, 6000, every))
        first.append(next(verdict.step for seen in samples for verdict in detectors.update(seen)))
    assert max(first) - min(first) <= 600


@settings(max_examples=4, deadline=None)
@given(course=st.sampled_from([healthy, line, explosion]), shift=st.integers(1, 90))
def test_a_mirrored_run_of_layers_numbered_otherwise_is_judged_alike(course: Course, shift: int) -> None:
    def mirrored(step: int) -> tuple[Floats, Floats]:
        offset, score = course(step)
        return -offset, score

    _, expected = play(course, until=5000, bias=0.6)
    moved = Detectors([(layer + shift, head) for layer, head in HEADS])
    told: list[wire.Verdict] = []
    for step in range(EVERY, 5001, EVERY):
        straight = reading(step, course, bias=0.6)
        told += moved.update(reading(step, mirrored, delta_bias_sum=-straight.delta_bias_sum))
    assert [(v.step, v.state, v.layer, v.head, v.cause, v.signal, v.forecast_steps) for v in told] == [
        (v.step, v.state, (v.layer or 0) + shift, v.head, v.cause, v.signal, v.forecast_steps) for v in expected
    ]


NAMED = {family.name: family for family in FAMILIES}


def families(*beginnings: str) -> list[Family]:
    found = [family for name, family in NAMED.items() if name.startswith(beginnings)]
    assert len(found) >= len(beginnings)
    return found


@pytest.mark.parametrize("family", families("score doubles"), ids=lambda family: family.name)
def test_an_explosion_is_reported_by_the_block_that_shows_it_wherever_the_agent_begins(family: Family) -> None:
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
def test_a_drift_that_rounding_pushes_is_named_long_before_512(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2
    assert row.median_lead is not None
    assert row.median_lead >= 3000


@pytest.mark.full
def test_a_drift_that_begins_at_step_500_000_is_named_as_one_that_begins_at_2_000() -> None:
    [late] = families("doubles each 1,000 steps from 500,000")
    row = score_family(late, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2


@pytest.mark.parametrize(
    "family",
    families("plateau, push 0.1", "data or context change, 144", "scores spread"),
    ids=lambda family: family.name,
)
def test_heads_that_settle_are_never_warned_about(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=2)
    assert row.false_heads == 0
    assert row.runs == 2
