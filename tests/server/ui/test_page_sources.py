"""The page's sources: no import circle, and every type of an answer made from the service's own schema."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from foreshock.contract.metrics.catalog import METRICS

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src/foreshock/server" / "ui" / "src").glob("*.ts*"))


def test_no_source_imports_itself_over_others() -> None:
    """Imports of types count too: what needs one another belongs into one file, or a third one."""
    graph = {
        source.stem: set(re.findall(r'(?:from|import) "\./([\w-]+)"', source.read_text()))
        & {other.stem for other in SOURCES}
        for source in SOURCES
    }
    assert graph["main"] >= {"api", "view"}
    TopologicalSorter(graph).prepare()  # names the circle


@pytest.mark.full
def test_the_types_of_answers_are_those_of_the_services_schema() -> None:
    checked = subprocess.run(
        [sys.executable, "-P", "scripts/generate_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "service.ts" not in checked.stderr, checked.stderr
    assert checked.returncode == 0, checked.stderr


def test_no_source_keeps_a_list_of_metrics_of_its_own() -> None:
    """What a metric is drawn like stands in the catalogue; a source may name one metric that it looks up."""
    keys = {metric.key for metric in METRICS}
    for source in SOURCES:
        named = {word for word in re.findall(r'"([a-z]+\.[a-z_0-9]+)"', source.read_text()) if word in keys}
        assert len(named) <= 1, f"{source.name} names {sorted(named)}"
