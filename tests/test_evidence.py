"""What docs/evidence.md says of the paper's model is what its recordings show."""

from pathlib import Path

import numpy as np
import pytest

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.modes import Mode
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.lab.scoring.score import score_traces

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "src/foreshock/lab/traces/paper"
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text().split("### The paper's model explodes")[1].split("\n### ")[0]
FAILING = (1, 9)
"""Layer and head."""


def run(name: str, seed: int = 1) -> Trace:
    return read_trace(RUNS / f"{name}_seed{seed}.trace.xz")


def first_warning(trace: Trace) -> wire.Verdict:
    """The first warning that was raised while the run was recorded."""
    return next(e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised")


def explosion(trace: Trace) -> int | None:
    """The first step at which the loss is a quarter above what it was 50 to 200 steps before, and stays a fifth above
    in the mean of 20 steps."""
    loss = trace.steps.loss
    for at in range(200, len(loss) - 20):
        before = float(np.median(loss[at - 200 : at - 50]))
        if loss[at] > 1.25 * before and loss[at : at + 20].mean() > 1.2 * before:
            return int(trace.steps.step[at])
    return None


def offsets(trace: Trace) -> dict[int, float]:
    """Of the failing head, by step."""
    row = trace.heads.index(FAILING)
    return {s.step: catalog.read("head.score_offset", w)[row] for s in trace.samples if (w := s.words()) is not None}


@pytest.mark.parametrize(
    ("name", "exploded"),
    [
        ("paper-gpt2-64k_flash-untreated", 4358),
        ("paper-gpt2-64k-bias_flash-untreated", 4567),
        ("paper-gpt2-64k_untreated", 3755),
        ("paper-gpt2-64k_flash-rescued", None),
        ("paper-gpt2-64k_row-corrected", None),
        ("branched/paper-gpt2-64k_control", None),
        ("branched/paper-gpt2-64k_exact-delta", 3702),
        ("branched/paper-gpt2-64k_row-corrected", 3702),
        ("branched/paper-gpt2-64k_qk-clip", 3724),
    ],
)
def test_the_paper_s_model_explodes_where_it_is_said_to_and_nowhere_else(name: str, exploded: int | None) -> None:
    trace = run(name)
    assert explosion(trace) == exploded
    last = int(trace.steps.step[-1])
    said = f"not by {last:,}" if exploded is None else f"{exploded:,}"
    assert said in EVIDENCE


@pytest.mark.parametrize(
    ("name", "seed", "cause"),
    [
        ("paper-gpt2-64k_flash-rescued", 1, "rounding"),
        ("paper-gpt2-64k_flash-rescued", 2, "rounding"),
        ("paper-gpt2-64k_untreated", 1, "rounding"),
        ("paper-gpt2-64k_flash-untreated", 1, "score growth"),
        ("paper-gpt2-64k-bias_flash-untreated", 1, "score growth"),
    ],
)
def test_the_table_names_the_first_warning_of_each_run_and_its_cause(name: str, seed: int, cause: str) -> None:
    warning = first_warning(run(name, seed))
    assert (warning.layer, warning.cause) == (1, cause)
    assert f"| {warning.step:,}, {cause} " in EVIDENCE


def warned(trace: Trace) -> int:
    return first_warning(trace).step


def test_the_warnings_came_as_long_before_the_untreated_runs_failed_as_is_said() -> None:
    ours = run("paper-gpt2-64k_untreated")
    with_biases = run("paper-gpt2-64k-bias_flash-untreated")
    within = sorted(
        (explosion(trace) or 0) - warned(trace) for trace in (run("paper-gpt2-64k_flash-untreated"), with_biases, ours)
    )
    assert f"warned about {within[0]:,}, {within[1]:,} and {within[2]:,} steps before they exploded" in EVIDENCE
    apart = (explosion(run("paper-gpt2-64k_flash-untreated")) or 0) - warned(run("paper-gpt2-64k_flash-rescued"))
    assert f"came {apart:,} steps before its untreated twin exploded, which compares two runs" in EVIDENCE
    raised = (e for e in ours.events if isinstance(e, wire.Verdict) and (e.state, e.cause) == ("raised", "rounding"))
    first, second, *_ = raised
    assert (second.layer, second.head) == FAILING
    assert f"named head {first.head} first, and head {second.head}, which failed, at {second.step:,}" in EVIDENCE


@pytest.mark.parametrize("seed", [1, 2])
def test_the_switched_runs_were_warned_about_once_and_every_head_was_switched_at_that(seed: int) -> None:
    trace = run("paper-gpt2-64k_flash-rescued", seed)
    raised = [e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised"]
    assert len(raised) == 1
    assert explosion(trace) is None
    modes = {s.step: set(s.modes.numpy().tolist()) for s in trace.samples if s.modes is not None}
    assert all(found == {0} for step, found in modes.items() if step <= raised[0].step)
    assert all(found == {int(Mode.ROW_CORRECTED)} for step, found in modes.items() if step > raised[0].step + 10)


def test_a_score_of_100_was_noted_earlier_and_in_the_run_that_did_not_fail_as_well() -> None:
    switched, corrected = (run(f"paper-gpt2-64k_{variant}") for variant in ("flash-rescued", "row-corrected"))
    note = next(e for e in switched.events if isinstance(e, wire.Verdict))
    assert (note.severity, note.signal) == ("info", "score")
    assert f"at step {note.step:,}" in EVIDENCE
    assert "layer 1 head 9" not in note.sentence
    assert any(isinstance(e, wire.Verdict) and e.severity == "info" for e in corrected.events)


def test_the_offset_of_its_failing_head_grows_unless_rows_are_corrected_and_shrinks_in_float32() -> None:
    failing, corrected = (offsets(run(f"paper-gpt2-64k_{variant}")) for variant in ("flash-untreated", "row-corrected"))
    control = list(offsets(run("branched/paper-gpt2-64k_control")).values())
    assert f"from {failing[1500]:.1f} nats at step 1,500 to {failing[2960]:.0f} at 2,960" in EVIDENCE
    assert max(map(abs, corrected.values())) < 5
    switched = offsets(run("paper-gpt2-64k_flash-rescued"))
    assert f"from {switched[2560]:.0f} nats to {abs(switched[6000]):.0f}" in EVIDENCE
    assert f"from {control[0]:,.0f} to {control[-1]:.0f}" in EVIDENCE


@pytest.mark.parametrize(
    ("variant", "seed"),
    [("flash-untreated", 1), ("row-corrected", 1), ("untreated", 1), ("flash-rescued", 1), ("flash-rescued", 2)],
)
def test_the_losses_of_its_table_are_means_of_a_hundred_steps(variant: str, seed: int) -> None:
    steps = run(f"paper-gpt2-64k_{variant}", seed).steps
    means = [steps.loss[(steps.step > end - 100) & (steps.step <= end)].mean() for end in (3500, 4000, 4500)]
    assert ", ".join(f"{mean:.3f}" for mean in means) in EVIDENCE


@pytest.mark.full
def test_today_s_detectors_name_no_cause_in_recordings_of_a_sample_of_rows_and_leave_the_treated_run_alone() -> None:
    flash, with_biases = score_traces(
        [run("paper-gpt2-64k_flash-untreated"), run("paper-gpt2-64k-bias_flash-untreated")]
    )
    assert (flash.first_warning_step, flash.layer, flash.head, flash.cause) == (1220, 3, 6, "score growth")
    assert (with_biases.first_warning_step, with_biases.layer, with_biases.cause) == (3160, 1, "score growth")
    assert "Today's detectors warn of these recordings at 1,220 (layer 3) and 3,160, without a named cause." in EVIDENCE
    quiet = [run("paper-gpt2-64k_row-corrected"), run("paper-gpt2-64k_flash-rescued", 2)]
    assert all(score.warnings == 0 for score in score_traces(quiet))
    [rescued] = score_traces([run("paper-gpt2-64k_flash-rescued", 1)])
    assert (rescued.warnings, rescued.first_warning_step, rescued.layer) == (1, 1220, 3)
    assert "the one of seed 1 is warned about at 1,220, at layer 3, and that of seed 2 is not" in EVIDENCE
