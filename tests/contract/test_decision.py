"""Decisions about a warning: the agent's action and the texts for people agree."""

import string
from itertools import product
from typing import Any, get_args

import pytest
from tests.contract.test_incident import incidents_of, warned
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


def warning_of(cause: Any, *, finite: bool = True, **changes: Any) -> Warned:
    if cause == "not finite" or not finite:
        changes = {"signal": "nonfinite", "severity": "critical", **changes}
    return warned(cause="other" if cause == "not finite" else cause, **changes)


def incident_of(cause: Any, *, finite: bool = True, raised: int = 100, evidence: Any = None, **known: Any) -> Incident:
    [found] = incidents_of(
        warning_of(cause, finite=finite, step=raised, raised=raised, evidence=evidence or {}), **known
    )
    return found


@pytest.mark.parametrize(
    ("cause", "policy", "progress", "finite"), list(product(CAUSES, POLICIES, SWITCHED, (True, False)))
)
def test_texts_promise_a_switch_only_if_the_agent_switches_or_proposes_one(
    cause: Any, policy: Any, progress: Progress, finite: bool
) -> None:
    if cause in ("score growth", "other") and not finite:
        cause = "not finite"
    found = incident_of(cause, finite=finite, policy=policy, **SWITCHED[progress])
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
def test_texts_for_rounding_follow_the_policy(policy: Policy, done: str, to_do: str) -> None:
    found = incident_of("rounding", policy=policy, scope="model")
    assert found.done.startswith(done)
    assert found.to_do == to_do


@pytest.mark.parametrize(
    ("step", "to_do"),
    [(1, "Repair what the warning names, and start the run again."), (2, " from a checkpoint before step 2")],
)
@pytest.mark.parametrize("ended", [False, True])
def test_failure_in_step_one_asks_for_a_repair_and_a_later_one_for_a_checkpoint(
    step: int, to_do: str, ended: bool
) -> None:
    assert to_do in incident_of("not finite", raised=step, policy="observe", ended=ended).to_do


def test_failed_mitigation_suggests_a_stronger_mode_if_any_or_a_checkpoint() -> None:
    failed = SWITCHED["not arrested"] | {"policy": "auto"}
    weak = incidents_of(warning_of("rounding"), **failed, mitigation="exact_delta")[0]
    assert weak.to_do.startswith("Switch on to exact_delta+row_corrected, or resume from a checkpoint before step 100")
    assert incident_of("rounding", **failed).to_do.startswith("Resume from a checkpoint before step 100")


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
def test_only_an_active_rounding_warning_about_a_head_calls_for_a_switch(changes: dict[str, Any], calls: bool) -> None:
    assert calls_for_switch(warned(**changes).verdict) is calls


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("progress", ["unswitched", "switched", "not arrested"])
def test_ended_run_asks_only_to_resume_from_a_checkpoint(cause: Any, policy: Any, progress: Progress) -> None:
    found = incident_of(cause, raised=151, policy=policy, ended=True, **SWITCHED[progress])
    assert found.to_do.startswith("The run has ended. Resume it from a checkpoint before step 151 with")
    assert found.ask == "none"
    assert not any(word in found.done + found.to_do for word in ("Stop", "pprove", "waits", "next step"))


FALLING = {"offset": 3.0, "offset_before": 4.0}


@pytest.mark.parametrize(
    ("evidence", "orders", "over"),
    [
        (FALLING, (), True),
        (FALLING | {"score": 9.0, "score_before": 8.0}, (), False),
        (FALLING, [ordered(state="pending", heads=[(0, 0)])], False),
        (FALLING, [ordered(state="cancelled", heads=[(0, 0)])], True),
    ],
)
def test_growth_that_stopped_without_a_pending_order_needs_no_switch(
    evidence: dict[str, float], orders: list[Order], over: bool
) -> None:
    warning = warning_of("rounding", severity="critical", evidence=evidence)
    [found] = incidents_of(warning, policy="observe", scope="model", orders=orders)
    assert found.severity == ("critical" if "score" in evidence else "warning"), "a falling signal is not critical"
    assert (found.done == "The growth has stopped without a switch.") is over
    assert not over or (found.ask, "witch" in found.to_do) == ("none", False)


@pytest.mark.parametrize("in_force", [True, False])
@pytest.mark.parametrize("undone", [True, False])
def test_rejected_or_undone_switch_is_reported_while_it_is_in_force(in_force: bool, undone: bool) -> None:
    changes = {"state": "applied", "mode": "plain"} if undone else {"state": "rejected"}
    order = ordered(heads=[(0, 0)], **changes)
    taken_back_heads = [(0, 0)] if in_force and undone else []
    warning = warning_of("rounding")._replace(rejected=in_force and not undone)
    [found] = incidents_of(warning, policy="observe", orders=[order], held=taken_back_heads)
    assert (found.order, found.ask) == ((order, "none") if in_force else (None, "switch"))


def test_arrested_growth_in_an_ended_run_needs_no_action() -> None:
    found = incident_of("rounding", policy="auto", ended=True, **SWITCHED["arrested"])
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
def test_score_growth_never_leads_to_a_switch_or_a_proposal(clip: Any, done: str, to_do: str, policy: Any) -> None:
    found = incident_of("score growth", raised=151, policy=policy, clip=clip)
    assert (found.act, found.ask) == ("none", "none")
    assert found.done.startswith(done)
    assert to_do in found.to_do


def test_texts_use_only_known_placeholders_and_every_cause_has_a_text_for_ended_runs() -> None:
    known_placeholders = {
        "checkpoint",
        "given",
        "ended",
        "so_far",
        "whose",
        "mitigation",
        "stronger",
        "mode",
        "by",
        "way",
    }
    for texts in (info.texts for info in CAUSES.values()):
        assert "ended" in texts
        for text in texts.values():
            placeholders = {name for words in text[:2] for _, name, _, _ in string.Formatter().parse(words)}
            assert placeholders <= known_placeholders | {None}
