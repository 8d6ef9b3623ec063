"""A cause that is corrected is no second failure: the incident goes on under another name and says so."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_incident import of, warned

from foreshock.contract.causes import CAUSES
from foreshock.contract.incident import Acknowledged, Warned


def corrected(head: int = 0, raised: int = 500, at: int = 3000, was: str = "score growth", **more: Any) -> Warned:
    """A warning of rounding that was told as another cause until step `at`."""
    step = more.pop("step", at)
    return warned(0, head, step=step, raised=raised, corrected_from=was, corrected_step=at, **more)


def test_the_incident_of_a_corrected_warning_goes_on_from_where_it_was_first_told() -> None:
    [incident] = of(corrected(forecast_steps=4000.0, forecast_low_steps=1000.0))
    assert (incident.id, incident.opened_step, incident.times) == ("rounding", 500, 1)
    assert (incident.corrected_from, incident.corrected_step) == ("score growth", 3000)
    assert incident.sentence == (
        "Rounding makes attention scores drift in layer 0 head 0, since step 500. Corrected: until step 3,000 this was "
        "reported as score growth. Its largest |score| reaches 512 about step 7,000 (not before 4,000)."
    )
    assert "before step 500" in of(corrected(signal="nonfinite"))[0].to_do


def test_who_acknowledged_it_under_its_first_name_still_takes_care_of_it() -> None:
    said = Acknowledged(cause="score growth", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [incident] = of(corrected(), acknowledged=[said])
    assert (incident.state, incident.acknowledged) == ("acknowledged", said)
    [before] = of(corrected(raised=800), acknowledged=[said])
    assert before.acknowledged is None
    other = Acknowledged(cause="other", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [not_meant] = of(corrected(), acknowledged=[other])
    assert not_meant.acknowledged is None


@pytest.mark.parametrize("was", ["other", "score growth"])
def test_a_corrected_warning_is_of_an_incident_that_there_is_since_it_was_raised_and_does_not_rename_it(
    was: str,
) -> None:
    for other in (warned(1, 1, step=2900, raised=1000), warned(1, 1, step=2000, raised=1000, state="cleared")):
        [both] = of(other, corrected(was=was))
        assert (both.state, both.opened_step, both.times, both.corrected_from) == ("open", 500, 1, None)
        assert "Corrected" not in both.sentence
        assert [head.corrected_from for head in both.heads] == [was, None]


def test_heads_whose_cause_was_not_corrected_keep_it_in_the_one_incident() -> None:
    [both] = of(corrected(), warned(0, 1, step=900, raised=600, cause="score growth"))
    assert (both.causes, both.opened_step, both.corrected_from) == (["rounding", "score growth"], 500, "score growth")
    assert {head.head: head.causes for head in both.heads} == {0: ["rounding"], 1: ["score growth"]}


def test_heads_that_were_told_as_another_cause_than_the_corrected_stay_where_they_were() -> None:
    found = of(corrected(was="other"), warned(0, 1, step=900, raised=600, cause="other"))
    assert [(i.id, i.standing, i.corrected_from) for i in found] == [("rounding", 1, "other"), ("other", 1, None)]


@pytest.mark.parametrize("was", ["other", "score growth"])
def test_of_several_that_were_corrected_the_first_correction_is_told_and_the_first_warning_says_since_when(
    was: str,
) -> None:
    heads = ((0, 700, 3000), (1, 400, 3000), (2, 100, 3500))
    [incident] = of(*(corrected(head, raised=raised, at=at, was=was) for head, raised, at in heads))
    assert (incident.opened_step, incident.corrected_step, incident.standing) == (100, 3000, 3)


@given(
    raised=st.integers(0, 5000),
    later=st.integers(1, 3000),
    was=st.sampled_from([cause for cause in CAUSES if cause != "rounding"]),
)
def test_a_corrected_warning_is_in_one_incident_that_opened_when_it_was_raised(
    raised: int, later: int, was: str
) -> None:
    [incident] = of(corrected(raised=raised, at=raised + later, was=was))
    assert (incident.opened_step, incident.corrected_step) == (raised, raised + later)
    assert was in incident.sentence


def test_a_head_that_settles_has_no_harm_in_sight_and_one_of_no_forecast_says_nothing_of_it() -> None:
    [settles] = of(warned(harm_in_sight=False))
    assert settles.sentence.endswith(" Its growth slows down: on this course its largest |score| stays below 512.")
    [unknown] = of(warned())
    assert unknown.sentence.endswith("since step 100.")


@pytest.mark.parametrize("cause", ["rounding", "score growth"])
@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_an_incident_whose_text_says_that_no_harm_is_in_sight_is_a_note_and_asks_for_no_act(
    cause: str, severity: str
) -> None:
    slowing = warned(harm_in_sight=False, cause=cause, severity=severity)
    [note] = of(slowing, policy="observe", orders=[])
    assert (note.severity, note.ask, note.state) == ("info", "none", "open")
    assert note.to_do.startswith("Watch the growth; if it continues")
    for worse in (warned(0, 1, harm_in_sight=True), warned(0, 1), warned(rank=1, harm_in_sight=True)):
        [incident] = of(slowing, worse._replace(verdict=worse.verdict.model_copy(update={"cause": cause})))
        assert incident.severity in ("warning", "critical"), "one head, or one rank, that goes on is enough"
    [broken] = of(warned(harm_in_sight=False, signal="nonfinite", cause="other", severity="critical"))
    assert broken.severity == "critical"
