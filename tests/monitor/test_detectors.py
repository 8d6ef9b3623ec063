"""The detectors on made-up heads whose fate is known."""

import copy
import math
from typing import Any

import numpy as np
import pytest
from tests.monitor.courses import (
    EVERY,
    HEADS,
    HOWEVER_FAR,
    SICK,
    Course,
    N,
    creep,
    explosion,
    healthy,
    line,
    noise,
    play,
    raised,
    reading,
)

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import Detectors


@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_healthy_heads_that_grow_fast_and_then_settle_are_never_warned_about_whatever_their_delta_bias(
    bias: float,
) -> None:
    detectors, told = play(until=20_000, bias=bias)
    assert told == []
    assert detectors.active == []
    assert detectors.risk.max() < 1.0


@pytest.mark.parametrize("course", [line, explosion])
def test_the_drifting_head_alone_is_warned_about_with_rounding_as_the_cause(course: Course) -> None:
    _, told = play(course, bias=0.6)
    assert raised(told) == [HEADS[SICK]]
    first = told[0]
    assert first.step <= 5000
    assert first.cause == "rounding"
    assert first.signal == "offset"
    assert first.evidence["bias_evidence"] >= 1
    assert "Layer 0 head 2" in first.sentence


def test_the_largest_score_reaches_512_after_the_earliest_step_and_about_when_the_forecast_says() -> None:
    _, told = play(explosion, until=5500, bias=0.6)
    truth = 2000 + 800 * math.log2((512 - 9) / 1.25 / 0.5)
    for verdict in told:
        assert verdict.forecast_steps is not None
        assert verdict.forecast_low_steps is not None
        assert verdict.forecast_low_steps <= truth - verdict.step
        # heads that compound mostly come sooner than their course, which this one follows to the end
        assert verdict.forecast_steps == pytest.approx(0.6 * (truth - verdict.step), rel=0.35)


@pytest.mark.parametrize("bias", [-0.6, 0.0])
def test_a_drift_that_no_delta_bias_supports_is_called_consistent_with_rounding_and_no_more(bias: float) -> None:
    _, supported = play(explosion, until=6000, bias=0.6)
    _, told = play(explosion, until=9700, bias=bias)  # 512 is reached at 9750
    assert raised(supported) == raised(told) == [HEADS[SICK]]
    assert supported[0].step < told[0].step
    assert (told[0].signal, {verdict.cause for verdict in told}) == ("offset", {"score growth"})
    assert "consistent with rounding, which the delta bias does not show" in told[0].sentence
    assert {verdict.severity for verdict in told} == {"warning"}  # nothing says that harm comes of it
    past = play(explosion, until=10_500, bias=bias)[1]
    critical = [v for v in past if v.evidence["score"] >= 512]
    assert {v.severity for v in critical} == {"critical"}
    assert {v.evidence["critical_step"] for v in critical} == {critical[0].step}
    assert not any("critical_step" in v.evidence for v in told)
    assert play(creep, until=7000, bias=bias, detectors=Detectors(HEADS, HOWEVER_FAR))[1] == []


def test_a_drift_is_undecided_while_the_bets_on_its_direction_hold_their_capital_and_have_not_won_enough() -> None:
    detectors, undecided, supported = Detectors(HEADS), [], []
    for step in range(EVERY, 9001, EVERY):
        detectors.update(reading(step, explosion, bias=0.4))
        if detectors.undecided:
            undecided.append(step)
        if detectors.supported.any():
            supported.append(step)
    assert undecided
    assert supported
    assert max(undecided) < min(supported)
    unmeasured: dict[str, Any] = {"delta_bias_sum": np.full(N, np.nan)}
    for course, fields in ((explosion, {"bias": -0.6}), (healthy, {"bias": 0.6}), (explosion, unmeasured)):
        detectors = Detectors(HEADS)
        for step in range(EVERY, 9001, EVERY):
            detectors.update(reading(step, course, **fields))
            assert not detectors.undecided


@pytest.mark.parametrize(("began", "pace", "warned"), [(300.0, 0.02, False), (420.0, 0.02, True), (60.0, 0.3, True)])
def test_a_head_that_sharpens_is_warned_about_when_its_score_is_dangerous_or_about_to_be(
    began: float, pace: float, warned: bool
) -> None:
    def sharpens(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        score[SICK] = began + pace * step + noise(step)[SICK]
        return offset, score

    _, told = play(sharpens, until=7000)
    assert raised(told) == ([HEADS[SICK]] if warned else [])
    assert all((verdict.cause, verdict.signal) == ("score growth", "score") for verdict in told)
    assert all(verdict.evidence["score"] >= 256 for verdict in told)


def test_a_large_score_that_falls_is_no_warning() -> None:
    def falls(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        score[SICK] = 700.0 - 0.1 * step
        return offset, score

    detectors, told = play(falls, until=EVERY)
    assert raised(told) == [HEADS[SICK]]  # nothing is known of its past yet
    assert {verdict.state for verdict in play(falls, 6000, detectors, EVERY)[1]} == {"updated", "cleared"}


def test_a_run_set_back_keeps_what_it_knows_of_the_steps_before_and_its_verdicts() -> None:
    detectors, told = play(line, until=5000, bias=0.6)
    assert raised(told)
    assert detectors.update(reading(4050, line, bias=0.6)) == []
    assert [(v.layer, v.head) for v in detectors.active] == [HEADS[SICK]]
    play(line, 5000, detectors, 4050, bias=0.6)
    straight, _ = play(line, until=5000, bias=0.6)
    np.testing.assert_allclose(detectors.warning_ratios, straight.warning_ratios, rtol=0.2, atol=0.05)
    later = play(line, 10_000, detectors, 5000, bias=0.6)[1]
    assert later, "it is updated once the new past is long enough"
    assert all(verdict.evidence and "nan" not in verdict.sentence for verdict in later)


def test_an_infinite_score_beside_a_finite_offset_is_not_finite_at_once_whatever_else_the_head_does() -> None:
    played, _ = play(line, until=5000, bias=0.6)
    closed = set()
    for step in range(5050, 5050 + 2 * played.config.block_steps, EVERY):  # one of these samples closes a block
        detectors = copy.deepcopy(played)
        score = line(step)[1]
        score[SICK] = math.inf
        of_run, of_head, *_ = detectors.update(reading(step, line, bias=0.6, largest_score=score))
        assert (of_run.layer, of_run.signal, of_head.signal) == (None, "nonfinite", "nonfinite")
        assert (of_head.layer, of_head.head) == HEADS[SICK]
        closed.add(detectors.run.past.blocks[-1].end > played.run.past.blocks[-1].end)
        played.update(reading(step, line, bias=0.6))
    assert closed == {True, False}


def test_the_step_of_an_overflow_that_has_ended_is_not_suspected_of_a_later_break() -> None:
    detectors, _ = play(until=3000)
    for step in range(3001, 3004):
        detectors.update(reading(step, since_step=step - 1, grad_norm=math.inf))
    late = 3003 + 2 * detectors.config.overflow_steps
    play(since=3003, until=late, detectors=detectors)
    told = detectors.update(reading(late + EVERY, loss=math.nan, suspect_step=late + 7))
    assert [verdict.evidence["suspect_step"] for verdict in told] == [late + 7]


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.ROW_CORRECTED])
def test_a_jump_of_the_scores_is_growth_whatever_its_mode(mode: Mode) -> None:
    def jumped(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        if step > 4300:
            offset[9], score[9] = offset[9] - 12.0, score[9] * 16.0
        return offset, score

    assert raised(play(jumped, until=7000, mode=mode)[1]) == [HEADS[9]]


def fast(step: int) -> tuple[Floats, Floats]:
    """Healthy heads do in 150 steps what takes others 900; one head doubles every 100 steps from step 500 on."""
    offset, score = healthy(step * 6)
    drift = 0.3 * 2 ** (max(0, step - 500) / 100)
    offset[SICK], score[SICK] = drift + 0.02 * noise(step)[SICK], 9 + 1.25 * drift
    return offset, score


def test_a_failure_within_1500_steps_is_warned_about_in_the_first_half_of_its_life() -> None:
    detectors, told = Detectors(HEADS), []
    for step in range(10, 1500, 10):
        told += detectors.update(reading(step, fast, since_step=step - 10, bias=0.6, learning_rate=1e-3))
    dangerous = 500 + 100 * math.log2((512 - 9) / 1.25 / 0.3)
    assert raised(told) == [HEADS[SICK]]
    assert told[0].step <= dangerous - 400
    assert told[0].cause == "rounding"


ARRAYS = ("score_offset", "largest_score", "delta_bias_sum", "rows", "nonfinite_rows")


@pytest.mark.parametrize("fields", [*((field,) for field in ARRAYS), ARRAYS], ids="-".join)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_field_that_was_not_recorded_silences_its_signal_and_nothing_else(
    fields: tuple[str, ...], value: float
) -> None:
    unknown: dict[str, Any] = dict.fromkeys(fields, np.full(N, value))
    detectors, told = play(creep, until=5000, bias=0.6, detectors=Detectors(HEADS, HOWEVER_FAR), **unknown)
    assert np.isfinite(detectors.risk).all()
    if fields in (("largest_score",), ("nonfinite_rows",)):
        assert raised(told) == [HEADS[SICK]]
    elif fields == ("delta_bias_sum",) or (fields != ("rows",) and math.isnan(value)):
        assert told == []
    if fields == ARRAYS and math.isnan(value):
        assert not detectors.risk.any()


@pytest.mark.parametrize(("apart", "unknown"), [(0.0, N), (0.02, N), (0.02, 0)])
def test_heads_of_a_layer_that_drift_together_by_their_bias_are_all_warned_about(apart: float, unknown: int) -> None:
    """Also where they are equal to the last bit, and next to one that nothing is known of."""

    def together(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        offset[:4], score[:4] = offset[SICK] * (1.0 + apart * np.array([0.0, -1.0, 1.0, -0.5])), score[SICK]
        offset[unknown : unknown + 1] = score[unknown : unknown + 1] = np.nan
        return offset, score

    _, told = play(together, until=7000, delta_bias_sum=np.where(np.arange(N) < 4, 1e-4, 0.0))
    assert set(raised(told)) == set(HEADS[:4]) - {HEADS[row] for row in range(N) if row == unknown}


@pytest.mark.parametrize(
    ("rows", "loss", "severity"), [(3, 2.0, "warning"), (3, None, "critical"), (0, math.nan, "critical")]
)
def test_what_is_not_finite_is_reported_by_the_first_sample_and_is_critical_unless_loss_and_norm_are_finite(
    rows: int, loss: Any, severity: str
) -> None:
    _, told = play(until=EVERY, nonfinite_rows=np.where(np.arange(N) == SICK, rows, 0.0), loss=loss)
    assert [(v.severity, v.signal, v.layer, v.cause) for v in told] == [(severity, "nonfinite", None, "other")]
    assert (f"1 of {N} heads have such rows" in told[0].sentence) == (rows > 0)


def test_a_run_that_stays_broken_is_told_to_go_back_to_before_it_broke_and_not_to_before_the_latest_word() -> None:
    detectors, _ = play(until=3000)
    rows = np.zeros(N)
    rows[SICK] = 3
    broken: dict[str, Any] = {"loss": math.nan, "nonfinite_rows": rows}
    told = detectors.update(reading(3050, suspect_step=3017, **broken))
    for step in range(3100, 6000, EVERY):
        told += detectors.update(reading(step, suspect_step=step - EVERY, **broken))
    assert len(told) > 2  # reported again after `update_steps`
    assert {verdict.evidence["suspect_step"] for verdict in told} == {3017}
    at_once = play(until=0)[0].update(reading(1, since_step=0, loss=math.nan, suspect_step=1))
    assert at_once[0].evidence["suspect_step"] == 1
    assert "The first step of this process was broken already" in at_once[0].sentence


def test_where_no_single_step_is_known_the_last_sample_that_was_whole_is_the_newest_to_go_back_to() -> None:
    detectors, _ = play(until=3000)
    told = detectors.update(reading(3050, loss=math.nan))
    assert [verdict.evidence["suspect_step"] for verdict in told] == [3000]
    sound = detectors.update(reading(3100))
    assert sound == []
    detectors.update(reading(3150, nonfinite_rows=np.full(N, 2.0), grad_norm=math.nan, loss=None))
    assert detectors.run.non_finite.suspect_step == 3100


@pytest.mark.parametrize(("norm", "every", "lost"), [(math.inf, 1, 51), (None, 1, 51), (math.inf, 2, 26)])
def test_gradients_that_overflow_beside_a_finite_loss_are_what_a_gradscaler_skips_until_they_last(
    norm: float | None, every: int, lost: int
) -> None:
    """Sound steps between them do not end an overflow."""
    detectors, told = Detectors(HEADS), []
    for step in range(1, detectors.config.overflow_steps + 2):
        broken: dict[str, Any] = {"nonfinite_rows": np.full(N, 7.0), "grad_norm": norm}
        if step % every != 1 % every:
            broken.clear()
        told += detectors.update(reading(step, since_step=step - 1, **broken))
    assert {(v.step, v.severity) for v in told} == {(detectors.config.overflow_steps + 1, "warning")}
    assert f"{lost} of 51 updates were lost" in told[0].sentence
    assert told[0].evidence["suspect_step"] == 1, "of the first of them"


def test_what_a_gradscaler_loses_while_it_searches_for_its_scale_does_not_count_later() -> None:
    detectors, told = Detectors(HEADS), []
    for step in range(1, 101):
        norm = math.inf if step <= 20 or step == 65 else 1.0
        told += detectors.update(reading(step, since_step=step - 1, grad_norm=norm))
    assert told == []


def test_updates_that_are_lost_between_samples_are_counted() -> None:
    detectors, told = Detectors(HEADS), []
    for step in range(10, 61, 10):
        told += detectors.update(reading(step, since_step=step - 10, grad_norm=math.inf, lost_steps=10))
    assert [verdict.step for verdict in told] == [60]
    assert told[0].sentence.startswith("60 of 60 updates were lost")


def test_a_first_sample_that_is_broken_suspects_the_first_step_and_not_what_its_losses_show() -> None:
    [told] = Detectors(HEADS).update(reading(EVERY, loss=math.nan, suspect_step=17))
    assert told.evidence["suspect_step"] == 1


def test_how_many_heads_are_not_finite_is_the_most_of_any_sample() -> None:
    detectors = Detectors(HEADS)
    told = detectors.update(reading(EVERY, nonfinite_rows=np.where(np.arange(N) < 3, 1.0, 0.0)))
    told += detectors.update(reading(2 * EVERY, loss=math.nan, nonfinite_rows=np.where(np.arange(N) < 1, 1.0, 0.0)))
    assert [f"3 of {N} heads have such rows." in verdict.sentence for verdict in told] == [True, True]


def test_a_gradient_norm_that_is_not_finite_is_critical_at_once_if_no_loss_was_given() -> None:
    [told] = Detectors(HEADS).update(reading(EVERY, loss=None, grad_norm=math.nan))
    assert told.severity == "critical"


def test_the_loss_after_an_overflow_tells_whether_it_was_skipped() -> None:
    for loss, alarmed in ((2.0, False), (math.nan, True)):
        detectors = Detectors(HEADS)
        assert not detectors.update(reading(EVERY, grad_norm=math.nan, nonfinite_rows=np.full(N, 7.0)))
        assert bool(detectors.update(reading(2 * EVERY, loss=loss, grad_norm=1.0))) == alarmed


def test_a_sample_raises_sixteen_warnings_at_most_and_no_risk_passes_one() -> None:
    detectors, nothing, raised_by = Detectors([(0, head) for head in range(20)]), np.zeros(20), []
    many: dict[str, Any] = dict.fromkeys(("score_offset", "delta_bias_sum", "nonfinite_rows"), nothing)
    many |= {"rows": nothing + 1e5, "largest_score": nothing + 2000.0, "modes": nothing.astype(np.int32)}
    for step in (EVERY, 2 * EVERY):
        raised_by.append(len(raised(detectors.update(reading(step, **many)))))
        assert detectors.risk.max() == 1.0
    assert raised_by == [16, 4]
