"""The detectors on synthetic heads whose outcome is known."""

import copy
import math
from typing import Any

import numpy as np
import pytest
from tests.monitor.synthetic_heads import (
    FAILING,
    HEADS,
    INTERVAL,
    NO_HORIZON,
    Course,
    N,
    explosion,
    healthy,
    linear_drift,
    noise,
    play,
    raised,
    reading,
    slow_drift,
)

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import Detectors


@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_healthy_heads_never_warn_with_or_without_delta_bias(
    bias: float,
) -> None:
    detectors, verdicts = play(until=20_000, bias=bias)
    assert verdicts == []
    assert detectors.active == []
    assert detectors.risk.max() < 1.0


@pytest.mark.parametrize("course", [linear_drift, explosion])
def test_only_the_drifting_head_warns_and_its_cause_is_rounding(course: Course) -> None:
    _, verdicts = play(course, bias=0.6)
    assert raised(verdicts) == [HEADS[FAILING]]
    first = verdicts[0]
    assert first.step <= 5000
    assert first.cause == "rounding"
    assert first.signal == "offset"
    assert first.evidence["bias_evidence"] >= 1
    assert "Layer 0 head 2" in first.sentence


def test_forecast_and_its_lower_bound_precede_the_step_that_reaches_512() -> None:
    _, verdicts = play(explosion, until=5500, bias=0.6)
    truth = 2000 + 800 * math.log2((512 - 9) / 1.25 / 0.5)
    for verdict in verdicts:
        assert verdict.forecast_steps is not None
        assert verdict.forecast_low_steps is not None
        assert verdict.forecast_low_steps <= truth - verdict.step
        # the forecast is early: exponential growth mostly accelerates, but this head keeps its rate
        assert verdict.forecast_steps == pytest.approx(0.6 * (truth - verdict.step), rel=0.35)


@pytest.mark.parametrize("bias", [-0.6, 0.0])
def test_drift_without_delta_bias_evidence_is_score_growth_and_warns_later(bias: float) -> None:
    _, supported = play(explosion, until=6000, bias=0.6)
    _, verdicts = play(explosion, until=9700, bias=bias)  # 512 is reached at 9750
    assert raised(supported) == raised(verdicts) == [HEADS[FAILING]]
    assert supported[0].step < verdicts[0].step
    assert (verdicts[0].signal, {verdict.cause for verdict in verdicts}) == ("offset", {"score growth"})
    assert "consistent with rounding, which the delta bias does not show" in verdicts[0].sentence
    assert {verdict.severity for verdict in verdicts} == {"warning"}  # without evidence of harm
    past = play(explosion, until=10_500, bias=bias)[1]
    critical = [v for v in past if v.evidence["score"] >= 512]
    assert {v.severity for v in critical} == {"critical"}
    assert {v.evidence["critical_step"] for v in critical} == {critical[0].step}
    assert not any("critical_step" in v.evidence for v in verdicts)
    assert play(slow_drift, until=7000, bias=bias, detectors=Detectors(HEADS, NO_HORIZON))[1] == []


def test_drift_is_undecided_only_until_its_delta_bias_is_significant() -> None:
    detectors, undecided, supported = Detectors(HEADS), [], []
    for step in range(INTERVAL, 9001, INTERVAL):
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
        for step in range(INTERVAL, 9001, INTERVAL):
            detectors.update(reading(step, course, **fields))
            assert not detectors.undecided


@pytest.mark.parametrize(("start", "slope", "warned"), [(300.0, 0.02, False), (420.0, 0.02, True), (60.0, 0.3, True)])
def test_sharpening_head_warns_if_its_score_nears_or_passes_512(start: float, slope: float, warned: bool) -> None:
    def sharpens(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        score[FAILING] = start + slope * step + noise(step)[FAILING]
        return offset, score

    _, verdicts = play(sharpens, until=7000)
    assert raised(verdicts) == ([HEADS[FAILING]] if warned else [])
    assert all((verdict.cause, verdict.signal) == ("score growth", "score") for verdict in verdicts)
    assert all(verdict.evidence["score"] >= 256 for verdict in verdicts)


def test_falling_large_score_raises_no_warning_after_the_first_sample() -> None:
    def falls(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        score[FAILING] = 700.0 - 0.1 * step
        return offset, score

    detectors, verdicts = play(falls, until=INTERVAL)
    assert raised(verdicts) == [HEADS[FAILING]]  # its past is still unknown
    assert {verdict.state for verdict in play(falls, 6000, detectors, INTERVAL)[1]} == {"updated", "cleared"}


def test_rewound_run_keeps_its_verdicts_and_its_earlier_growth() -> None:
    detectors, verdicts = play(linear_drift, until=5000, bias=0.6)
    assert raised(verdicts)
    assert detectors.update(reading(4050, linear_drift, bias=0.6)) == []
    assert [(v.layer, v.head) for v in detectors.active] == [HEADS[FAILING]]
    play(linear_drift, 5000, detectors, 4050, bias=0.6)
    straight, _ = play(linear_drift, until=5000, bias=0.6)
    np.testing.assert_allclose(detectors.warning_ratios, straight.warning_ratios, rtol=0.2, atol=0.05)
    later = play(linear_drift, 10_000, detectors, 5000, bias=0.6)[1]
    assert later, "an update is due once the new past is long enough"
    assert all(verdict.evidence and "nan" not in verdict.sentence for verdict in later)


def test_infinite_score_with_finite_offset_is_reported_in_the_same_sample() -> None:
    played, _ = play(linear_drift, until=5000, bias=0.6)
    closed = set()
    for step in range(
        5050, 5050 + 2 * played.config.block_steps, INTERVAL
    ):  # at least one of these samples closes a block
        detectors = copy.deepcopy(played)
        score = linear_drift(step)[1]
        score[FAILING] = math.inf
        run_verdict, head_verdict, *_ = detectors.update(reading(step, linear_drift, bias=0.6, largest_score=score))
        assert (run_verdict.layer, run_verdict.signal, head_verdict.signal) == (None, "nonfinite", "nonfinite")
        assert (head_verdict.layer, head_verdict.head) == HEADS[FAILING]
        closed.add(detectors.run.past.blocks[-1].end > played.run.past.blocks[-1].end)
        played.update(reading(step, linear_drift, bias=0.6))
    assert closed == {True, False}


def test_suspect_step_ignores_an_earlier_overflow_that_ended() -> None:
    detectors, _ = play(until=3000)
    for step in range(3001, 3004):
        detectors.update(reading(step, since_step=step - 1, grad_norm=math.inf))
    late = 3003 + 2 * detectors.config.overflow_steps
    play(since=3003, until=late, detectors=detectors)
    verdicts = detectors.update(reading(late + INTERVAL, loss=math.nan, suspect_step=late + 7))
    assert [verdict.evidence["suspect_step"] for verdict in verdicts] == [late + 7]


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.ROW_CORRECTED])
def test_score_jump_warns_in_plain_and_row_corrected_mode(mode: Mode) -> None:
    def jumped(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        if step > 4300:
            offset[9], score[9] = offset[9] - 12.0, score[9] * 16.0
        return offset, score

    assert raised(play(jumped, until=7000, mode=mode)[1]) == [HEADS[9]]


def fast(step: int) -> tuple[Floats, Floats]:
    """Heads that settle six times as fast; one head doubles every 100 steps after step 500."""
    offset, score = healthy(step * 6)
    drift = 0.3 * 2 ** (max(0, step - 500) / 100)
    offset[FAILING], score[FAILING] = drift + 0.02 * noise(step)[FAILING], 9 + 1.25 * drift
    return offset, score


def test_failure_within_1500_steps_warns_400_steps_before_512() -> None:
    detectors, verdicts = Detectors(HEADS), []
    for step in range(10, 1500, 10):
        verdicts += detectors.update(reading(step, fast, since_step=step - 10, bias=0.6, learning_rate=1e-3))
    dangerous = 500 + 100 * math.log2((512 - 9) / 1.25 / 0.3)
    assert raised(verdicts) == [HEADS[FAILING]]
    assert verdicts[0].step <= dangerous - 400
    assert verdicts[0].cause == "rounding"


ARRAYS = ("score_offset", "largest_score", "delta_bias_sum", "rows", "nonfinite_rows")


@pytest.mark.parametrize("fields", [*((field,) for field in ARRAYS), ARRAYS], ids="-".join)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_missing_or_infinite_field_silences_only_signals_that_need_it(fields: tuple[str, ...], value: float) -> None:
    unknown: dict[str, Any] = dict.fromkeys(fields, np.full(N, value))
    detectors, verdicts = play(slow_drift, until=5000, bias=0.6, detectors=Detectors(HEADS, NO_HORIZON), **unknown)
    assert np.isfinite(detectors.risk).all()
    if fields in (("largest_score",), ("nonfinite_rows",)):
        assert raised(verdicts) == [HEADS[FAILING]]
    elif fields == ("delta_bias_sum",) or (fields != ("rows",) and math.isnan(value)):
        assert verdicts == []
    if fields == ARRAYS and math.isnan(value):
        assert not detectors.risk.any()


@pytest.mark.parametrize(("spread", "unknown"), [(0.0, N), (0.02, N), (0.02, 0)])
def test_all_heads_of_a_layer_that_drift_together_warn(spread: float, unknown: int) -> None:
    """Also if they are bit-identical, or if another head has unknown values."""

    def together(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        offset[:4], score[:4] = offset[FAILING] * (1.0 + spread * np.array([0.0, -1.0, 1.0, -0.5])), score[FAILING]
        offset[unknown : unknown + 1] = score[unknown : unknown + 1] = np.nan
        return offset, score

    _, verdicts = play(together, until=7000, delta_bias_sum=np.where(np.arange(N) < 4, 1e-4, 0.0))
    assert set(raised(verdicts)) == set(HEADS[:4]) - {HEADS[row] for row in range(N) if row == unknown}


@pytest.mark.parametrize(
    ("rows", "loss", "severity"), [(3, 2.0, "warning"), (3, None, "critical"), (0, math.nan, "critical")]
)
def test_first_nonfinite_sample_warns_and_is_critical_unless_loss_and_norm_are_finite(
    rows: int, loss: Any, severity: str
) -> None:
    _, verdicts = play(until=INTERVAL, nonfinite_rows=np.where(np.arange(N) == FAILING, rows, 0.0), loss=loss)
    assert [(v.severity, v.signal, v.layer, v.cause) for v in verdicts] == [(severity, "nonfinite", None, "other")]
    assert (f"1 of {N} heads have such rows" in verdicts[0].sentence) == (rows > 0)


def test_suspect_step_of_a_broken_run_stays_its_first_broken_step() -> None:
    detectors, _ = play(until=3000)
    rows = np.zeros(N)
    rows[FAILING] = 3
    broken: dict[str, Any] = {"loss": math.nan, "nonfinite_rows": rows}
    verdicts = detectors.update(reading(3050, suspect_step=3017, **broken))
    for step in range(3100, 6000, INTERVAL):
        verdicts += detectors.update(reading(step, suspect_step=step - INTERVAL, **broken))
    assert len(verdicts) > 2  # updates arrive every `update_steps`
    assert {verdict.evidence["suspect_step"] for verdict in verdicts} == {3017}
    at_once = play(until=0)[0].update(reading(1, since_step=0, loss=math.nan, suspect_step=1))
    assert at_once[0].evidence["suspect_step"] == 1
    assert "The first step of this process was broken already" in at_once[0].sentence


def test_suspect_step_falls_back_to_the_last_finite_sample() -> None:
    detectors, _ = play(until=3000)
    verdicts = detectors.update(reading(3050, loss=math.nan))
    assert [verdict.evidence["suspect_step"] for verdict in verdicts] == [3000]
    finite = detectors.update(reading(3100))
    assert finite == []
    detectors.update(reading(3150, nonfinite_rows=np.full(N, 2.0), grad_norm=math.nan, loss=None))
    assert detectors.run.non_finite.suspect_step == 3100


@pytest.mark.parametrize(("norm", "period", "lost_updates"), [(math.inf, 1, 51), (None, 1, 51), (math.inf, 2, 26)])
def test_gradient_overflows_with_finite_loss_warn_only_if_they_persist(
    norm: float | None, period: int, lost_updates: int
) -> None:
    """Finite steps between the overflows do not end the incident."""
    detectors, verdicts = Detectors(HEADS), []
    for step in range(1, detectors.config.overflow_steps + 2):
        broken: dict[str, Any] = {"nonfinite_rows": np.full(N, 7.0), "grad_norm": norm}
        if step % period != 1 % period:
            broken.clear()
        verdicts += detectors.update(reading(step, since_step=step - 1, **broken))
    assert {(v.step, v.severity) for v in verdicts} == {(detectors.config.overflow_steps + 1, "warning")}
    assert f"{lost_updates} of 51 updates were lost" in verdicts[0].sentence
    assert verdicts[0].evidence["suspect_step"] == 1, "the first overflow"


def test_overflows_during_gradscaler_calibration_do_not_count_later() -> None:
    detectors, verdicts = Detectors(HEADS), []
    for step in range(1, 101):
        norm = math.inf if step <= 20 or step == 65 else 1.0
        verdicts += detectors.update(reading(step, since_step=step - 1, grad_norm=norm))
    assert verdicts == []


def test_lost_updates_between_samples_are_counted() -> None:
    detectors, verdicts = Detectors(HEADS), []
    for step in range(10, 61, 10):
        verdicts += detectors.update(reading(step, since_step=step - 10, grad_norm=math.inf, lost_steps=10))
    assert [verdict.step for verdict in verdicts] == [60]
    assert verdicts[0].sentence.startswith("60 of 60 updates were lost")


def test_broken_first_sample_suspects_step_1_regardless_of_its_losses() -> None:
    [verdicts] = Detectors(HEADS).update(reading(INTERVAL, loss=math.nan, suspect_step=17))
    assert verdicts.evidence["suspect_step"] == 1


def test_nonfinite_verdict_reports_the_largest_head_count_of_any_sample() -> None:
    detectors = Detectors(HEADS)
    verdicts = detectors.update(reading(INTERVAL, nonfinite_rows=np.where(np.arange(N) < 3, 1.0, 0.0)))
    verdicts += detectors.update(
        reading(2 * INTERVAL, loss=math.nan, nonfinite_rows=np.where(np.arange(N) < 1, 1.0, 0.0))
    )
    assert [f"3 of {N} heads have such rows." in verdict.sentence for verdict in verdicts] == [True, True]


def test_nonfinite_gradient_norm_without_a_loss_is_critical_at_once() -> None:
    [verdicts] = Detectors(HEADS).update(reading(INTERVAL, loss=None, grad_norm=math.nan))
    assert verdicts.severity == "critical"


def test_overflow_warns_only_if_the_next_loss_is_nonfinite() -> None:
    for loss, warns in ((2.0, False), (math.nan, True)):
        detectors = Detectors(HEADS)
        assert not detectors.update(reading(INTERVAL, grad_norm=math.nan, nonfinite_rows=np.full(N, 7.0)))
        assert bool(detectors.update(reading(2 * INTERVAL, loss=loss, grad_norm=1.0))) == warns


def test_sample_raises_at_most_16_warnings_and_risk_never_exceeds_1() -> None:
    detectors, nothing, counts = Detectors([(0, head) for head in range(20)]), np.zeros(20), []
    many: dict[str, Any] = dict.fromkeys(("score_offset", "delta_bias_sum", "nonfinite_rows"), nothing)
    many |= {"rows": nothing + 1e5, "largest_score": nothing + 2000.0, "modes": nothing.astype(np.int32)}
    for step in (INTERVAL, 2 * INTERVAL):
        counts.append(len(raised(detectors.update(reading(step, **many)))))
        assert detectors.risk.max() == 1.0
    assert counts == [16, 4]
