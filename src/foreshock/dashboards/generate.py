"""Writes the boards and the alert rules to files."""

import json
from pathlib import Path
from typing import Final

import yaml

from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, prometheus_rules

GENERATED: Final = Path(__file__).with_name("generated")
_NOTE: Final = "# Generated from contract/metrics by `foreshock dashboards generate`; change that, not this.\n"


def files(folder: Path, links: Links) -> dict[Path, str]:
    """Return the path below `folder` and the text of every file."""
    rules = yaml.safe_dump(prometheus_rules(links), sort_keys=False, width=120, allow_unicode=True)
    made = {f"boards/{name}": json.dumps(each, indent=1, ensure_ascii=False) for name, each in boards(links).items()}
    return {folder / "prometheus-rules.yml": _NOTE + rules, **{folder / name: f"{made[name]}\n" for name in made}}


def generate(folder: Path, links: Links) -> list[Path]:
    """Write every file below `folder`; return their paths."""
    for path, text in (written := files(folder, links)).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(written)
