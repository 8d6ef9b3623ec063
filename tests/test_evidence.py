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


def raised(trace: Trace) -> list[wire.Verdict]:
    """The warnings that were raised while the run was recorded."""
    return [e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised"]


def first_warning(trace: Trace) -> wire.Verdict:
    return raised(trace)[0]


def explosion(trace: Trace) -> int | None:
    """The first step at which the loss is a quarter above what it was 50 to 200 steps before, and stays a fifth above
    in the mean of 20 steps."""
    loss = trace.steps.loss
    for at in range(200, len(loss) - 20):
        before = float(np.median(loss[at - 200 : at - 50]))
        if loss[at] > 1.25 * before and loss[at : at + 20].mean() > 1.2 * before:
            return int(trace.steps.step[at])
    return None


@pytest.mark.parametrize(
    ("name", "seed", "exploded", "cause"),
    [
        ("paper-gpt2-64k_flash-untreated", 1, 4358, "score growth"),
        ("paper-gpt2-64k-bias_flash-untreated", 1, 4567, "score growth"),
        ("paper-gpt2-64k_untreated", 1, 3755, "rounding"),
        ("paper-gpt2-64k_flash-rescued", 1, None, "rounding"),
        ("paper-gpt2-64k_flash-rescued", 2, None, "rounding"),
        ("paper-gpt2-64k_row-corrected", 1, None, None),
        ("branched/paper-gpt2-64k_control", 1, None, None),
        ("branched/paper-gpt2-64k_exact-delta", 1, 3702, None),
        ("branched/paper-gpt2-64k_row-corrected", 1, 3702, None),
        ("branched/paper-gpt2-64k_qk-clip", 1, 3724, None),
    ],
)
def test_each_run_explodes_and_is_warned_about_where_the_table_says(
    name: str, seed: int, exploded: int | None, cause: str | None
) -> None:
    trace = run(name, seed)
    assert explosion(trace) == exploded
    last = int(trace.steps.step[-1])
    assert (f"not by {last:,}" if exploded is None else f"{exploded:,}") in EVIDENCE
    if cause is not None:
        warning = first_warning(trace)
        assert (warning.layer, warning.cause) == (1, cause)
        assert f"| {warning.step:,}, {cause} " in EVIDENCE
    if not name.startswith("branched/") and "-bias" not in name:
        steps = trace.steps
        means = [steps.loss[(steps.step > end - 100) & (steps.step <= end)].mean() for end in (3500, 4000, 4500)]
        assert ", ".join(f"{mean:.3f}" for mean in means) in EVIDENCE


def test_the_warnings_came_as_long_before_the_untreated_runs_failed_as_is_said() -> None:
    ours, flash, biased = (
        run(f"paper-gpt2-64k{name}") for name in ("_untreated", "_flash-untreated", "-bias_flash-untreated")
    )
    within = sorted((explosion(trace) or 0) - first_warning(trace).step for trace in (ours, flash, biased))
    assert f"warned about {within[0]:,}, {within[1]:,} and {within[2]:,} steps before they exploded" in EVIDENCE
    apart = (explosion(flash) or 0) - first_warning(run("paper-gpt2-64k_flash-rescued")).step
    assert f"came {apart:,} steps before its untreated twin exploded, which compares two runs" in EVIDENCE
    first, second, *_ = (verdict for verdict in raised(ours) if verdict.cause == "rounding")
    assert (second.layer, second.head) == FAILING
    assert f"named head {first.head} first, and head {second.head}, which failed, at {second.step:,}" in EVIDENCE


@pytest.mark.parametrize("seed", [1, 2])
def test_the_switched_runs_were_warned_about_once_and_every_head_was_switched_at_that(seed: int) -> None:
    trace = run("paper-gpt2-64k_flash-rescued", seed)
    [warning] = raised(trace)
    modes = {s.step: set(s.modes.numpy().tolist()) for s in trace.samples if s.modes is not None}
    assert all(found == {0} for step, found in modes.items() if step <= warning.step)
    assert all(found == {int(Mode.ROW_CORRECTED)} for step, found in modes.items() if step > warning.step + 10)


def test_the_offset_of_its_failing_head_grows_unless_rows_are_corrected_and_shrinks_in_float32() -> None:
    def offsets(name: str) -> dict[int, float]:
        trace = run(name)
        row, key = trace.heads.index(FAILING), "head.score_offset"
        return {s.step: catalog.read(key, words)[row] for s in trace.samples if (words := s.words()) is not None}

    failing = offsets("paper-gpt2-64k_flash-untreated")
    assert f"from {failing[1500]:.1f} nats at step 1,500 to {failing[2960]:.0f} at 2,960" in EVIDENCE
    assert max(map(abs, offsets("paper-gpt2-64k_row-corrected").values())) < 5
    switched, control = offsets("paper-gpt2-64k_flash-rescued"), [*offsets("branched/paper-gpt2-64k_control").values()]
    assert f"from {switched[2560]:.0f} nats to {abs(switched[6000]):.0f}" in EVIDENCE
    assert f"from {control[0]:,.0f} to {control[-1]:.0f}" in EVIDENCE


@pytest.mark.full
def test_today_s_detectors_name_no_cause_in_recordings_of_a_sample_of_rows_and_leave_the_treated_run_alone() -> None:
    names = ("_flash-untreated", "-bias_flash-untreated", "_flash-rescued", "_row-corrected")
    flash, with_biases, rescued, corrected = score_traces([run(f"paper-gpt2-64k{name}") for name in names])
    assert (flash.first_warning_step, flash.layer, flash.head, flash.cause) == (1220, 3, 6, "score growth")
    assert (with_biases.first_warning_step, with_biases.layer, with_biases.cause) == (3160, 1, "score growth")
    assert "Today's detectors warn of these recordings at 1,220 (layer 3) and 3,160, without a named cause." in EVIDENCE
    [second] = score_traces([run("paper-gpt2-64k_flash-rescued", 2)])
    assert (rescued.warnings, rescued.first_warning_step, rescued.layer) == (1, 1220, 3)
    assert (corrected.warnings, second.warnings) == (0, 0)
    assert "the one of seed 1 is warned about at 1,220, at layer 3, and that of seed 2 is not" in EVIDENCE
