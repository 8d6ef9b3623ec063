"""What all warnings of a run come to: one voice for each cause, whatever the order in which ranks are heard."""

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


def of(*given_: Warned, **known: Any) -> list[Incident]:
    return incidents(given_, RunContext(**{"mitigation": "row_corrected", **known}))


@st.composite
def one_of_a_flood(draw: st.DrawFn) -> Warned:
    """A warning of a model of twelve layers and twelve heads, held by four ranks: of any cause, severity and state."""
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


floods = st.lists(one_of_a_flood(), max_size=60, unique_by=lambda one: (one.rank, one.verdict.id))


@given(flood=floods, seed=st.integers(0, 2**32))
def test_the_order_in_which_ranks_are_heard_does_not_matter(flood: list[Warned], seed: int) -> None:
    modes = {(layer, head): "row_corrected" for layer in range(6) for head in range(12)}
    judged = [SwitchOutcome(None, 2500, arrested=True), SwitchOutcome(frozenset({(1, 1)}), 4000, arrested=False)]
    seen = [Acknowledged(cause=c, step=s, who="ann", reason="x", unix_seconds=1.0) for c in CAUSES for s in (9, 4000)]
    known: dict[str, Any] = {"modes": modes, "policy": "auto", "last_step": 6000}
    mixed = list(flood)
    random.Random(seed).shuffle(mixed)
    one = of(*flood, judged=judged, acknowledged=seen, **known)
    assert of(*mixed, judged=judged[::-1], acknowledged=seen[::-1], **known) == one


@given(flood=floods)
def test_every_warning_stands_in_one_incident_of_its_cause_and_notes_in_none(flood: list[Warned]) -> None:
    found = of(*flood)
    assert len({incident.id for incident in found}) == len(found)
    told = [one for one in flood if one.verdict.severity != "info"]
    assert {cause for incident in found for cause in incident.causes} <= {cause_of(one.verdict) for one in told}
    standing = {
        (cause_of(one.verdict), one.verdict.layer, one.verdict.head) for one in told if one.verdict.state != "cleared"
    }
    heads = [(i, head) for i in found for head in i.heads if head.state != "quiet"]
    assert {(cause, head.layer, head.head) for _, head in heads for cause in head.causes} == standing
    named = {(cause in ("rounding", "score growth") or cause, layer, head) for cause, layer, head in standing}
    assert sum(incident.standing for incident in found) == len(named) == len(heads)
    assert all((incident.state == "closed") == (incident.standing == 0) for incident in found)


@given(flood=floods)
def test_heads_are_ranked_by_how_soon_they_come_to_harm_and_the_first_gives_the_incidents_forecast(
    flood: list[Warned],
) -> None:
    for incident in of(*flood, last_step=9000):
        finite = [h for h in incident.heads if h.state not in ("quiet", "arrested") and h.signal != "nonfinite"]
        soon = [float("inf") if head.harm_step is None else head.harm_step for head in finite]
        assert soon == sorted(soon)
        if incident.standing:
            assert (incident.steps_left, incident.harm_step) == (incident.first.steps_left, incident.first.harm_step)
            assert incident.first.state != "quiet"
        assert len(incident.sentence) + len(incident.done) + len(incident.to_do) < 900


def test_a_flood_of_144_heads_is_one_incident_that_names_where_to_look_first() -> None:
    flood = [
        warned(layer, head, step=3375 + layer, forecast_steps=9000.0 - 100 * layer - head)
        for layer in range(12)
        for head in range(12)
    ]
    [incident] = of(*flood, policy="observe")
    assert (incident.standing, incident.layers, incident.opened_step) == (144, list(range(12)), 3375)
    assert (incident.first.layer, incident.first.head) == (11, 11)
    assert incident.sentence == (
        "Rounding makes attention scores drift in 144 heads of layers 0 to 11, since step 3,375. First: "
        "layer 11 head 11. Its largest |score| reaches 512 about step 11,300."
    )
    assert incident.to_do == "Switch every head to row_corrected."


@pytest.mark.parametrize(
    ("heads", "said"),
    [(0, "in the whole run, since"), (1, "in the whole run and layer 3 head 0, since"),
     (5, "in the whole run and 5 heads of layer 3, since")],
)  # fmt: skip
def test_the_whole_run_is_never_told_as_a_head(heads: int, said: str) -> None:
    run = warned(None, None, cause="other", signal="loss")
    [incident] = of(run, *(warned(3, head, cause="other", signal="loss") for head in range(heads)))
    assert said in incident.sentence
    assert (incident.standing, incident.standing_heads) == (heads + 1, heads)


def test_the_rank_that_expects_harm_first_speaks_for_a_head_that_several_hold() -> None:
    calm = warned(2, 5, step=400, rank=0, forecast_steps=5000.0, sentence="calm", severity="warning")
    soon = warned(2, 5, step=380, rank=3, forecast_steps=900.0, sentence="soon", severity="critical", raised=300)
    [incident] = of(calm, soon, last_step=500)
    [head] = incident.heads
    assert (head.sentence, head.raised_step, head.step, head.severity) == ("soon", 300, 400, "critical")
    assert (head.harm_step, head.steps_left) == (1280, 780.0)


def test_causes_do_not_mix_and_what_is_not_finite_is_one_of_its_own_unless_rounding_led_there() -> None:
    nan = warned(None, None, cause="other", signal="nonfinite", severity="critical")
    growth = warned(0, 1, cause="score growth")  # of one incident with the rounding that it stands beside
    drifted = warned(3, 3, signal="nonfinite", severity="critical")
    assert [(i.id, i.severity) for i in of(nan, growth, drifted)] == [
        ("rounding", "critical"),
        ("not-finite", "critical"),
    ]
    assert [i.id for i in of(nan, growth)] == ["not-finite", "score-growth"]


def test_a_checkpoint_is_to_be_older_than_the_first_update_that_may_have_broken_the_weights() -> None:
    broken: dict[str, Any] = {"cause": "other", "signal": "nonfinite", "severity": "critical"}
    ranks = [warned(None, None, step=20, rank=rank, evidence={"suspect_step": 9.0 + rank}, **broken) for rank in (0, 1)]
    [incident] = of(*ranks, warned(2, 5, step=20, evidence={"suspect_step": 8.0}, **broken))
    assert "resume from a checkpoint before step 8;" in incident.to_do
    [untold] = of(warned(None, None, step=20, **broken))
    assert "resume from a checkpoint before step 20;" in untold.to_do
    [drifted] = of(warned(2, 5, step=4000, raised=3000, evidence={"suspect_step": 3900.0}, **broken))
    assert "before step 3,000;" in drifted.to_do


def test_an_incident_closes_when_all_are_quiet_and_opens_again_with_the_next_warning() -> None:
    first, second = (
        warned(0, head, step=900 + head, raised=100 * head, state="cleared", id=f"a{head}") for head in (1, 2)
    )
    [closed] = of(first, second)
    assert (closed.state, closed.opened_step, closed.closed_step, closed.times) == ("closed", 100, 902, 1)
    assert (closed.to_do, closed.steps_left, closed.act) == ("Nothing.", None, "none")
    [again] = of(first, second, warned(0, 2, step=5000))
    assert (again.state, again.opened_step, again.times, len(again.heads)) == ("open", 5000, 2, 1)
    [same] = of(first, second, warned(0, 3, step=902))
    assert (same.state, same.opened_step, same.times) == ("open", 100, 1), "raised at the step that ended the others"


def test_who_acknowledged_stands_until_the_incident_has_closed() -> None:
    said = Acknowledged(cause="rounding", step=700, who="ann", reason="on it", unix_seconds=5.0)
    [incident] = of(warned(step=700, raised=600), acknowledged=[said])
    assert (incident.state, incident.acknowledged) == ("acknowledged", said)
    [later] = of(warned(step=800, raised=600, state="cleared"), warned(0, 1, step=900), acknowledged=[said])
    assert (later.state, later.acknowledged) == ("open", None)
    [other] = of(warned(step=700, raised=600, cause="score growth"), acknowledged=[said])
    assert other.acknowledged is None


ARRESTED, FAILED = (SwitchOutcome(frozenset({(4, 1)}), 2100, arrested=held) for held in (True, False))


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
def test_a_head_is_a_note_once_a_switch_arrested_it_until_it_is_taken_back_or_warned_about_anew(
    mode: Any, judged: Any, raised: int, state: str, severity: str
) -> None:
    """Its scores may stay past 512 for ever, and the detector's word with them: the cure has made that harmless."""
    past = warned(4, 1, step=9000, raised=raised, severity="critical", forecast_steps=0.0)
    [found] = of(past, modes={} if mode is None else {(4, 1): mode}, judged=judged, policy="auto")
    assert (found.state, found.severity, found.switched) == (state, severity, state != "open")
    if state == "arrested":
        assert found.done == "The head is switched, and the growth has stopped."


def test_a_head_that_goes_on_growing_under_its_cure_makes_the_incident_not_arrested() -> None:
    modes = {(0, 0): "row_corrected", (0, 1): "row_corrected"}
    judged = [
        SwitchOutcome(frozenset({(0, 0)}), 2000, arrested=True),
        SwitchOutcome(frozenset({(0, 1)}), 2000, arrested=False),
    ]
    [incident] = of(warned(0, 0), warned(0, 1), modes=modes, judged=judged, policy="auto")
    assert incident.state == "not arrested"
    assert [(head.head, head.state) for head in incident.heads] == [(1, "not arrested"), (0, "arrested")]


def test_numbers_no_forecast_has_are_not_taken_for_steps() -> None:
    for wild in (float("nan"), float("inf"), -float("inf"), 1e300):
        [incident] = of(warned(forecast_steps=wild))
        assert incident.steps_left is None
    [past] = of(warned(step=100, forecast_steps=-50.0))
    assert (past.harm_step, past.steps_left) == (100, 0.0)


def corrected(head: int = 0, raised: int = 500, at: int = 3000, was: str = "score growth", **more: Any) -> Warned:
    """A warning of rounding that had another cause until step `at`."""
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
        assert incident.severity in ("warning", "critical"), "one head, or one rank, that continues is enough"
    [broken] = of(warned(harm_in_sight=False, signal="nonfinite", cause="other", severity="critical"))
    assert broken.severity == "critical"


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
