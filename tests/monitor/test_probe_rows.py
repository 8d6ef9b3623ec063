"""How many rows a native attention measures: the default keeps what the published figures promise of it."""

import json
from pathlib import Path
from typing import Any

from foreshock.monitor.config import AgentConfig

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = json.loads((ROOT / "src/foreshock/benchmarks" / "results" / "power.json").read_text())
PAGE = (ROOT / "docs" / "scoring.md").read_text()


def cell(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}" if value >= 100 else f"{value:g}"


def test_at_the_defaults_a_failing_head_is_told_as_rounding_within_500_steps_of_a_count_of_every_row() -> None:
    defaults = AgentConfig.model_fields["probe_rows"].default, AgentConfig.model_fields["sample_every_steps"].default
    rows = defaults[0] / defaults[1]
    [row] = [row for row in FIGURES["rows"] if row["rows"] == rows]
    assert row["named"] == row["failures"]
    assert row["in_time"] >= 0.9 * row["failures"]


def test_the_documentation_shows_what_a_number_of_rows_is_worth() -> None:
    lines = [
        [
            "all" if row["rows"] is None else cell(row["rows"]),
            f"{row['bias']:.2f}",
            cell(row["biased_lag"]),
            f"{row['named']} of {row['failures']}",
            f"{cell(row['lag'])}, {cell(row['longest_lag'])}",
            str(row["in_time"]),
            f"{row['false']} in {row['healthy']}",
        ]
        for row in FIGURES["rows"]
    ]
    table = PAGE.partition("| rows of a head in a step |")[2].partition("\n\n")[0]
    shown = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [line[0] for line in shown if line[0] in ("all", "410")] == ["all", "410"]
    assert [line for line in shown if line not in lines] == []
