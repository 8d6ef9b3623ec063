"""Rounding and score growth that are active together in one run are one incident."""

from typing import Any

from tests.contract.test_incident import of, warned

from foreshock.contract.incident import Acknowledged, SwitchOutcome, Warned

MODES = {(0, 0): "row_corrected"}


def drift(head: int = 0, **changes: Any) -> Warned:
    return warned(0, head, **changes)


def growth(head: int = 1, **changes: Any) -> Warned:
    return warned(0, head, cause="score growth", signal="score", **changes)


def test_two_verdicts_of_different_cause_on_heads_of_one_run_are_one_incident() -> None:
    [both] = of(drift(step=200), growth(step=100), policy="observe", clip="never")
    assert (both.id, both.cause, both.causes) == ("rounding", "rounding", ["rounding", "score growth"])
    assert (both.standing, both.switched, both.opened_step, both.times) == (2, 0, 100, 1)
    assert {head.head: head.causes for head in both.heads} == {0: ["rounding"], 1: ["score growth"]}
    assert both.sentence == (
        "Rounding makes attention scores drift in layer 0 head 0, and attention scores grow without a sign of "
        "rounding in layer 0 head 1, since step 100. First: layer 0 head 1."
    )
    assert both.to_do.startswith("Switch every head to row_corrected. Scores grow too: Lower the learning rate")
    assert both.ask == "switch"


def test_a_switch_that_held_leaves_the_growth_to_people() -> None:
    [both] = of(drift(), growth(), modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], clip="on")
    assert (both.state, both.severity, both.ask) == ("open", "warning", "none")
    assert both.done.startswith("Rounding: The head is switched, and the growth has stopped. Score growth: QK-Clip is")
    assert both.to_do.startswith("Watch the loss.")


def test_whichever_comes_first_the_incident_keeps_its_beginning_and_who_takes_care_of_it() -> None:
    said = Acknowledged(cause="score growth", step=150, who="ann", reason="on it", unix_seconds=5.0)
    [both] = of(growth(step=150, raised=100), drift(step=900), acknowledged=[said])
    assert (both.id, both.opened_step, both.state, both.acknowledged) == ("rounding", 100, "acknowledged", said)


def test_what_never_stood_at_one_time_stays_two_incidents() -> None:
    found = of(drift(step=400, raised=100, state="cleared"), growth(step=500))
    assert [(one.id, one.causes, one.state) for one in found] == [
        ("score-growth", ["score growth"], "open"),
        ("rounding", ["rounding"], "closed"),
    ]


def test_an_incident_is_answered_by_the_cause_that_is_still_active() -> None:
    [left] = of(drift(step=400, raised=100, state="cleared"), growth(step=300), policy="approve", clip="never")
    assert (left.causes, left.state, left.standing) == (["rounding", "score growth"], "open", 1)
    assert "Rounding makes" not in left.sentence
    assert (left.act, left.ask) == ("none", "none")
    [other] = of(drift(step=100), growth(step=400, raised=100, state="cleared"), policy="observe", clip="never")
    assert other.ask == "switch"
    assert "Scores grow" not in other.to_do + other.done


def test_a_head_that_one_rank_reports_as_drifting_and_another_as_growing_is_one_head_of_both_causes() -> None:
    ranks = drift(0, rank=0), growth(0, rank=1, severity="critical")
    [both] = of(*ranks, modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], clip="never")
    [head] = both.heads
    assert (head.causes, both.standing, both.switched) == (["rounding", "score growth"], 1, 1)
    assert (both.state, both.severity, both.ask) == ("open", "critical", "none")


def test_what_is_not_finite_or_has_ended_is_resumed() -> None:
    [broken] = of(drift(signal="nonfinite", severity="critical"), growth(), policy="auto", clip="never")
    assert broken.to_do.startswith("Stop the run and resume from a checkpoint")
    [ended] = of(drift(), growth(), policy="auto", clip="never", ended=True)
    assert ended.to_do.startswith("The run has ended. Resume it from a checkpoint before step 100 with row_corrected")
    assert {broken.ask, ended.ask} == {"none"}
    assert "Scores grow too" not in broken.to_do + ended.to_do
