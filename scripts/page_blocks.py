"""The blocks of pages written by hand that are made: README's table of monitors, and what a watched training prints.

scripts/generate_docs.py writes and checks them; a block stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import re
import runpy
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from foreshock.monitor import attach

ROOT = Path(__file__).resolve().parents[1]
_MONITORS = {
    "foreshock": ("foreshock", "shipped", "yes", "switches it", None),
    "loss z-score, 3": ("loss z-score", "published", "no", "no", "not measured"),
    "gradient norm z-score, 2.5 (ZClip)": (
        "gradient-norm z-score", "published", "no", "clips the gradient", "not measured",
    ),
    "largest score, 100 (Megatron)": ("largest score of the model", "published", "no", "QK-clip", "not measured"),
    "W_Q norm, calibrated": ("W_Q norm", "calibrated", "no", "no", "not measured"),
}  # fmt: skip
"""A row of README's table: monitor and threshold in lab/NOTEBOOK.md; whether it names the head, acts, and its cost;
None: what docs/agent.md has."""


def _cost() -> str:
    """What the agent with its defaults adds to a step, by the table of docs/agent.md."""
    table = (ROOT / "docs" / "agent.md").read_text().split("<!-- step times")[1].split("<!-- end of")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    place = rows[0].index("kernels_agent / none")
    told = (f"{100 * (float(row[place].split()[0]) - 1):.1f} % ({row[0]})" for row in rows[2:])
    return f"{', '.join(told)}: [agent](docs/agent.md)"


def compared() -> Iterator[str]:
    """README's table of monitors, from the held-out runs of the laboratory's notebook."""
    notebook = (ROOT / "lab" / "NOTEBOOK.md").read_text()
    (steps,) = re.findall(r"^held-out, ([\d,]+) healthy steps", notebook, re.MULTILINE)
    held_out = notebook.split("\nheld-out, ")[1].split("\ntuning, ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in held_out.splitlines() if line[:1] == "|"]
    measured = {(row[0], row[1]): row for row in rows}
    yield f"Recorded runs that no threshold was chosen on: {steps} healthy steps, three failures."
    yield "`foreshock lab score lab/traces/*.gz` makes these figures ([notebook](lab/NOTEBOOK.md)).\n"
    head = (
        "monitor",
        "failures warned in time",
        "steps before a score of 512, median",
        "false alarms",
        "names the head",
    )
    yield f"| {' | '.join((*head, 'acts', 'cost of a step'))} |"
    yield "|---|---|---|---|---|---|---|"
    for name, (monitor, threshold, *known) in _MONITORS.items():
        row = measured[monitor, threshold]
        yield f"| {' | '.join((name, row[3], row[5], row[6], *(cell or _cost() for cell in known)))} |"
    yield "| TransformerEngine's statistics | not measured | not measured | not measured | no | no | not measured |"


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


def with_blocks(page: Path) -> Iterator[str]:
    """The page with what stands between its marks written anew; the rest is written by hand."""
    made = {"monitors": compared, "printed": printed}

    def fill(mark: re.Match[str]) -> str:
        return "\n".join((mark[1], *made[mark[2]](), mark[3]))

    yield re.sub(r"(<!-- generated: (\w+) -->).*?(<!-- end -->)", fill, page.read_text(), flags=re.DOTALL)
