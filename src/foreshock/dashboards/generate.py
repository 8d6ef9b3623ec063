"""Writes the boards and the alert rules, and compares the committed ones with them."""

import json
from pathlib import Path
from typing import Final

import yaml

from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, prometheus_rules

GENERATED: Final = Path(__file__).with_name("generated")
_NOTE: Final = "# Generated from contract/metrics by `foreshock dashboards generate`; change that, not this.\n"


def _files(links: Links) -> dict[Path, str]:
    """Every file, by its path in the folder of all."""
    rules = yaml.safe_dump(prometheus_rules(links), sort_keys=False, width=120, allow_unicode=True)
    made = {
        Path("boards", name): json.dumps(each, indent=1, ensure_ascii=False) for name, each in boards(links).items()
    }
    return {Path("prometheus-rules.yml"): _NOTE + rules, **{path: f"{text}\n" for path, text in made.items()}}


def generate(folder: Path, links: Links) -> list[Path]:
    """Write every file below `folder`; returns their paths."""
    written = []
    for path, text in _files(links).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return written


def check(folder: Path) -> list[Path]:
    """The files that differ from what the catalogue says, are missing, or are left over; none is good."""
    expected = _files(Links())
    on_disk = {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return sorted(path for path in {*expected, *on_disk} if expected.get(path) != on_disk.get(path))
