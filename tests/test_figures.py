"""README.md and docs/evidence.md are correct: the example prints the documented output, and figures match the results
and recordings."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.contract import wire
from foreshock.contract.modes import Mode
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.lab.scoring.score import score_traces

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "evidence.md").read_text()
EVIDENCE = PAGE.split("### The paper's model explodes")[1].split("\n### ")[0]
FAILING = (1, 9)
"""The failing layer and head."""


def run(name: str, seed: int = 1) -> Trace:
    return read_trace(ROOT / f"src/foreshock/lab/traces/paper/{name}_seed{seed}.trace.xz")


def raised(trace: Trace) -> list[wire.Verdict]:
    """The warnings that the run recorded."""
    return [e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised"]


def explosion(trace: Trace) -> int | None:
    """The first step with a loss 25 % above the median of 50 to 200 steps before and a mean of 20 steps 20 % above."""
    loss = trace.steps.loss
    for at in range(200, len(loss) - 20):
        before = float(np.median(loss[at - 200 : at - 50]))
        if loss[at] > 1.25 * before and loss[at : at + 20].mean() > 1.2 * before:
            return int(trace.steps.step[at])
    return None


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((f"paper-gpt2-64k{name}", 1) for name in ("_flash-untreated", "-bias_flash-untreated", "_untreated")),
        *(("paper-gpt2-64k_flash-rescued", seed) for seed in (1, 2)),
        ("paper-gpt2-64k_row-corrected", 1),
        *((f"branched/paper-gpt2-64k_{name}", 1) for name in ("control", "exact-delta", "row-corrected", "qk-clip")),
    ],
)
def test_steps_in_the_evidence_table_match_the_recordings(name: str, seed: int) -> None:
    trace = run(name, seed)
    exploded = explosion(trace)
    assert (f"not by {int(trace.steps.step[-1]):,}" if exploded is None else f"{exploded:,}") in EVIDENCE
    branched = name.startswith("branched/")
    if warnings := [] if branched else raised(trace):
        assert warnings[0].layer == FAILING[0]
        assert f"| {warnings[0].step:,}, {warnings[0].cause} " in EVIDENCE
    if "rescued" in name:
        [warning] = warnings
        modes = {s.step: set(s.modes.numpy().tolist()) for s in trace.samples if s.modes is not None}
        assert all(found == {0} for step, found in modes.items() if step <= warning.step)
        assert all(found == {int(Mode.ROW_CORRECTED)} for step, found in modes.items() if step > warning.step + 10)


@pytest.mark.full
def test_warnings_of_current_detectors_match_the_evidence_document() -> None:
    names = ("_flash-untreated", "-bias_flash-untreated", "_flash-rescued", "_row-corrected")
    flash, biased, rescued, corrected = score_traces([run(f"paper-gpt2-64k{name}") for name in names])
    assert {flash.cause, biased.cause} == {"score growth"}
    warned = f"at {flash.first_warning_step:,} (layer {flash.layer}) and {biased.first_warning_step:,}"
    assert f"Today's detectors warn of these recordings {warned}, without a named cause." in EVIDENCE
    [second] = score_traces([run("paper-gpt2-64k_flash-rescued", 2)])
    assert (rescued.warnings, corrected.warnings, second.warnings) == (1, 0, 0)
    warned = f"at {rescued.first_warning_step:,}, at layer {rescued.layer}"
    assert f"the one of seed 1 is warned about {warned}, and that of seed 2 is not" in EVIDENCE


# README


def result(name: str) -> Any:
    return json.loads((ROOT / "src/foreshock/benchmarks/results" / f"{name}.json").read_text())


def test_readme_example_runs_and_prints_the_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    model = runpy.run_path(str(ROOT / "examples" / "plain_loop.py"))["Model"]()
    torch.manual_seed(3)
    stepped: list[int] = []

    def train_step(model: torch.nn.Module, batch: int) -> torch.Tensor:
        loss = model(torch.randint(256, (2, 16))).square().mean()
        loss.backward()
        stepped.append(batch)
        return loss  # type: ignore[no-any-return]

    (code,), texts = (
        re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) for kind in ("python", "text")
    )
    exec(code, {"model": model, "batches": range(3), "train_step": train_step})
    assert stepped == [0, 1, 2]
    printed = capsys.readouterr()
    assert printed.err == next(block for block in texts if "foreshock watches" in block)
    assert printed.out == ""


def test_readme_costs_match_the_benchmark_results() -> None:
    agent, keep = result("agent_h200")["shapes"], result("agent_kept_h200")["shapes"]
    ratios = {each["ratios"]["kernels_agent / none"] for each in agent}
    ratios |= {each["ratios"]["keep_agent / none"] for each in keep}
    costs = README.partition("\n## Cost\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"\d+\.\d %", costs)) == {f"{100 * (ratio - 1):.1f} %" for ratio in ratios}
    ratios_of_modes = result("attention_modes_h100")["ratios to plain"]
    least, most = sorted(100 * (ratios_of_modes[f"D {dim} both row_corrected"]["mean"] - 1) for dim in (64, 128))
    assert f"[{least:.0f} to {most:.0f} % longer]" in costs


def test_readme_monitor_table_matches_the_results() -> None:
    measured = {row["monitor"]: row for row in result("monitors")["table"]}
    first, *rows = re.findall(r"^\| (.*) \|$", README.partition("## Evidence")[2], re.MULTILINE)
    foreshock_row = measured["foreshock"]
    assert f"of {foreshock_row['dangerous']} |" in first
    assert f"of {foreshock_row['possible_alarms']} possible" in first
    named = {
        "foreshock": "foreshock",
        "four conditions (the simplest rule that we found)": "four conditions",
        "largest offset, 50": "largest offset of the model",
        "largest score, 100 (Megatron)": "largest score of the model",
        "gradient norm z-score, 2.5 (ZClip)": "gradient-norm z-score",
    }
    shown = {name: cells for name, *cells in (row.split(" | ") for row in rows) if name in named}
    assert shown.keys() == named.keys()
    for name, (warned, lead, false_alarms, *_) in shown.items():
        row = measured[named[name]]
        never_quiet = row["false_alarms"] > row["possible_alarms"] / 2
        range_of = f"{row['median_lead']:,.0f} ({row['least_lead']:,.0f} to {row['most_lead']:,.0f})"
        assert (int(warned), lead) == (row["warned"], "alarms all the time" if never_quiet else range_of), name
        assert int(false_alarms) == row["false_alarms"], name


def test_readme_figure_caption_matches_the_results() -> None:
    runs = {
        (each["variant"], each["seed"]): each
        for each in result("paper_gpt2_fresh_seeds")["runs"]
        if each["recipe"] == "paper-gpt2-64k"
    }
    untreated, rescued = ([runs[f"flash-{name}", seed] for seed in (9, 10)] for name in ("untreated", "rescued"))
    past = [f"{each['first_score_of_512']:,}" for each in untreated]
    switched = " and ".join(f"{each['switched'][0]['step']:,}" for each in rescued)
    assert f"passes 512 at steps {past[0]} and {past[1]}; switched by foreshock at steps {switched}" in README
    assert {each["verdicts"][0]["cause"] for each in untreated} == {"rounding"}
    leads = [each["first_score_of_512"] - each["verdicts"][0]["step"] for each in untreated]
    assert f"rounding was named {leads[0]} and {leads[1]} steps before a score of 512" in README


def test_readme_quotes_a_warning_that_the_detectors_give() -> None:
    (quoted,) = re.findall(r"^> (.*)$", README, re.MULTILINE)
    trace = read_trace(ROOT / "src/foreshock/lab/traces/cure/shared-values_untreated_seed2.trace.xz")
    first = next(each for each in verdicts(trace) if each.state == "raised" and each.layer is not None)
    assert first.sentence == quoted


def test_evidence_table_of_the_full_run_matches_its_recording() -> None:
    section = PAGE.split("### The paper's run with all its tokens")[1].split("\n### ")[0]
    found = json.loads((ROOT / "src/foreshock/benchmarks/results/paper_gpt2_all_tokens.json").read_text())
    failing, healthy = found["heads"]["layer 1 head 5"], found["heads"]["layer 3 head 3"]
    points = {point["step"]: point for point in failing["curve"]}
    at = [points[step] for step in (2500, 3300, 3700, 4100, 4500, 4891)]
    for row in (
        [f"{p['offset']:,.1f}" if p["offset"] < 100 else f"{p['offset']:,.0f}" for p in at],
        [f"{p['largest_score']:,.1f}" if p["offset"] < 100 else f"{p['largest_score']:,.0f}" for p in at],
        [f"{100 * p['tied_rows']:.0f} %" for p in at],
        [f"{p['query_norm']:.1f}" for p in at],
    ):
        assert f"| {' | '.join(row)} |" in section
    first, second = [v for v in found["verdicts"] if v["state"] == "raised"]
    assert (first["step"], first["layer"], first["head"], first["cause"]) == (3240, 1, 5, "rounding")
    assert f"{failing['first_score_of_512'] - first['step']} steps before a score of 512" in section
    assert f"{failing['first_offset_of_50']:,}, {failing['first_offset_of_50'] - first['step']} steps" in section
    assert f"warned about at {second['step']:,}, and passed 512 at " in section
    assert healthy["first_score_of_512"] is None
    compared = found["compared_outputs"]
    sentence = f"{compared['rows']:,} rows were compared: no row was wrong, and the largest distance was "
    assert compared["wrong"] == 0
    assert (
        f"{sentence}{compared['largest_share_of_bound']:.2f} of the bound" in (ROOT / "docs" / "models.md").read_text()
    )
    assert max(part["loss"] for part in found["parts"][-5:]) < min(part["loss"] for part in found["parts"][:-6])
