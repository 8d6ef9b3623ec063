"""What README says is so: its code runs and prints what stands there, its figures are those of the results."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from tests.test_evidence import explosion, first_warning, run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_five_lines_run_and_print_what_stands_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    model = runpy.run_path(str(ROOT / "examples" / "plain_loop.py"))["Model"]()
    torch.manual_seed(3)
    stepped: list[int] = []

    def train_step(model: torch.nn.Module, batch: int) -> torch.Tensor:
        loss = model(torch.randint(256, (2, 16))).square().mean()
        loss.backward()
        stepped.append(batch)
        return loss  # type: ignore[no-any-return]

    (code,) = blocks("python")
    exec(code, {"model": model, "batches": range(3), "train_step": train_step})
    assert stepped == [0, 1, 2]
    shown = next(block for block in blocks("text") if "foreshock watches" in block)
    printed = capsys.readouterr()
    assert printed.err == shown
    assert printed.out == ""


def share_of_a_step(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def test_the_costs_are_those_that_were_measured() -> None:
    results = ROOT / "src/foreshock/benchmarks" / "results"
    agent, kept = (
        json.loads((results / f"{name}_h200.json").read_text())["shapes"] for name in ("agent", "agent_kept")
    )
    measured = {share_of_a_step(each["ratios"]["kernels_agent / none"]) for each in agent}
    measured |= {share_of_a_step(each["ratios"]["keep_agent / none"]) for each in kept if each["probe_rows"] == 4096}
    costs = README.partition("\n## Cost\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"\d+\.\d %", costs)) == measured
    modes = json.loads((results / "attention_modes_h200.json").read_text())["summary"]
    both = [each for each in modes if (each["pass"], each["name"]) == ("both", "row_corrected")]
    least, most = sorted(100 * (each["mean_ratio"] - 1) for each in both)
    assert f"[{least:.0f} to {most:.0f} % longer]" in costs


def test_the_table_of_monitors_has_the_figures_of_the_report() -> None:
    report = json.loads((ROOT / "src/foreshock/benchmarks/results/monitors.json").read_text())["table"]
    measured = {row["monitor"]: row for row in report}
    first, *rows = re.findall(r"^\| (.*) \|$", README.partition("## Evidence")[2], re.MULTILINE)
    ours = measured["foreshock"]
    assert f"of {ours['dangerous']} |" in first
    assert f"of {ours['possible_alarms']} possible" in first
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
        assert (int(warned), lead) == (row["warned"], "rings all the time" if never_quiet else range_of), name
        assert int(false_alarms) == row["false_alarms"], name


def test_the_picture_s_steps_are_those_of_the_runs() -> None:
    results = json.loads((ROOT / "src/foreshock/benchmarks/results/paper_gpt2_fresh_seeds.json").read_text())
    runs = {(each["variant"], each["seed"]): each for each in results["runs"] if each["recipe"] == "paper-gpt2-64k"}
    past = [f"{runs['flash-untreated', seed]['first_score_of_512']:,}" for seed in (9, 10)]
    switched = [f"{runs['flash-rescued', seed]['switched'][0]['step']:,}" for seed in (9, 10)]
    assert (
        f"passes 512 at steps {past[0]} and {past[1]}; switched by foreshock at steps {' and '.join(switched)}"
        in README
    )
    warned = [runs["flash-untreated", seed]["verdicts"][0] for seed in (9, 10)]
    leads = [
        runs["flash-untreated", seed]["first_score_of_512"] - each["step"]
        for seed, each in zip((9, 10), warned, strict=True)
    ]
    assert {each["cause"] for each in warned} == {"rounding"}
    assert f"rounding was named {leads[0]} and {leads[1]} steps before a score of 512" in README


def test_the_older_picture_s_steps_are_those_of_its_runs() -> None:
    switched, untreated = (run(f"paper-gpt2-64k_flash-{variant}") for variant in ("rescued", "untreated"))
    warned, exploded = first_warning(switched).step, explosion(untreated)
    assert exploded is not None
    assert explosion(switched) is None
    evidence = (ROOT / "docs" / "evidence.md").read_text()
    told = f"left its loss at step {exploded:,}. With an agent under `auto` it was warned about as rounding at step"
    assert f"{told} {warned:,}" in evidence
    assert f"The warning of the switched run came {exploded - warned:,} steps before its untreated twin" in evidence


def test_the_warning_that_is_quoted_is_the_one_that_the_detectors_give_on_that_run() -> None:
    (quoted,) = re.findall(r"^> (.*)$", README, re.MULTILINE)
    shown = (ROOT / "docs" / "examples.md").read_text()  # which tests/examples holds to what is printed today
    assert re.search(rf"^step \d+: {re.escape(quoted)}$", shown, re.MULTILINE)
