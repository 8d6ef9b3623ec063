"""One decision: what machines do about a warning, and what people are told, never say different things."""

from itertools import product
from typing import Any, get_args

import pytest

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import Progress, act_on, calls_for_switch, decision
from foreshock.contract.wire import Policy, Verdict

POLICIES: tuple[Policy | None, ...] = (*get_args(Policy), None)
EVERY = list(product(CAUSES, POLICIES, get_args(Progress), (True, False)))


def verdict(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {"severity": "warning", "cause": "rounding", "signal": "offset", "layer": 0, "head": 0}
    return Verdict(id="v", step=10, state="raised", sentence="x", **{**fields, **changes})


@pytest.mark.parametrize(("cause", "policy", "progress", "finite"), EVERY)
def test_words_promise_a_switch_only_where_a_machine_makes_one(
    cause: Any, policy: Any, progress: Any, finite: bool
) -> None:
    made = decision(cause, policy, mitigation="row_corrected", progress=progress, finite=finite, heads=3, switched=1)
    assert made.act == act_on(cause, policy)
    assert ("the agent switches" in made.done) <= (made.act == "switch")
    assert ("waits for your approval" in made.done) <= (made.act == "propose")
    if cause != "rounding":
        assert made.act == "none"
        assert made.done.startswith("Nothing is switched")
        assert "witch" not in made.to_do
        assert "resume from a checkpoint" in made.to_do


@pytest.mark.parametrize(
    ("policy", "done", "to_do"),
    [
        ("observe", "Nothing is switched: the run's policy is observe.", "Switch every head to row_corrected."),
        ("approve", "A switch of every head to row_corrected waits", "Approve the switch to row_corrected."),
        ("auto", "Policy auto: the agent switches every head to row_corrected", "Look whether the growth stops."),
    ],
)
def test_rounding_is_answered_as_the_policy_says(policy: Policy, done: str, to_do: str) -> None:
    made = decision("rounding", policy, mitigation="row_corrected", scope="model", heads=4)
    assert made.done.startswith(done)
    assert made.to_do == to_do


@pytest.mark.parametrize(
    ("step", "back"),
    [(1, "where it began"), (2, "a checkpoint before step 2"), (None, "a checkpoint before the first")],
)
def test_who_is_sent_back_to_before_the_first_step_is_not_asked_for_a_checkpoint(step: int | None, back: str) -> None:
    for ended in (False, True):
        made = decision("not finite", "observe", mitigation="row_corrected", before_step=step, ended=ended)
        assert f" from {back}" in made.to_do


def test_a_cure_that_fails_leads_to_a_stronger_one_where_there_is_one_and_to_a_checkpoint() -> None:
    weak = decision("rounding", "auto", mitigation="exact_delta", progress="not arrested", before_step=3375)
    assert weak.to_do.startswith(
        "Switch on to exact_delta+row_corrected, or resume from a checkpoint before step 3,375"
    )
    strong = decision("rounding", "auto", mitigation="row_corrected", progress="not arrested", before_step=3375)
    assert strong.to_do.startswith("Resume from a checkpoint before step 3,375")


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
    assert calls_for_switch(verdict().model_copy(update=changes)) is calls


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("progress", ["unswitched", "switched", "not arrested"])
def test_of_a_run_that_has_ended_nobody_is_asked_to_stop_or_approve_or_switch_anything(
    cause: Any, policy: Any, progress: Any
) -> None:
    made = decision(cause, policy, mitigation="row_corrected", progress=progress, before_step=151, ended=True)
    assert made.to_do.startswith("The run has ended. Resume it from a checkpoint before step 151 with")
    assert made.ask == "none"
    assert not any(word in made.done + made.to_do for word in ("Stop", "pprove", "waits", "next step"))


def test_what_has_stopped_growing_by_itself_asks_for_no_switch_and_says_that_it_is_over() -> None:
    made = decision("rounding", "observe", mitigation="row_corrected", scope="model", heads=1, over=True)
    assert made.done == "Nothing grows any more, without a switch."
    assert (made.ask, "witch" in made.to_do) == ("none", False)


@pytest.mark.parametrize(
    ("clip", "done", "to_do"),
    [
        ("never", "Nothing is switched", 'resume from a checkpoint before step 151 with qk_clip="always"'),
        (None, "Nothing is switched", "with attention='kernels' and qk_clip='always'"),
        ("warned", "QK-Clip starts with the next new warning", "Lower the learning rate"),
        ("on", "QK-Clip is on", "Watch the loss"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_scores_that_grow_are_left_to_people_whatever_the_policy(clip: Any, done: str, to_do: str, policy: Any) -> None:
    made = decision("score growth", policy, mitigation="row_corrected", clip=clip, heads=1, before_step=151)
    assert (made.act, made.ask) == ("none", "none")
    assert made.done.startswith(done)
    assert to_do in made.to_do
