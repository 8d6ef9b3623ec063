"""Writes every generated file of the dashboards, and compares the committed ones with what the catalogue says now."""

import json
from pathlib import Path
from typing import Final

import yaml

from foreshock.dashboards.boards import boards
from foreshock.dashboards.metrics_table import metrics_page
from foreshock.dashboards.rules import Links, prometheus_rules

GENERATED: Final = Path("src/foreshock/dashboards/generated")
"""In a checkout, below its root."""
METRICS_PAGE: Final = Path("docs/metrics.md")
_ELSEWHERE: Final = Path("dashboards/generated")
"""Below the folder that the user of a wheel names."""
_NOTE: Final = "Generated from contract/metrics by `foreshock dashboards generate`; change that, not this."


def files(links: Links, *, checkout: bool = True) -> dict[Path, str]:
    """Every generated file: its path below the root, and its text. Only a checkout has the page of metrics."""
    rules = yaml.safe_dump(prometheus_rules(links), sort_keys=False, width=120, allow_unicode=True)
    folder = GENERATED if checkout else _ELSEWHERE
    return {
        folder / "prometheus-rules.yml": f"# {_NOTE}\n{rules}",
        **{
            folder / "boards" / name: json.dumps(board, indent=1, ensure_ascii=False) + "\n"
            for name, board in boards(links).items()
        },
        **({METRICS_PAGE: f"<!-- {_NOTE} -->\n{metrics_page()}"} if checkout else {}),
    }


def generate(root: Path, links: Links | None = None, *, checkout: bool = True) -> list[Path]:
    """Write the generated files below `root`; returns their paths."""
    written = []
    for path, text in files(links or Links(), checkout=checkout).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return written


def check(root: Path) -> list[Path]:
    """The generated files that differ from what the catalogue says, are missing, or are left over; none is good."""
    expected = files(Links())
    changed = [
        path for path, text in expected.items() if not (root / path).is_file() or (root / path).read_text() != text
    ]
    on_disk = {path.relative_to(root) for path in (root / GENERATED).rglob("*") if path.is_file()}
    return sorted({*changed, *(on_disk - set(expected))})
