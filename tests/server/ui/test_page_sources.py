"""The page's sources: no import circle, and every type of an answer made from the service's own schema."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

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


def test_no_source_keeps_a_list_of_metrics_of_its_own() -> None:
    """What a metric is drawn like stands in the catalogue; a source may name one metric that it looks up."""
    keys = {metric.key for metric in METRICS}
    for source in SOURCES:
        named = {word for word in re.findall(r'"([a-z]+\.[a-z_0-9]+)"', source.read_text()) if word in keys}
        assert len(named) <= 1, f"{source.name} names {sorted(named)}"
