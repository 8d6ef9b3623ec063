"""One decision: what machines do about a warning, and what people are told, never say different things."""

import string
from itertools import product
from typing import Any, get_args

import pytest
from tests.contract.test_incident import of, warned
from tests.contract.test_orders import ordered

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import Progress, act_on, calls_for_switch
from foreshock.contract.incident import Incident, SwitchOutcome, Warned
from foreshock.contract.orders import Order
from foreshock.contract.wire import Policy

POLICIES: tuple[Policy | None, ...] = (*get_args(Policy), None)
SWITCHED: dict[Progress, dict[str, Any]] = {
    "unswitched": {},
    "switched": {"modes": {(0, 0): "row_corrected"}},
    "arrested": {"modes": {(0, 0): "row_corrected"}, "judged": [SwitchOutcome(None, 2000, arrested=True)]},
    "not arrested": {"modes": {(0, 0): "row_corrected"}, "judged": [SwitchOutcome(None, 2000, arrested=False)]},
}


def of_cause(cause: Any, *, finite: bool = True, **changes: Any) -> Warned:
    if cause == "not finite" or not finite:
        changes = {"signal": "nonfinite", "severity": "critical", **changes}
    return warned(cause="other" if cause == "not finite" else cause, **changes)


def made(cause: Any, *, finite: bool = True, raised: int = 100, evidence: Any = None, **known: Any) -> Incident:
    [found] = of(of_cause(cause, finite=finite, step=raised, raised=raised, evidence=evidence or {}), **known)
    return found


@pytest.mark.parametrize(
    ("cause", "policy", "progress", "finite"), list(product(CAUSES, POLICIES, SWITCHED, (True, False)))
)
def test_words_promise_a_switch_only_where_a_machine_makes_one(
    cause: Any, policy: Any, progress: Progress, finite: bool
) -> None:
    if cause in ("score growth", "other") and not finite:
        cause = "not finite"
    found = made(cause, finite=finite, policy=policy, **SWITCHED[progress])
    assert found.act == act_on(cause, policy)
    assert ("the agent switches" in found.done) <= (found.act == "switch")
    assert ("waits for your approval" in found.done) <= (found.act == "propose")
    if cause != "rounding":
        assert found.act == "none"
        moved = finite and cause == "attention kernel" and progress != "unswitched"
        assert found.done.startswith("Every layer with wrong rows" if moved else "No head was switched")
        assert "witch" not in found.to_do
        assert "resume from a checkpoint" in found.to_do


@pytest.mark.parametrize(
    ("policy", "done", "to_do"),
    [
        ("observe", "No head was switched: the run's policy is observe.", "Switch every head to row_corrected."),
        ("approve", "A switch of every head to row_corrected waits", "Approve the switch to row_corrected."),
        ("auto", "Policy auto: the agent switches every head to row_corrected", "Check whether the growth stops."),
    ],
)
def test_rounding_is_answered_as_the_policy_says(policy: Policy, done: str, to_do: str) -> None:
    found = made("rounding", policy=policy, scope="model")
    assert found.done.startswith(done)
    assert found.to_do == to_do


@pytest.mark.parametrize(
    ("step", "to_do"),
    [(1, "Repair what the warning names, and start the run again."), (2, " from a checkpoint before step 2")],
)
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_whose_first_step_failed_is_repaired_and_a_later_failure_leads_to_a_checkpoint(
    step: int, to_do: str, ended: bool
) -> None:
    assert to_do in made("not finite", raised=step, policy="observe", ended=ended).to_do


def test_a_cure_that_fails_leads_to_a_stronger_one_where_there_is_one_and_to_a_checkpoint() -> None:
    failed = SWITCHED["not arrested"] | {"policy": "auto"}
    weak = of(of_cause("rounding"), **failed, mitigation="exact_delta")[0]
    assert weak.to_do.startswith("Switch on to exact_delta+row_corrected, or resume from a checkpoint before step 100")
    assert made("rounding", **failed).to_do.startswith("Resume from a checkpoint before step 100")


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, True),
        ({"severity": "info"}, False),
        ({"state": "cleared"}, False),
        ({"cause": "score growth"}, False),
        ({"cause": "other", "signal": "nonfinite"}, False),
        ({"layer": None, "head": None}, False),
        ({"signal": "nonfinite"}, True),
    ],
)
def test_only_a_standing_warning_of_rounding_about_a_head_calls_for_a_switch(
    changes: dict[str, Any], calls: bool
) -> None:
    assert calls_for_switch(warned(**changes).verdict) is calls


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("progress", ["unswitched", "switched", "not arrested"])
def test_of_a_run_that_has_ended_nobody_is_asked_to_stop_or_approve_or_switch_anything(
    cause: Any, policy: Any, progress: Progress
) -> None:
    found = made(cause, raised=151, policy=policy, ended=True, **SWITCHED[progress])
    assert found.to_do.startswith("The run has ended. Resume it from a checkpoint before step 151 with")
    assert found.ask == "none"
    assert not any(word in found.done + found.to_do for word in ("Stop", "pprove", "waits", "next step"))


FALLS = {"offset": 3.0, "offset_before": 4.0}


@pytest.mark.parametrize(
    ("evidence", "orders", "over"),
    [
        (FALLS, (), True),
        (FALLS | {"score": 9.0, "score_before": 8.0}, (), False),
        (FALLS, [ordered(state="pending", heads=[(0, 0)])], False),
        (FALLS, [ordered(state="cancelled", heads=[(0, 0)])], True),
    ],
)
def test_what_has_stopped_growing_and_waits_for_no_order_asks_for_no_switch_and_says_that_it_is_over(
    evidence: dict[str, float], orders: list[Order], over: bool
) -> None:
    warning = of_cause("rounding", severity="critical", evidence=evidence)
    [found] = of(warning, policy="observe", scope="model", orders=orders)
    assert found.severity == ("critical" if "score" in evidence else "warning"), "what falls is no longer critical"
    assert (found.done == "The growth has stopped without a switch.") is over
    assert not over or (found.ask, "witch" in found.to_do) == ("none", False)


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("taken_back", [True, False])
def test_a_rejection_or_a_switch_that_was_taken_back_is_told_while_it_holds(holds: bool, taken_back: bool) -> None:
    changes = {"state": "applied", "mode": "plain"} if taken_back else {"state": "rejected"}
    order = ordered(heads=[(0, 0)], **changes)
    held = [(0, 0)] if holds and taken_back else []
    warning = of_cause("rounding")._replace(rejected=holds and not taken_back)
    [found] = of(warning, policy="observe", orders=[order], held=held)
    assert (found.order, found.ask) == ((order, "none") if holds else (None, "switch"))


def test_of_a_run_that_has_ended_what_was_arrested_needs_nothing() -> None:
    found = made("rounding", policy="auto", ended=True, **SWITCHED["arrested"])
    assert (found.done, found.to_do) == ("The head is switched, and the growth has stopped.", "Nothing.")


@pytest.mark.parametrize(
    ("clip", "done", "to_do"),
    [
        ("never", "No head was switched", 'resume from a checkpoint before step 151 with qk_clip="always"'),
        (None, "No head was switched", "with attention='kernels' and qk_clip='always'"),
        ("of a later version", "No head was switched", "with attention='kernels' and qk_clip='always'"),
        ("warned", "QK-Clip starts with the next new warning", "Lower the learning rate"),
        ("on", "QK-Clip is on", "Watch the loss"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_scores_that_grow_are_left_to_people_whatever_the_policy(clip: Any, done: str, to_do: str, policy: Any) -> None:
    found = made("score growth", raised=151, policy=policy, clip=clip)
    assert (found.act, found.ask) == ("none", "none")
    assert found.done.startswith(done)
    assert to_do in found.to_do


def test_the_texts_ask_for_nothing_but_what_is_filled_in_and_every_cause_has_one_for_the_end() -> None:
    filled = {"checkpoint", "given", "ended", "so_far", "whose", "mitigation", "stronger", "mode", "by", "way"}
    for texts in (info.texts for info in CAUSES.values()):
        assert "ended" in texts
        for text in texts.values():
            asked = {name for words in text[:2] for _, name, _, _ in string.Formatter().parse(words)}
            assert asked <= filled | {None}
