"""Cause, severity and lifetime of a warning, and the correction of its cause."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.monitor.synthetic_heads import (
    FAILING,
    HEADS,
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

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.decision import cause_of
from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.run_state import Alarm
from foreshock.monitor.detect.verdicts import Finding, verdict

EVIDENCE = {"offset": 12.0, "offset_before": 3.0, "score": 40.0, "score_before": 30.0, "window_steps": 100.0}


@pytest.mark.parametrize(
    ("mode", "until", "cause"), [(Mode.PLAIN, 12_000, "score growth"), (Mode.EXACT_DELTA, 6500, "rounding")]
)
def test_rounding_is_corrected_if_an_applied_delta_bias_turns_opposite(mode: Mode, until: int, cause: str) -> None:
    detectors, verdicts = play(linear_drift, until=5000, bias=1.5)
    assert {verdict.cause for verdict in verdicts} == {"rounding"}
    verdicts = play(linear_drift, until, detectors, 5000, bias=-1.5, mode=mode)[1]
    assert verdicts[-1].cause == cause
    assert verdicts[-1].corrected_from == (None if cause == "rounding" else "rounding")


def test_example_in_docs_is_what_the_detectors_report() -> None:
    def doubles(step: int) -> tuple[Floats, Floats]:
        offset = np.full(N, 0.5)
        offset[[FAILING, 7, 11]] = 0.35 * 2 ** (step / 1500), 0.5 + step / 2000, 0.5 + step / 2000
        return offset, 19 + offset

    detectors, verdicts, step = Detectors(HEADS), list[wire.Verdict](), 0
    while not verdicts:
        step += 100
        push = np.full(N, 1.0 if step % 200 else -1.0)
        push[FAILING] += 0.65
        verdicts = detectors.update(reading(step, doubles, since_step=step - 100, delta_bias_sum=push))
    page = (Path(__file__).parents[2] / "docs/detectors.md").read_text()
    assert f"At step {step:,}:" in page
    assert f"> {verdicts[0].sentence}\n" in page


def drift_from_high_score(step: int) -> tuple[Floats, Floats]:
    """A head whose score was dangerous before it drifts."""
    offset, score = linear_drift(step)
    score[FAILING] += 600.0
    return offset, score


@pytest.mark.parametrize(
    ("course", "fields"),
    [(drift_from_high_score, {"bias": 3.0}), (explosion, {"rounds": False}), (explosion, {"mode": Mode.EXACT_DELTA})],
    ids=["score dangerous before the drift", "float32 attention", "exact delta"],
)
def test_cause_is_score_growth_if_rounding_is_impossible(course: Course, fields: dict[str, Any]) -> None:
    verdicts = play(course, until=9700, **({"bias": 0.6} | fields))[1]
    assert raised(verdicts) == [HEADS[FAILING]]
    assert {verdict.cause for verdict in verdicts} == {"score growth"}
    if course is explosion:
        assert play(slow_drift, detectors=Detectors(HEADS, NO_HORIZON), **({"bias": 0.6} | fields))[1] == []


def next_verdict(step: int, cause: Cause, before: wire.Verdict | None) -> wire.Verdict:
    latched = None if before is None else Alarm(before, step)
    return verdict(Finding("score", cause, "warning"), EVIDENCE, math.nan, step=step, of=(0, 3), before=latched)


def test_corrected_warning_keeps_its_id_and_records_the_earlier_cause() -> None:
    first = next_verdict(100, "score growth", None)
    assert (first.state, first.corrected_from, first.corrected_step) == ("raised", None, None)
    second = next_verdict(300, "rounding", first)
    assert (second.id, second.state, second.cause) == (first.id, "updated", "rounding")
    assert (second.corrected_from, second.corrected_step) == ("score growth", 300)
    third = next_verdict(1300, "rounding", second)
    assert (third.corrected_from, third.corrected_step) == ("score growth", 300)
    assert next_verdict(200, "score growth", first).corrected_from is None


def test_warned_head_that_turns_nonfinite_is_corrected_at_once() -> None:
    detectors, verdicts = play(explosion, until=9700)
    assert {cause_of(verdict) for verdict in verdicts} == {"score growth"}
    rows = np.zeros(len(HEADS))
    rows[FAILING] = 3
    assert not detectors.update(reading(verdicts[-1].step + 300, explosion))
    run_verdict, nonfinite = detectors.update(
        reading(verdicts[-1].step + 350, explosion, nonfinite_rows=rows, grad_norm=math.nan, loss=None)
    )
    assert (run_verdict.layer, run_verdict.cause) == (None, "other")
    assert (nonfinite.id, nonfinite.state, nonfinite.severity) == (verdicts[0].id, "updated", "critical")
    assert (cause_of(nonfinite), nonfinite.corrected_from) == ("not finite", "score growth")


def test_settling_head_is_updated_without_a_forecast_before_it_is_cleared() -> None:
    def settles(step: int) -> tuple[Floats, Floats]:
        return explosion(min(step, 6000))

    _, verdicts = play(settles, until=9000, bias=0.6)
    assert raised(verdicts) == [HEADS[FAILING]]
    assert verdicts[0].harm_in_sight
    earlier, last, cleared = verdicts[-3:]
    assert last.step == earlier.step + DetectorConfig.update_steps, "the first block in which the update is due"
    assert (last.state, last.harm_in_sight, last.forecast_steps) == ("updated", False, None)
    assert "Its growth slows down: on this course its largest |score| stays below 512." in last.sentence
    assert cleared.state == "cleared"
    assert last.step < cleared.step


def test_scores_in_the_thousands_within_hundreds_of_steps_are_never_rounding() -> None:
    """A learning rate that is far too high: the scores of most heads rise together, and the loss fluctuates."""
    random = np.random.default_rng(29)
    far = random.uniform(0.3, 1.0, len(HEADS))

    def diverged(step: int) -> tuple[Floats, Floats]:
        reached = 3000 * far / (1 + math.exp((240 - step) / 25))
        return reached, 20 + reached

    detectors, verdicts = Detectors(HEADS), []
    for step in range(5, 1200, 5):
        loss = 3.0 + random.uniform(0, 0.8)
        verdicts += detectors.update(reading(step, diverged, bias=0.6, loss=loss))
    assert len(raised(verdicts)) > 1
    assert len({verdict.cause for verdict in verdicts}) == 1
    assert all(verdict.cause != "rounding" and verdict.corrected_from is None for verdict in verdicts)


def test_sentence_says_whether_the_score_still_grows() -> None:
    for score, verb in ((2300.0, "no longer grows"), (5000.0, "grows")):
        evidence = EVIDENCE | {"score": score, "score_before": 4840.0}
        verdicts = verdict(
            Finding("score", "score growth", "critical"), evidence, math.nan, step=250, of=(0, 3), before=None
        )
        change = f"from 4,840 to {score:,.0f} in 100 steps"
        assert f"head 3 {verb}: its largest |score| went {change}" in verdicts.sentence


def test_warning_stays_until_the_head_is_quiet_and_may_then_be_raised_again() -> None:
    def stopping(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        drift = 0.04 * (max(0, min(step, 5500) - 2000) + max(0, step - 14_000))
        offset[FAILING] = drift + 0.05 * noise(step)[FAILING]
        score[FAILING] += drift
        return offset, score

    detectors, verdicts = play(stopping, until=18_000, bias=0.6)
    transitions = [(v.state, v.id) for v in verdicts if v.state != "updated"]
    assert [state for state, _ in transitions] == ["raised", "cleared", "raised"]
    assert transitions[0][1] == transitions[1][1] != transitions[2][1]
    quiet = next(v for v in verdicts if v.state == "cleared")
    assert quiet.step >= 5500 + DetectorConfig().quiet_steps
    met = quiet.step - DetectorConfig().quiet_steps
    assert quiet.sentence == f"Layer 0 head 2 has met no condition of a warning for {quiet.step - met:,} steps."
    updates = [v for v in verdicts if v.state == "updated" and met < v.step < quiet.step]
    since = f"No condition of a warning has been met since step {met:,}."
    assert updates
    assert all(v.sentence.endswith(since) for v in updates), (
        "the update gives the step that the cleared verdict counts from"
    )
    assert detectors.risk[FAILING] == 1.0


def test_warned_head_has_risk_1_even_if_it_meets_no_condition() -> None:
    detectors, verdicts = play(lambda step: explosion(min(step, 6000)), until=8000, bias=0.6)
    assert raised(verdicts) == [HEADS[FAILING]]
    assert detectors.active
    assert detectors.warning_ratios[:, FAILING].max() < 1.0
    assert detectors.risk[FAILING] == 1.0


def test_mode_change_removes_rounding_support_at_once() -> None:
    detectors, _ = play(linear_drift, until=5000, bias=0.6)
    assert detectors.supported[FAILING]
    detectors.update(reading(5010, linear_drift, since_step=5000, bias=0.6, mode=Mode.EXACT_DELTA))
    assert detectors.run.past.open_steps == 10, "the block is still open"
    assert not detectors.supported.any()


def test_rounding_is_critical_from_score_256_and_stays_the_cause_if_nonfinite() -> None:
    detectors, verdicts = play(explosion, until=9700, bias=0.6)
    assert {verdict.cause for verdict in verdicts} == {"rounding"}
    assert {verdict.evidence["score"] >= 256 for verdict in verdicts} == {True, False}
    assert all((verdict.severity == "critical") == (verdict.evidence["score"] >= 256) for verdict in verdicts)
    rows = np.where(np.arange(N) == FAILING, 3.0, 0.0)
    run_verdict, nonfinite = detectors.update(
        reading(9710, since_step=9700, nonfinite_rows=rows, mode=Mode.EXACT_DELTA)
    )
    assert (run_verdict.cause, nonfinite.cause, nonfinite.signal) == ("other", "rounding", "nonfinite")
