"""Rounding and score growth in one run are one incident: first the switch, and QK-Clip only once that is judged."""

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.contract.test_incident import of, warned
from tests.contract.test_orders import ordered

from foreshock.contract.incident import Acknowledged, Incident, SwitchOutcome, Warned
from foreshock.contract.incident_form import RemedyState

MODES = {(0, 0): "row_corrected"}
CLIP = "qk_clip_always"


def drift(head: int = 0, **changes: Any) -> Warned:
    return warned(0, head, **changes)


def growth(head: int = 1, **changes: Any) -> Warned:
    return warned(0, head, cause="score growth", signal="score", **changes)


def steps_of(incident: Incident) -> list[tuple[str, str]]:
    return [(remedy.name, remedy.state) for remedy in incident.remedies]


def test_two_verdicts_of_different_cause_on_heads_of_one_run_are_one_incident() -> None:
    [both] = of(drift(step=200), growth(step=100), policy="observe", clip="never")
    assert (both.id, both.cause, both.causes) == ("rounding", "rounding", ["rounding", "score growth"])
    assert (both.standing, both.switched, both.opened_step, both.times) == (2, 0, 100, 1)
    assert {head.head: head.causes for head in both.heads} == {0: ["rounding"], 1: ["score growth"]}
    assert both.sentence == (
        "Scores drift as rounding drives them in layer 0 head 0, and scores grow, which rounding was not shown to "
        "cause, in layer 0 head 1, since step 100. First: layer 0 head 1."
    )
    assert both.to_do == (
        "Switch every head to row_corrected. Scores grow too: QK-Clip, which scales weights for good, comes only after "
        "the verdict on the switch."
    )
    assert (both.ask, steps_of(both)) == ("switch", [("switch", "now"), ("qk_clip", "later")])


@pytest.mark.parametrize("arrested", [True, False])
def test_once_the_switch_is_judged_qk_clip_is_asked_for_by_itself_whether_the_switch_held_or_not(
    arrested: bool,
) -> None:
    known: dict[str, Any] = {"policy": "approve", "clip": "never", "modes": MODES}
    [waits] = of(drift(), growth(), **known)
    assert (waits.state, waits.act, steps_of(waits)[1]) == ("switched", "propose", ("qk_clip", "later"))
    assert waits.to_do.startswith("Wait for the verdict on the switch")
    judged = [SwitchOutcome(None, 2000, arrested=arrested)]
    [both] = of(drift(), growth(), judged=judged, **known)
    assert (both.state, both.severity) == ("open" if arrested else "not arrested", "warning")
    assert (both.act, both.ask) == ("propose", "qk_clip")
    assert steps_of(both) == [("switch", "done"), ("qk_clip", "now")]
    stopped = "the growth has stopped." if arrested else "the growth goes on: rounding is not all of it."
    assert both.done == (
        f"Rounding: The head is switched, and {stopped} Score growth: QK-Clip is off. No mode helps: each changes "
        "rounding alone."
    )
    assert both.to_do.startswith("Switch QK-Clip on, which scales weights for good; a dry run shows which.")


def test_a_proposal_of_qk_clip_that_waits_is_not_asked_for_before_the_switch_and_is_after_it() -> None:
    orders = [(None, ordered(state="proposed", mode=CLIP, decided=False))]
    known: dict[str, Any] = {"policy": "approve", "clip": "never", "orders": orders}
    [before] = of(drift(), growth(), **known)
    assert (before.ask, before.order) == ("switch", None)
    [after] = of(drift(), growth(), modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], **known)
    assert (after.ask, after.order) == ("approve", orders[0][1])
    assert after.to_do.startswith("Approve QK-Clip, which scales weights for good; a dry run shows which.")


@pytest.mark.parametrize(
    ("order", "due"),
    [
        ({"state": "proposed"}, False),
        ({"state": "pending"}, False),
        ({"state": "applied"}, False),
        ({"state": "applied", "verification": "not arrested"}, True),
        ({"state": "rejected"}, True),
    ],
)
def test_a_stronger_mode_that_is_left_goes_before_qk_clip_until_it_is_judged_or_refused_by_a_person(
    order: dict[str, Any], due: bool
) -> None:
    applied = order["state"] == "applied"
    modes = {(0, 0): "exact_delta+row_corrected" if applied else "exact_delta"}
    orders = [(None, ordered(mode="exact_delta+row_corrected", **order))]
    drifted = drift()._replace(rejected=order["state"] == "rejected")
    known: dict[str, Any] = {"modes": modes, "judged": [SwitchOutcome(None, 2000, arrested=False)], "clip": "never"}
    [both] = of(drifted, growth(), policy="approve", orders=orders, **known)
    assert (both.remedies[1].state == "now") is due
    [untried] = of(drift(), growth(), **known | {"modes": {(0, 0): "exact_delta"}})
    assert (untried.remedies[1].state, untried.ask) == ("later", "none")


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


def test_where_the_drift_is_over_the_growth_that_stands_on_is_answered_as_such() -> None:
    [left] = of(drift(step=400, raised=100, state="cleared"), growth(step=300), policy="approve", clip="never")
    assert (left.causes, left.state, left.standing) == (["rounding", "score growth"], "open", 1)
    assert "as rounding drives them" not in left.sentence
    assert (left.ask, steps_of(left)) == ("qk_clip", [("qk_clip", "now")])
    [other] = of(drift(step=100), growth(step=400, raised=100, state="cleared"), policy="observe", clip="never")
    assert (other.ask, steps_of(other)) == ("switch", [("switch", "now")])
    assert "QK-Clip" not in other.to_do + other.done


def test_a_head_that_one_rank_tells_as_drifting_and_another_as_growing_is_one_head_of_both_causes() -> None:
    ranks = drift(0, rank=0), growth(0, rank=1, severity="critical")
    [both] = of(*ranks, modes=MODES, judged=[SwitchOutcome(None, 2000, arrested=True)], clip="never")
    [head] = both.heads
    assert (head.causes, both.standing, both.switched) == (["rounding", "score growth"], 1, 1)
    assert (both.state, both.severity, both.ask) == ("open", "critical", "qk_clip")


@pytest.mark.parametrize(("clip", "name"), [(None, "a layer"), ("on", "on"), ("warned", "warned")])
def test_where_qk_clip_cannot_scale_or_is_agreed_to_nobody_is_asked_for_it(clip: str | None, name: str) -> None:
    for judged in ([], [SwitchOutcome(None, 2000, arrested=True)]):
        [both] = of(drift(), growth(), clip=clip, policy="auto", modes=MODES, judged=judged)
        assert both.ask == "none", name
        assert "Switch QK-Clip on" not in both.to_do
        assert ("Lower the learning rate" in both.to_do) or clip == "on" or not judged


def test_what_is_not_finite_or_has_ended_is_resumed_and_nothing_is_proposed() -> None:
    [broken] = of(drift(signal="nonfinite", severity="critical"), growth(), policy="auto", clip="never")
    assert broken.to_do.startswith("Stop the run and resume from a checkpoint")
    assert (broken.ask, broken.remedies) == ("none", [])
    [ended] = of(drift(), growth(), policy="auto", clip="never", ended=True)
    assert ended.to_do.startswith("The run has ended. Resume it from a checkpoint before step 100 with row_corrected")
    assert (ended.ask, ended.remedies) == ("none", [])


def test_the_pages_name_every_state_of_a_remedy_and_the_order_in_which_they_come() -> None:
    docs = Path(__file__).parents[2] / "docs"
    service, growing = (docs / "service.md").read_text(), (docs / "score-growth.md").read_text()
    assert [state for state in get_args(RemedyState) if f"\n| {state} | " not in service] == []
    [both] = of(drift(), growth(), clip="never")
    titles = {"switch": "**The switch**", "qk_clip": "**QK-Clip**"}
    listed = [f"\n{place}. {titles[one.name]}" for place, one in enumerate(both.remedies, 1)]
    assert [line for line in listed if line not in growing] == []


HEADS = ("absent", "quiet", "unswitched", "switched", "arrested", "not arrested")
"""What may be of a head that rounding drives."""
ORDERS = (None, ("row_corrected", "proposed"), ("row_corrected", "delivered"), (CLIP, "proposed"), (CLIP, "rejected"))


def _has_its_turn(drifts: tuple[str, ...], grows: str, order: tuple[str, str] | None) -> bool:
    """The truth of QK-Clip: scores grow, and no head that rounding drives waits for a switch or for its verdict."""
    stands = {one for one in drifts if one in HEADS[2:]}
    waits = order is not None and order[0] != CLIP and bool(stands)
    return grows == "stands" and stands <= {"arrested", "not arrested"} and not waits


@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
@pytest.mark.parametrize("clip", [None, "never", "warned", "on"])
def test_no_remedy_is_ever_asked_for_that_the_causes_that_stand_do_not_call_for(policy: Any, clip: Any) -> None:
    """Every state of two heads that may drift and of one that may grow, with every order: compared with the truth."""
    for first, second, grows, order in product(HEADS, HEADS, ("absent", "quiet", "stands"), ORDERS):
        flood, modes, judged = [], {}, []
        for number, state in enumerate((first, second)):
            if state != "absent":
                flood.append(drift(number, state="cleared" if state == "quiet" else "raised"))
            if state in HEADS[3:]:
                modes[0, number] = "row_corrected"
            if state in HEADS[4:]:
                judged.append(SwitchOutcome(frozenset({(0, number)}), 2000, arrested=state == "arrested"))
        if grows != "absent":
            refused = order == (CLIP, "rejected")
            flood.append(growth(2, state="cleared" if grows == "quiet" else "raised")._replace(rejected=refused))
        orders = [] if order is None else [(None, ordered(mode=order[0], state=order[1], decided=False))]
        known = {"policy": policy, "clip": clip, "modes": modes, "judged": judged, "orders": orders}
        found = of(*flood, **known)
        case = f"{first}, {second}, growth {grows}, {order}, {policy}, {clip}"
        assert len(found) == bool(flood), case
        for incident in found:
            drifts = any(state in HEADS[2:] for state in (first, second))
            turn = _has_its_turn((first, second), grows, order)
            asks = {"never": order != (CLIP, "rejected"), "warned": order == (CLIP, "proposed")}.get(clip, False)
            about = None if incident.order is None else incident.order.mode
            clips = incident.ask == "qk_clip" or (incident.ask == "approve" and about == CLIP)
            assert clips == (turn and asks), case
            assert (("qk_clip", "now") in steps_of(incident)) == (turn and clip in ("never", "warned")), case
            assert (incident.ask in ("switch", "approve") and not clips) <= (drifts and not turn), case
            assert (incident.act == "switch") <= drifts, case
            assert ("QK-Clip" in incident.done + incident.to_do) <= (grows == "stands"), case
            assert ("row_corrected" in incident.to_do) <= drifts, case
