"""What `foreshock lab score` prints: the numbers of its report, and a dash for what nobody can say."""

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.cli.typed import TRACE

from foreshock.cli import scores
from foreshock.lab.scoring import ablation, thinned
from foreshock.lab.scoring.ablation import AblationRow
from foreshock.lab.scoring.thinned import ThinnedRow


def wide() -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=240, force_terminal=False), out


def columns(text: str, title: str) -> list[str]:
    """The words of the line that begins with `title`."""
    return next(line for line in text.splitlines() if line.startswith(title)).split()


def test_what_is_printed_of_a_run_is_what_the_report_says_of_it(tmp_path: Path) -> None:
    console, out = wide()
    scores.score([TRACE], console, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    [told] = report["traces"]
    name, truth, steps, *rest = columns(out.getvalue(), TRACE.name.removesuffix(".jsonl.gz"))
    assert (name, truth, int(steps)) == (TRACE.name.removesuffix(".jsonl.gz"), told["truth"], told["steps"])
    assert told["first_warning_step"] is None
    assert rest[0] == "-"
    assert f"report: {tmp_path / 'report.json'}" in out.getvalue().replace("\n", "")


MONITOR = {
    "monitor": "ours",
    "split": "held-out",
    "threshold": 0.123456,
    "kind": "-",
    "warned": 2,
    "failures": 3,
    "in_time": 1,
    "median_lead_steps": None,
    "median_lead_to_dangerous_steps": 2125.0,
    "false_alarms": 4,
    "healthy_steps": 12345,
    "false_alarms_per_10k": 3.24025,
    "upper_bound_per_10k": None,
    "causes_right": 0,
    "causes": 0,
}


def test_monitors_stand_under_their_split_and_false_alarms_of_no_healthy_step_are_not_zero() -> None:
    console, out = wide()
    scores._print_monitors([MONITOR, {**MONITOR, "split": "tuning", "healthy_steps": 0}], console)
    held_out, tuning = out.getvalue().split("tuning runs")
    assert held_out.startswith("held-out runs")
    assert columns(held_out, "ours") == ["ours", "0.1235", "-", "2/3", "1/3", "-", "2125", "4", "3.24", "-", "-"]
    assert columns(tuning, "ours")[7] == "-"
    assert "healthy steps: 12,345" in held_out


@pytest.mark.parametrize("group", scores._GROUPS)
def test_incidents_are_undecided_only_where_a_run_did_not_fail(group: str) -> None:
    console, out = wide()
    row: dict[str, Any] = {
        "split": "tuning",
        "group": group,
        "runs": 7,
        "steps": 10**6,
        "incidents": 3,
        "undecided": 2,
        "quiet_runs": 5,
        "quiet_interval": (0.5, 0.75),
        "false_per_500k": 1.5,
        "at_most_per_500k": None,
        "named": None,
        "named_of": 0,
        "named_interval": None,
        "causes_right": 1,
        "causes": 2,
    }
    scores._print_incidents([row], console)
    undecided = "2" if group == "did not fail" else "-"
    told = ["7", "1,000,000", "3", undecided, "5/7", "[50%,", "75%]", "1.5", "-", "-", "1/2"]
    assert columns(out.getvalue(), "tuning")[-len(told) :] == told


def test_forecasts_name_only_the_outcomes_that_there_were() -> None:
    console, out = wide()
    made = {"outcomes": {"inside": 3, "before it": 0, "open": 1}, "share_inside": 0.75, "decided": 4}
    scores._print_forecasts(
        {
            "tuning": {**made, "share_inside_interval": (0.3, 0.9)},
            "held-out": {
                "outcomes": {"inside": 0},
                "share_inside": None,
                "share_inside_interval": None,
                "decided": 0,
            },
        },
        console,
    )
    assert out.getvalue().splitlines()[:2] == [
        "forecasts, tuning: the range held in 75% [30%, 90%] of 4; 3 inside, 1 open",
        "forecasts, held-out: the range held in - of 0; none was made",
    ]


def test_an_ablation_is_a_line_for_each_variant_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [field.name for field in dataclasses.fields(AblationRow) if field.name != "variant"]
    told: list[dict[str, Any]] = [
        {"variant": f"without{i}", **{name: 100 * i + j for j, name in enumerate(numbers)}} for i in (1, 2)
    ]
    rows = [AblationRow(**each) for each in told]
    monkeypatch.setattr(ablation, "ablation", lambda traces, told: rows)
    console, out = wide()
    scores.ablation([TRACE], console, report=tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == told
    for each in rows:
        assert columns(out.getvalue(), each.variant)[1:] == [
            str(each.false_alarms),
            str(each.false_incidents),
            f"{each.quiet_runs}/{each.healthy_runs}",
            f"{each.warned}/{each.failures}",
            f"{each.in_time}/{each.failures}",
            str(each.median_lead_steps),
            f"{each.drifting_warned}/{each.drifting}",
        ]


def test_a_thinning_is_a_line_for_each_k_and_says_of_how_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    numbers = [field.name for field in dataclasses.fields(ThinnedRow) if field.name not in ("every", "policy")]
    told: list[dict[str, Any]] = [
        {"every": k, "policy": "agent", **{name: j for j, name in enumerate(numbers)}} for k in (2, 16)
    ]

    def made(traces: Any, every: Any, *, seeds: int, on_row: Any) -> list[ThinnedRow]:
        asked.append((len(traces), tuple(every), seeds))
        return [ThinnedRow(**each) for each in told]

    monkeypatch.setattr(thinned, "thinned", made)
    console, out = wide()
    scores.thinning([TRACE], [2, 16], console, seeds=5, report=tmp_path / "t.json")
    assert asked == [(1, (2, 16), 5)]
    assert f"{told[0]['runs']} large runs" in out.getvalue()
    assert [line.split()[:2] for line in out.getvalue().splitlines() if " agent " in line] == [
        ["2", "agent"],
        ["16", "agent"],
    ]
    assert json.loads((tmp_path / "t.json").read_text()) == told


@given(value=st.none() | st.floats(-1e300, 1e300) | st.integers() | st.text(max_size=5))
def test_a_cell_is_a_dash_four_digits_or_what_it_is(value: Any) -> None:
    told = scores.cell(value)
    if value is None:
        assert told == "-"
    elif isinstance(value, float):
        assert float(told) == pytest.approx(value, rel=1e-3, abs=1e-300)
        assert len(told) <= 11
    else:
        assert told == str(value)
