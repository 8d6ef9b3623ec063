"""Write the table of step times in docs/agent.md from benchmarks/results/agent_h200.json."""

import json
import sys
from pathlib import Path

from foreshock.benchmarks.agent_step import markdown

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- step times: written by scripts/agent_figures.py -->\n", "<!-- end of step times -->"


def main() -> int:
    """Put the table between its marks."""
    page = ROOT / "docs" / "agent.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        print(f"docs/agent.md has lost its marks {BEGIN.strip()} and {END}", file=sys.stderr)
        return 1
    figures = json.loads((ROOT / "benchmarks" / "results" / "agent_h200.json").read_text())
    page.write_text(f"{before}{BEGIN}{markdown(figures)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
