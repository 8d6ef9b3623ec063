"""The blocks of pages written by hand that are made: README's table of monitors, what a watched training prints,
and the step times.

scripts/generate_docs.py writes and checks them; a block stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import json
import re
import runpy
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from foreshock.benchmarks.agent_step import markdown
from foreshock.monitor import attach

ROOT = Path(__file__).resolve().parents[1]
_MONITORS = {
    "foreshock": ("foreshock", "yes", "switches it"),
    "four conditions (the simplest rule that we found)": ("four conditions", "yes", "no"),
    "largest offset, 50": ("largest offset of the model", "no", "no"),
    "largest score, 100 (Megatron)": ("largest score of the model", "no", "QK-clip"),
    "gradient norm z-score, 2.5 (ZClip)": ("gradient-norm z-score", "no", "clips the gradient"),
}
"""A row of README's table: monitor in the report of `lab score`; whether it names the head, and acts."""


def compared() -> Iterator[str]:
    """README's table of monitors, from the report on the runs on real text."""
    rows = json.loads((ROOT / "src/foreshock/benchmarks" / "results" / "monitors.json").read_text())["table"]
    measured = {row["monitor"]: row for row in rows}
    first = measured["foreshock"]
    head = (
        "monitor, threshold",
        f"warned before a score of 512, of {first['dangerous']}",
        "steps before, median (range)",
        f"false alarms, of {first['possible_alarms']} possible",
    )
    yield f"| {' | '.join((*head, 'names the head', 'acts'))} |"
    yield "|---|---|---|---|---|---|"
    for name, (monitor, *known) in _MONITORS.items():
        row = measured[monitor]
        median, least, most = (row[f"{which}_lead"] for which in ("median", "least", "most"))
        never_quiet = row["false_alarms"] > row["possible_alarms"] / 2
        cells = (
            name,
            f"{row['warned']}",
            "rings all the time" if never_quiet else f"{median:,.0f} ({least:,.0f} to {most:,.0f})",
            f"{row['false_alarms']}",
            *known,
        )
        yield f"| {' | '.join(cells)} |"


def printed() -> Iterator[str]:
    """Everything that a training of the model in examples/plain_loop.py prints by itself, where nothing is wrong."""
    model = runpy.run_path(str(ROOT / "examples" / "plain_loop.py"))["Model"]()
    with redirect_stderr(StringIO()) as told, attach(model, url=None, spool_directory=None) as agent:
        loss = model(torch.arange(32).reshape(2, 16)).square().mean()
        loss.backward()
        agent.step(loss)
    yield "```text"
    yield from told.getvalue().splitlines()
    yield "```"


def steps() -> Iterator[str]:
    """The step times of docs/overhead.md."""
    yield markdown(json.loads((ROOT / "src/foreshock/benchmarks" / "results" / "agent_h200.json").read_text()))


def with_blocks(page: Path) -> Iterator[str]:
    """The page with what stands between its marks written anew; the rest is written by hand."""
    made = {"monitors": compared, "printed": printed, "steps": steps}

    def fill(mark: re.Match[str]) -> str:
        return "\n".join((mark[1], *made[mark[2]](), mark[3]))

    yield re.sub(r"(<!-- generated: (\w+) -->).*?(<!-- end -->)", fill, page.read_text(), flags=re.DOTALL)
