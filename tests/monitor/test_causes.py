"""Why a head is warned about, how grave that is and how long it stands, and how a cause is corrected."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.monitor.courses import (
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

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.decision import cause_of
from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.run_state import Alarm
from foreshock.monitor.detect.verdicts import Finding, verdict

SEEN = {"offset": 12.0, "offset_before": 3.0, "score": 40.0, "score_before": 30.0, "window_steps": 100.0}


@pytest.mark.parametrize(
    ("mode", "until", "cause"), [(Mode.PLAIN, 12_000, "score growth"), (Mode.EXACT_DELTA, 6500, "rounding")]
)
def test_rounding_is_taken_back_once_a_delta_bias_that_is_applied_speaks_against_it(
    mode: Mode, until: int, cause: str
) -> None:
    detectors, told = play(line, until=5000, bias=1.5)
    assert {verdict.cause for verdict in told} == {"rounding"}
    told = play(line, until, detectors, 5000, bias=-1.5, mode=mode)[1]
    assert told[-1].cause == cause
    assert told[-1].corrected_from == (None if cause == "rounding" else "rounding")


def test_the_example_of_the_page_is_what_the_detectors_say_of_it() -> None:
    def doubles(step: int) -> tuple[Floats, Floats]:
        offset = np.full(N, 0.5)
        offset[[SICK, 7, 11]] = 0.35 * 2 ** (step / 1500), 0.5 + step / 2000, 0.5 + step / 2000
        return offset, 19 + offset

    detectors, told, step = Detectors(HEADS), list[wire.Verdict](), 0
    while not told:
        step += 100
        push = np.full(N, 1.0 if step % 200 else -1.0)
        push[SICK] += 0.65
        told = detectors.update(reading(step, doubles, since_step=step - 100, delta_bias_sum=push))
    page = (Path(__file__).parents[2] / "docs/detectors.md").read_text()
    assert f"At step {step:,}:" in page
    assert f"> {told[0].sentence}\n" in page


def high(step: int) -> tuple[Floats, Floats]:
    """A head that drifts from a score that was dangerous before."""
    offset, score = line(step)
    score[SICK] += 600.0
    return offset, score


@pytest.mark.parametrize(
    ("course", "fields"),
    [(high, {"bias": 3.0}), (explosion, {"rounds": False}), (explosion, {"mode": Mode.EXACT_DELTA})],
    ids=["dangerous before", "nothing rounds", "its bias is not applied"],
)
def test_no_rounding_is_named_of_a_head_if(course: Course, fields: dict[str, Any]) -> None:
    told = play(course, until=9700, **({"bias": 0.6} | fields))[1]
    assert raised(told) == [HEADS[SICK]]
    assert {verdict.cause for verdict in told} == {"score growth"}
    if course is explosion:
        assert play(creep, detectors=Detectors(HEADS, HOWEVER_FAR), **({"bias": 0.6} | fields))[1] == []


def word(step: int, cause: Cause, before: wire.Verdict | None) -> wire.Verdict:
    latched = None if before is None else Alarm(before, step)
    return verdict(Finding("score", cause, "warning"), SEEN, math.nan, step=step, of=(0, 3), before=latched)


def test_a_corrected_warning_keeps_its_name_and_says_what_it_was_told_as() -> None:
    first = word(100, "score growth", None)
    assert (first.state, first.corrected_from, first.corrected_step) == ("raised", None, None)
    second = word(300, "rounding", first)
    assert (second.id, second.state, second.cause) == (first.id, "updated", "rounding")
    assert (second.corrected_from, second.corrected_step) == ("score growth", 300)
    third = word(1300, "rounding", second)
    assert (third.corrected_from, third.corrected_step) == ("score growth", 300)
    assert word(200, "score growth", first).corrected_from is None


def test_what_turns_out_not_to_be_finite_goes_over_to_that_incident_and_is_told_at_once() -> None:
    detectors, told = play(explosion, until=9700)
    assert {cause_of(verdict) for verdict in told} == {"score growth"}
    rows = np.zeros(len(HEADS))
    rows[SICK] = 3
    assert not detectors.update(reading(told[-1].step + 300, explosion))
    of_run, broken = detectors.update(
        reading(told[-1].step + 350, explosion, nonfinite_rows=rows, grad_norm=math.nan, loss=None)
    )
    assert (of_run.layer, of_run.cause) == (None, "other")
    assert (broken.id, broken.state, broken.severity) == (told[0].id, "updated", "critical")
    assert (cause_of(broken), broken.corrected_from) == ("not finite", "score growth")


def test_a_head_that_settles_is_told_again_with_no_harm_in_sight_before_it_is_quiet() -> None:
    def settles(step: int) -> tuple[Floats, Floats]:
        return explosion(min(step, 6000))

    _, told = play(settles, until=9000, bias=0.6)
    assert raised(told) == [HEADS[SICK]]
    assert told[0].harm_in_sight
    earlier, last, cleared = told[-3:]
    assert last.step == earlier.step + DetectorConfig.update_steps, "in the first block in which it is due"
    assert (last.state, last.harm_in_sight, last.forecast_steps) == ("updated", False, None)
    assert "Its growth slows down: on this course its largest |score| stays below 512." in last.sentence
    assert cleared.state == "cleared"
    assert last.step < cleared.step


def test_scores_of_thousands_after_a_few_hundred_steps_are_never_called_rounding_in_any_head() -> None:
    """A learning rate that is far too high: all scores of most heads move at once, and the loss comes and goes."""
    random = np.random.default_rng(29)
    far = random.uniform(0.3, 1.0, len(HEADS))

    def blown(step: int) -> tuple[Floats, Floats]:
        reached = 3000 * far / (1 + math.exp((240 - step) / 25))
        return reached, 20 + reached

    detectors, told = Detectors(HEADS), []
    for step in range(5, 1200, 5):
        loss = 3.0 + random.uniform(0, 0.8)
        told += detectors.update(reading(step, blown, bias=0.6, loss=loss))
    assert len(raised(told)) > 1
    assert len({verdict.cause for verdict in told}) == 1
    assert all(verdict.cause != "rounding" and verdict.corrected_from is None for verdict in told)


def test_a_score_that_fell_is_not_said_to_grow() -> None:
    for score, words in ((2300.0, "no longer grows"), (5000.0, "grows")):
        seen = SEEN | {"score": score, "score_before": 4840.0}
        told = verdict(Finding("score", "score growth", "critical"), seen, math.nan, step=250, of=(0, 3), before=None)
        moved = f"from 4,840 to {score:,.0f} in 100 steps"
        assert f"head 3 {words}: its largest |score| went {moved}" in told.sentence


def test_a_verdict_is_latched_until_the_head_was_quiet_and_the_head_may_warn_again() -> None:
    def stopping(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        drift = 0.04 * (max(0, min(step, 5500) - 2000) + max(0, step - 14_000))
        offset[SICK] = drift + 0.05 * noise(step)[SICK]
        score[SICK] += drift
        return offset, score

    detectors, told = play(stopping, until=18_000, bias=0.6)
    states = [(v.state, v.id) for v in told if v.state != "updated"]
    assert [state for state, _ in states] == ["raised", "cleared", "raised"]
    assert states[0][1] == states[1][1] != states[2][1]
    quiet = next(v for v in told if v.state == "cleared")
    assert quiet.step >= 5500 + DetectorConfig().quiet_steps
    met = quiet.step - DetectorConfig().quiet_steps
    assert quiet.sentence == f"Layer 0 head 2 has met no condition of a warning for {quiet.step - met:,} steps."
    updates = [v for v in told if v.state == "updated" and met < v.step < quiet.step]
    since = f"No condition of a warning has been met since step {met:,}."
    assert updates
    assert all(v.sentence.endswith(since) for v in updates), "a reader can join what drifts and what is quiet"
    assert detectors.risk[SICK] == 1.0


def test_a_head_that_is_warned_about_has_the_highest_risk_also_while_it_meets_no_condition() -> None:
    detectors, told = play(lambda step: explosion(min(step, 6000)), until=8000, bias=0.6)
    assert raised(told) == [HEADS[SICK]]
    assert detectors.active
    assert detectors.warning_ratios[:, SICK].max() < 1.0
    assert detectors.risk[SICK] == 1.0


def test_a_head_whose_mode_changes_is_not_supported_from_that_sample_on() -> None:
    detectors, _ = play(line, until=5000, bias=0.6)
    assert detectors.supported[SICK]
    detectors.update(reading(5010, line, since_step=5000, bias=0.6, mode=Mode.EXACT_DELTA))
    assert detectors.run.past.open_steps == 10, "no block was closed"
    assert not detectors.supported.any()


def test_rounding_is_critical_from_a_score_of_256_and_stays_the_cause_of_values_that_are_not_finite() -> None:
    detectors, told = play(explosion, until=9700, bias=0.6)
    assert {verdict.cause for verdict in told} == {"rounding"}
    assert {verdict.evidence["score"] >= 256 for verdict in told} == {True, False}
    assert all((verdict.severity == "critical") == (verdict.evidence["score"] >= 256) for verdict in told)
    rows = np.where(np.arange(N) == SICK, 3.0, 0.0)
    of_run, broken = detectors.update(reading(9710, since_step=9700, nonfinite_rows=rows, mode=Mode.EXACT_DELTA))
    assert (of_run.cause, broken.cause, broken.signal) == ("other", "rounding", "nonfinite")
