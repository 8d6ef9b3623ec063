"""Warnings of a run are merged into incidents, one per cause, in any order of reporting."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import cause_of
from foreshock.contract.incident import Acknowledged, Incident, RunContext, SwitchOutcome, Warned, incidents
from foreshock.contract.wire import Verdict


def warned(layer: int | None = 0, head: int | None = 0, step: int = 100, rank: int = 0, **changes: Any) -> Warned:
    raised = int(changes.pop("raised", step))
    fields: dict[str, Any] = {
        "id": f"l{layer}h{head}-{raised}",
        "state": "raised",
        "severity": "warning",
        "cause": "rounding",
        "signal": "offset",
        "sentence": f"Layer {layer} head {head} drifts",
    }
    return Warned(rank, raised, Verdict(step=step, layer=layer, head=head, **{**fields, **changes}))


def incidents_of(*warnings: Warned, **known: Any) -> list[Incident]:
    return incidents(warnings, RunContext(**{"mitigation": "row_corrected", **known}))


@st.composite
def any_warning(draw: st.DrawFn) -> Warned:
    """Any warning from four ranks with twelve layers of twelve heads: any cause, severity and state."""
    run_level = draw(st.booleans()) and draw(st.booleans())
    raised = draw(st.integers(0, 5000))
    likely = draw(st.none() | st.floats(0, 1e5) | st.sampled_from([float("nan"), float("inf"), 1e300]))
    return warned(
        None if run_level else draw(st.integers(0, 11)),
        None if run_level else draw(st.integers(0, 11)),
        step=raised + draw(st.integers(0, 3000)),
        rank=draw(st.integers(0, 3)),
        raised=raised,
        cause=draw(st.sampled_from(["rounding", "score growth", "other"])),
        severity=draw(st.sampled_from(["info", "warning", "critical"])),
        state=draw(st.sampled_from(["raised", "updated", "cleared"])),
        signal=draw(st.sampled_from(["offset", "score", "nonfinite", "of a later version"])),
        forecast_steps=likely,
        forecast_low_steps=None if likely is None else likely / 2,
        id=f"w{draw(st.integers(0, 10**6))}",
    )


warning_lists = st.lists(any_warning(), max_size=60, unique_by=lambda one: (one.rank, one.verdict.id))


@given(warnings=warning_lists, seed=st.integers(0, 2**32))
def test_incidents_do_not_depend_on_the_order_of_warnings(warnings: list[Warned], seed: int) -> None:
    modes = {(layer, head): "row_corrected" for layer in range(6) for head in range(12)}
    judged = [SwitchOutcome(None, 2500, arrested=True), SwitchOutcome(frozenset({(1, 1)}), 4000, arrested=False)]
    seen = [Acknowledged(cause=c, step=s, who="ann", reason="x", unix_seconds=1.0) for c in CAUSES for s in (9, 4000)]
    known: dict[str, Any] = {"modes": modes, "policy": "auto", "last_step": 6000}
    mixed = list(warnings)
    random.Random(seed).shuffle(mixed)
    one = incidents_of(*warnings, judged=judged, acknowledged=seen, **known)
    assert incidents_of(*mixed, judged=judged[::-1], acknowledged=seen[::-1], **known) == one


@given(warnings=warning_lists)
def test_every_warning_is_in_one_incident_of_its_cause_and_notes_are_in_none(warnings: list[Warned]) -> None:
    found = incidents_of(*warnings)
    assert len({incident.id for incident in found}) == len(found)
    reported = [one for one in warnings if one.verdict.severity != "info"]
    assert {cause for incident in found for cause in incident.causes} <= {cause_of(one.verdict) for one in reported}
    active = {
        (cause_of(one.verdict), one.verdict.layer, one.verdict.head)
        for one in reported
        if one.verdict.state != "cleared"
    }
    heads = [(i, head) for i in found for head in i.heads if head.state != "quiet"]
    assert {(cause, head.layer, head.head) for _, head in heads for cause in head.causes} == active
    named = {(cause in ("rounding", "score growth") or cause, layer, head) for cause, layer, head in active}
    assert sum(incident.standing for incident in found) == len(named) == len(heads)
    assert all((incident.state == "closed") == (incident.standing == 0) for incident in found)


@given(warnings=warning_lists)
def test_heads_are_sorted_by_forecast_and_the_first_sets_that_of_the_incident(
    warnings: list[Warned],
) -> None:
    for incident in incidents_of(*warnings, last_step=9000):
        finite = [h for h in incident.heads if h.state not in ("quiet", "arrested") and h.signal != "nonfinite"]
        soon = [float("inf") if head.harm_step is None else head.harm_step for head in finite]
        assert soon == sorted(soon)
        if incident.standing:
            assert (incident.steps_left, incident.harm_step) == (incident.first.steps_left, incident.first.harm_step)
            assert incident.first.state != "quiet"
        assert len(incident.sentence) + len(incident.done) + len(incident.to_do) < 900


def test_warnings_of_144_heads_become_one_incident_that_names_the_most_urgent_head() -> None:
    warnings = [
        warned(layer, head, step=3375 + layer, forecast_steps=9000.0 - 100 * layer - head)
        for layer in range(12)
        for head in range(12)
    ]
    [incident] = incidents_of(*warnings, policy="observe")
    assert (incident.standing, incident.layers, incident.opened_step) == (144, list(range(12)), 3375)
    assert (incident.first.layer, incident.first.head) == (11, 11)
    assert incident.sentence == (
        "Rounding makes attention scores drift in 144 heads of layers 0 to 11, since step 3,375. First: "
        "layer 11 head 11. Its largest |score| reaches 512 about step 11,300."
    )
    assert incident.to_do == "Switch every head to row_corrected."


@pytest.mark.parametrize(
    ("heads", "phrase"),
    [(0, "in the whole run, since"), (1, "in the whole run and layer 3 head 0, since"),
     (5, "in the whole run and 5 heads of layer 3, since")],
)  # fmt: skip
def test_run_level_warning_is_not_counted_as_a_head(heads: int, phrase: str) -> None:
    run = warned(None, None, cause="other", signal="loss")
    [incident] = incidents_of(run, *(warned(3, head, cause="other", signal="loss") for head in range(heads)))
    assert phrase in incident.sentence
    assert (incident.standing, incident.standing_heads) == (heads + 1, heads)


def test_head_on_several_ranks_is_described_by_the_rank_with_the_earliest_forecast() -> None:
    calm = warned(2, 5, step=400, rank=0, forecast_steps=5000.0, sentence="calm", severity="warning")
    soon = warned(2, 5, step=380, rank=3, forecast_steps=900.0, sentence="soon", severity="critical", raised=300)
    [incident] = incidents_of(calm, soon, last_step=500)
    [head] = incident.heads
    assert (head.sentence, head.raised_step, head.step, head.severity) == ("soon", 300, 400, "critical")
    assert (head.harm_step, head.steps_left) == (1280, 780.0)


def test_non_finite_warning_has_its_own_incident_unless_caused_by_rounding() -> None:
    nan = warned(None, None, cause="other", signal="nonfinite", severity="critical")
    growth = warned(0, 1, cause="score growth")  # shares the incident of the rounding warning
    drifted = warned(3, 3, signal="nonfinite", severity="critical")
    assert [(i.id, i.severity) for i in incidents_of(nan, growth, drifted)] == [
        ("rounding", "critical"),
        ("not-finite", "critical"),
    ]
    assert [i.id for i in incidents_of(nan, growth)] == ["not-finite", "score-growth"]


def test_suggested_checkpoint_is_older_than_the_first_suspect_step() -> None:
    broken: dict[str, Any] = {"cause": "other", "signal": "nonfinite", "severity": "critical"}
    ranks = [warned(None, None, step=20, rank=rank, evidence={"suspect_step": 9.0 + rank}, **broken) for rank in (0, 1)]
    [incident] = incidents_of(*ranks, warned(2, 5, step=20, evidence={"suspect_step": 8.0}, **broken))
    assert "resume from a checkpoint before step 8;" in incident.to_do
    [unknown_step] = incidents_of(warned(None, None, step=20, **broken))
    assert "resume from a checkpoint before step 20;" in unknown_step.to_do
    [drifted] = incidents_of(warned(2, 5, step=4000, raised=3000, evidence={"suspect_step": 3900.0}, **broken))
    assert "before step 3,000;" in drifted.to_do


def test_incident_closes_with_its_last_warning_and_reopens_with_the_next() -> None:
    first, second = (
        warned(0, head, step=900 + head, raised=100 * head, state="cleared", id=f"a{head}") for head in (1, 2)
    )
    [closed] = incidents_of(first, second)
    assert (closed.state, closed.opened_step, closed.closed_step, closed.times) == ("closed", 100, 902, 1)
    assert (closed.to_do, closed.steps_left, closed.act) == ("Nothing.", None, "none")
    [again] = incidents_of(first, second, warned(0, 2, step=5000))
    assert (again.state, again.opened_step, again.times, len(again.heads)) == ("open", 5000, 2, 1)
    [same] = incidents_of(first, second, warned(0, 3, step=902))
    assert (same.state, same.opened_step, same.times) == ("open", 100, 1), (
        "raised at the step at which the others were cleared"
    )


def test_acknowledgement_lasts_until_the_incident_closes() -> None:
    acknowledgement = Acknowledged(cause="rounding", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [incident] = incidents_of(warned(step=700, raised=600), acknowledged=[acknowledgement])
    assert (incident.state, incident.acknowledged) == ("acknowledged", acknowledgement)
    [later] = incidents_of(
        warned(step=800, raised=600, state="cleared"), warned(0, 1, step=900), acknowledged=[acknowledgement]
    )
    assert (later.state, later.acknowledged) == ("open", None)
    [other] = incidents_of(warned(step=700, raised=600, cause="score growth"), acknowledged=[acknowledgement])
    assert other.acknowledged is None


ARRESTED, FAILED = (SwitchOutcome(frozenset({(4, 1)}), 2100, arrested=arrested) for arrested in (True, False))


@pytest.mark.parametrize(
    ("mode", "judged", "raised", "state", "severity"),
    [
        (None, [], 1000, "open", "critical"),
        ("plain", [ARRESTED], 1000, "open", "critical"),
        ("row_corrected", [], 1000, "switched", "critical"),
        *((mode, [ARRESTED], 1000, "arrested", "info") for mode in ("exact_delta", "row_corrected+paper_softmax")),
        ("row_corrected", [ARRESTED], 2100, "arrested", "info"),
        ("row_corrected", [ARRESTED], 2101, "switched", "critical"),
        ("row_corrected", [ARRESTED, FAILED], 1000, "not arrested", "critical"),
        ("row_corrected", [FAILED, ARRESTED._replace(step=4000)], 1000, "arrested", "info"),
    ],
)
def test_arrested_head_has_severity_info_until_undone_or_warned_about_again(
    mode: Any, judged: Any, raised: int, state: str, severity: str
) -> None:
    """Its largest score may stay above 512 and its warning critical, but the switch made both harmless."""
    past = warned(4, 1, step=9000, raised=raised, severity="critical", forecast_steps=0.0)
    [found] = incidents_of(past, modes={} if mode is None else {(4, 1): mode}, judged=judged, policy="auto")
    assert (found.state, found.severity, found.switched) == (state, severity, state != "open")
    if state == "arrested":
        assert found.done == "The head is switched, and the growth has stopped."


def test_head_that_still_grows_after_its_switch_makes_the_incident_not_arrested() -> None:
    modes = {(0, 0): "row_corrected", (0, 1): "row_corrected"}
    judged = [
        SwitchOutcome(frozenset({(0, 0)}), 2000, arrested=True),
        SwitchOutcome(frozenset({(0, 1)}), 2000, arrested=False),
    ]
    [incident] = incidents_of(warned(0, 0), warned(0, 1), modes=modes, judged=judged, policy="auto")
    assert incident.state == "not arrested"
    assert [(head.head, head.state) for head in incident.heads] == [(1, "not arrested"), (0, "arrested")]


def test_non_finite_or_huge_forecast_is_ignored_and_a_negative_one_means_now() -> None:
    for forecast in (float("nan"), float("inf"), -float("inf"), 1e300):
        [incident] = incidents_of(warned(forecast_steps=forecast))
        assert incident.steps_left is None
    [past] = incidents_of(warned(step=100, forecast_steps=-50.0))
    assert (past.harm_step, past.steps_left) == (100, 0.0)


def corrected(head: int = 0, raised: int = 500, at: int = 3000, was: str = "score growth", **more: Any) -> Warned:
    """A rounding warning that was reported with another cause until step `at`."""
    step = more.pop("step", at)
    return warned(0, head, step=step, raised=raised, corrected_from=was, corrected_step=at, **more)


def test_incident_of_a_corrected_warning_starts_when_it_was_first_raised() -> None:
    [incident] = incidents_of(corrected(forecast_steps=4000.0, forecast_low_steps=1000.0))
    assert (incident.id, incident.opened_step, incident.times) == ("rounding", 500, 1)
    assert (incident.corrected_from, incident.corrected_step) == ("score growth", 3000)
    assert incident.sentence == (
        "Rounding makes attention scores drift in layer 0 head 0, since step 500. Corrected: until step 3,000 this was "
        "reported as score growth. Its largest |score| reaches 512 about step 7,000 (not before 4,000)."
    )
    assert "before step 500" in incidents_of(corrected(signal="nonfinite"))[0].to_do


def test_acknowledgement_survives_the_correction_of_the_cause() -> None:
    acknowledgement = Acknowledged(cause="score growth", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [incident] = incidents_of(corrected(), acknowledged=[acknowledgement])
    assert (incident.state, incident.acknowledged) == ("acknowledged", acknowledgement)
    [before] = incidents_of(corrected(raised=800), acknowledged=[acknowledgement])
    assert before.acknowledged is None
    other = Acknowledged(cause="other", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [unrelated] = incidents_of(corrected(), acknowledged=[other])
    assert unrelated.acknowledged is None


@pytest.mark.parametrize("was", ["other", "score growth"])
def test_corrected_warning_joins_an_existing_incident_without_marking_it_corrected(
    was: str,
) -> None:
    for other in (warned(1, 1, step=2900, raised=1000), warned(1, 1, step=2000, raised=1000, state="cleared")):
        [both] = incidents_of(other, corrected(was=was))
        assert (both.state, both.opened_step, both.times, both.corrected_from) == ("open", 500, 1, None)
        assert "Corrected" not in both.sentence
        assert [head.corrected_from for head in both.heads] == [was, None]


def test_uncorrected_head_keeps_its_cause_in_the_shared_incident() -> None:
    [both] = incidents_of(corrected(), warned(0, 1, step=900, raised=600, cause="score growth"))
    assert (both.causes, both.opened_step, both.corrected_from) == (["rounding", "score growth"], 500, "score growth")
    assert {head.head: head.causes for head in both.heads} == {0: ["rounding"], 1: ["score growth"]}


def test_uncorrected_head_with_cause_other_keeps_its_own_incident() -> None:
    found = incidents_of(corrected(was="other"), warned(0, 1, step=900, raised=600, cause="other"))
    assert [(i.id, i.standing, i.corrected_from) for i in found] == [("rounding", 1, "other"), ("other", 1, None)]


def test_sentence_says_if_no_harm_is_forecast_and_omits_a_missing_forecast() -> None:
    [settles] = incidents_of(warned(harm_in_sight=False))
    assert settles.sentence.endswith(" Its growth slows down: on this course its largest |score| stays below 512.")
    [unknown] = incidents_of(warned())
    assert unknown.sentence.endswith("since step 100.")


@pytest.mark.parametrize("cause", ["rounding", "score growth"])
@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_incident_without_forecast_harm_has_severity_info_and_asks_for_no_action(cause: str, severity: str) -> None:
    slowing = warned(harm_in_sight=False, cause=cause, severity=severity)
    [note] = incidents_of(slowing, policy="observe", orders=[])
    assert (note.severity, note.ask, note.state) == ("info", "none", "open")
    assert note.to_do.startswith("Watch the growth; if it continues")
    for worse in (warned(0, 1, harm_in_sight=True), warned(0, 1), warned(rank=1, harm_in_sight=True)):
        [incident] = incidents_of(slowing, worse._replace(verdict=worse.verdict.model_copy(update={"cause": cause})))
        assert incident.severity in ("warning", "critical"), "one head or one rank with continuing growth is enough"
    [broken] = incidents_of(warned(harm_in_sight=False, signal="nonfinite", cause="other", severity="critical"))
    assert broken.severity == "critical"


MODES = {(0, 0): "row_corrected"}


def drift(head: int = 0, **changes: Any) -> Warned:
    return warned(0, head, **changes)


def growth(head: int = 1, **changes: Any) -> Warned:
    return warned(0, head, cause="score growth", signal="score", **changes)


def test_rounding_and_score_growth_in_one_run_are_one_incident() -> None:
    [both] = incidents_of(drift(step=200), growth(step=100), policy="observe", clip="never")
    assert (both.id, both.cause, both.causes) == ("rounding", "rounding", ["rounding", "score growth"])
    assert (both.standing, both.switched, both.opened_step, both.times) == (2, 0, 100, 1)
    assert {head.head: head.causes for head in both.heads} == {0: ["rounding"], 1: ["score growth"]}
    assert both.sentence == (
        "Rounding makes attention scores drift in layer 0 head 0, and attention scores grow without a sign of "
        "rounding in layer 0 head 1, since step 100. First: layer 0 head 1."
    )
    assert both.to_do.startswith("Switch every head to row_corrected. Scores grow too: Lower the learning rate")
    assert both.ask == "switch"


def test_successful_switch_leaves_only_advice_about_score_growth() -> None:
    [both] = incidents_of(drift(), growth(), modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], clip="on")
    assert (both.state, both.severity, both.ask) == ("open", "warning", "none")
    assert both.done.startswith("Rounding: The head is switched, and the growth has stopped. Score growth: QK-Clip is")
    assert both.to_do.startswith("Watch the loss.")


def test_warnings_that_do_not_overlap_in_time_are_two_incidents() -> None:
    found = incidents_of(drift(step=400, raised=100, state="cleared"), growth(step=500))
    assert [(one.id, one.causes, one.state) for one in found] == [
        ("score-growth", ["score growth"], "open"),
        ("rounding", ["rounding"], "closed"),
    ]


def test_incident_action_follows_the_cause_that_is_still_active() -> None:
    [incident] = incidents_of(
        drift(step=400, raised=100, state="cleared"), growth(step=300), policy="approve", clip="never"
    )
    assert (incident.causes, incident.state, incident.standing) == (["rounding", "score growth"], "open", 1)
    assert "Rounding makes" not in incident.sentence
    assert (incident.act, incident.ask) == ("none", "none")
    [other] = incidents_of(
        drift(step=100), growth(step=400, raised=100, state="cleared"), policy="observe", clip="never"
    )
    assert other.ask == "switch"
    assert "Scores grow" not in other.to_do + other.done


def test_head_with_different_causes_on_two_ranks_counts_once_with_both_causes() -> None:
    ranks = drift(0, rank=0), growth(0, rank=1, severity="critical")
    [both] = incidents_of(*ranks, modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], clip="never")
    [head] = both.heads
    assert (head.causes, both.standing, both.switched) == (["rounding", "score growth"], 1, 1)
    assert (both.state, both.severity, both.ask) == ("open", "critical", "none")


def test_non_finite_or_ended_run_asks_to_resume_from_a_checkpoint() -> None:
    [broken] = incidents_of(drift(signal="nonfinite", severity="critical"), growth(), policy="auto", clip="never")
    assert broken.to_do.startswith("Stop the run and resume from a checkpoint")
    [ended] = incidents_of(drift(), growth(), policy="auto", clip="never", ended=True)
    assert ended.to_do.startswith("The run has ended. Resume it from a checkpoint before step 100 with row_corrected")
    assert {broken.ask, ended.ask} == {"none"}
    assert "Scores grow too" not in broken.to_do + ended.to_do
