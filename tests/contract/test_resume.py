"""The checkpoint that a failed run resumes from, compared with a brute-force search, and the resume commands."""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_incident import incidents_of, warned

from foreshock.contract.causes import IncidentCause
from foreshock.contract.incident import Incident
from foreshock.contract.resume import ResumePlan, label_of, resume_plan
from foreshock.contract.wire import Checkpoint


def checkpoint(step: int, trainer: str = "transformers", *, requested: bool = False) -> Checkpoint:
    return Checkpoint(step=step, path=f"out/checkpoint-{step}", trainer=trainer, requested=requested)


def opened(step: int, **changes: object) -> Incident:
    [found] = incidents_of(warned(step=step))
    return found.model_copy(update=changes)


def plan(*checkpoints: Checkpoint, incidents: tuple[Incident, ...], ended: bool = True) -> ResumePlan:
    return resume_plan("r", checkpoints, incidents, mitigation="row_corrected", ended=ended)


@given(st.sets(st.integers(1, 60)), st.lists(st.tuples(st.integers(1, 60), st.none() | st.integers(1, 40)), max_size=3))
def test_newest_checkpoint_outside_all_incidents_and_before_open_ones_is_chosen(
    steps: set[int], spans: list[tuple[int, int | None]]
) -> None:
    found = tuple(
        opened(1, before_step=first, closed_step=None if length is None else first + length, severity="warning")
        for first, length in spans
    )
    found_plan = plan(*(checkpoint(step) for step in steps), incidents=found)
    covered = {
        step for step in steps for first, length in spans if first <= step and (length is None or step < first + length)
    }
    good = [step for step in steps - covered if all(step < first for first, length in spans if length is None)]
    assert (found_plan.checkpoint and found_plan.checkpoint.step) == max(good, default=None)
    assert [one.step for one in found_plan.checkpoints] == sorted(steps, reverse=True)
    open_ones = any(length is None for _, length in spans)
    assert [one.step for one in found_plan.checkpoints if one.pinned] == ([max(good)] if good and open_ones else [])


@pytest.mark.parametrize(
    ("causes", "severity"),
    [
        (["not finite"], "warning"),
        (["rounding", "not finite"], "warning"),
        (["attention kernel"], "warning"),
        (["rounding"], "critical"),
    ],
)
def test_checkpoints_during_a_harmful_incident_are_labelled_after_harm(causes: list[str], severity: str) -> None:
    harm = opened(1, cause=causes[0], causes=causes, severity=severity, before_step=50, closed_step=90)
    assert [label_of(step, [harm]) for step in (49, 50, 89, 90)] == ["clean", "after harm", "after harm", "clean"]


@pytest.mark.parametrize(
    ("warnings", "labels"),
    [
        ([{"severity": "critical", "evidence": {"critical_step": 70.0}}], ("warning", "harm", "harm")),
        # a second head with a less severe warning before the harm
        ([{"severity": "critical", "evidence": {"critical_step": 70.0}}, {"head": 1}], ("warning", "harm", "harm")),
        ([{"severity": "critical"}], ("harm", "harm", "harm")),  # from an older agent
        ([{"evidence": {"critical_step": 70.0}}], ("warning", "warning", "warning")),
        (
            [{"severity": "critical", "signal": "nonfinite", "evidence": {"suspect_step": 71.0}}],
            ("warning", "warning", "harm"),
        ),
    ],
)
def test_checkpoint_between_warning_and_harm_is_labelled_after_a_warning(
    warnings: list[dict[str, Any]], labels: tuple[str, ...]
) -> None:
    found = incidents_of(*(warned(step=90, raised=50, **each) for each in warnings))
    words = {"warning": "after a warning", "harm": "after harm"}
    assert [label_of(step, found) for step in (49, 50, 70, 90)] == ["clean", *(words[each] for each in labels)]


SWITCH_COMMAND = 'foreshock switch r --mode row_corrected --reason "the run failed here before"'


@pytest.mark.parametrize(
    ("trainer", "loads", "attaches", "switches"),
    [
        ("transformers", 'trainer.train(resume_from_checkpoint="{path}")', "TransformersCallback(", SWITCH_COMMAND),
        ("lightning", 'trainer.fit(model, ckpt_path="{path}")', "LightningCallback(", SWITCH_COMMAND),
        ("accelerate", 'accelerator.load_state("{path}")', "AccelerateTracker(model, ", "tracker.agent.set_mode("),
        ("torchtitan", "--checkpoint.load_step 50", "watch_torchtitan(trainer, ", "agent.set_mode("),
        ("a_newer_one", "agent.begin_at(50)", "attach(model, ", "agent.set_mode("),
    ],
)  # fmt: skip
def test_resume_commands_fit_the_trainer_and_the_cause(trainer: str, loads: str, attaches: str, switches: str) -> None:
    def lines(cause: IncidentCause) -> list[str]:
        return plan(checkpoint(50, trainer), incidents=(opened(70, causes=[cause], cause=cause),)).commands

    load = loads.format(path="out/checkpoint-50")
    *first, switch = lines("rounding")
    assert (first[-1].startswith(load), switch.startswith(switches), "row_corrected" in switch) == (True, True, True)
    settings: dict[IncidentCause, str] = {"score growth": 'qk_clip="always"', "attention kernel": 'attention="kernels"'}
    for cause, setting in settings.items():
        attach, *rest = lines(cause)
        assert attach.startswith(f'{attaches}run="r", {setting})')
        assert rest[-1].startswith(load)
    both = opened(70, causes=["rounding", "not finite"])
    assert "leave out the batches" in plan(checkpoint(50, trainer), incidents=(both,)).commands[-1]


def test_protected_copy_of_a_checkpoint_is_preferred() -> None:
    again = checkpoint(50).model_copy(update={"path": "out/foreshock-clean-checkpoint-50"})
    found_plan = plan(checkpoint(40), checkpoint(50), checkpoint(60), again, incidents=(opened(55),))
    assert found_plan.checkpoint is not None
    assert found_plan.checkpoint.path == again.path
    assert [one.path for one in found_plan.checkpoints if one.pinned] == [again.path]
    again = checkpoint(50, trainer="torchtitan").model_copy(update={"path": "my out/foreshock-clean-50"})
    first = again.model_copy(update={"path": "my out/step-50"})
    [copied, loaded, *_] = plan(again, first, incidents=(opened(55),)).commands
    assert copied == "cp -al 'my out/foreshock-clean-50' 'my out/step-50'"
    assert loaded == "--checkpoint.load_step 50"


def test_plan_without_a_clean_checkpoint_says_so_and_a_healthy_run_needs_none() -> None:
    drift = opened(70)
    without_checkpoint = plan(incidents=(drift,))
    assert "no checkpoint was reported" in without_checkpoint.sentence
    assert "a checkpoint before step 70" in without_checkpoint.sentence
    assert without_checkpoint.checkpoint is None
    grown = opened(70, causes=["score growth"])
    harmed = plan(checkpoint(80, "lightning"), incidents=(grown,))
    assert "none of the 1 reported checkpoints is clean" in harmed.sentence
    assert [one.partition("run=")[0] for one in harmed.commands] == ["LightningCallback("]
    [switch] = resume_plan("it's; r", [checkpoint(80)], [drift], mitigation="row_corrected", ended=True).commands
    assert shlex.split(switch)[2] == "it's; r"
    healthy = plan(checkpoint(80), incidents=(), ended=False)
    assert (healthy.commands, healthy.checkpoint) == ([], None)
    assert "need not be resumed" in healthy.sentence
