"""Every panel and its queries: they parse, say what bad looks like, and draw on the axis of the catalogue."""

import re
from typing import Any

import pytest
from tests.dashboards.live import Query, charts
from tests.dashboards.promql import BOARDS, LABELS, QUERIES, grouping_labels, nodes, parse, selectors

from foreshock.contract.metrics.catalog import METRICS

PANELS = [
    pytest.param(panel, id=f"{name} {panel['title']}") for name, board in BOARDS.items() for panel in charts(board)
]
every_panel = pytest.mark.parametrize("panel", PANELS)
every_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)


@every_query
def test_a_query_parses_and_reads_only_metrics_and_labels_of_the_catalogue(query: Query) -> None:
    tree = parse(query.expr)
    known: set[str] = set()
    for selector in selectors(tree):
        assert selector.name in LABELS, f"{query.where}: no metric {selector.name}"
        filtered = {matcher.name for matcher in selector.matchers.matchers}
        assert filtered <= LABELS[selector.name], f"{query.where}: {selector.name} has no label {filtered}"
        known |= LABELS[selector.name]
    assert grouping_labels(tree) <= known


@every_panel
def test_a_panel_keeps_the_rules_of_grafanas_linter_and_says_what_bad_looks_like(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert "Bad:" in panel["description"] or "Against the optimizer step" in panel["description"]
    assert panel["targets"]
    assert {each["datasource"]["uid"] for each in (panel, *panel["targets"])} == {"${datasource}"}
    known = {"short", "locale", "s", "bytes", "percentunit", "bool_on_off"}
    assert panel["fieldConfig"]["defaults"]["unit"] in known


@every_panel
def test_target_promql_target_rate_interval_and_target_counter_agg_rules(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        tree = parse(target["expr"])
        ranges = re.findall(r"\[([^\]]*)\]", target["expr"])
        assert set(ranges) <= {"$__rate_interval"}
        counters = [node.name for node in selectors(tree) if node.name.endswith("_total")]
        inside = [
            argument.vector_selector.name
            for node in nodes(tree)
            if type(node).__name__ == "Call" and node.func.name in ("rate", "irate", "increase")
            for argument in node.args
        ]
        assert counters == inside


@every_panel
def test_a_line_is_drawn_on_the_axis_that_the_catalogue_names(panel: dict[str, Any]) -> None:
    """The page asks the same catalogue, so a board and a chart cannot disagree."""
    if panel["type"] not in ("timeseries", "trend"):
        return
    [metric] = [m for m in METRICS if any(re.search(rf"\b{m.name}\b", t["expr"]) for t in panel["targets"][-1:])]
    assert panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]["type"] == metric.scale


def test_the_rows_and_columns_of_a_matrix_ascend_as_numbers() -> None:
    """Told by playing the transformations on the answer of a query, whose order nobody promises."""
    answer = [{"layer": str(layer), "head": str(head), "Value": 1.0} for layer in (10, 2, 1, 11) for head in (10, 9, 3)]
    matrices = [p for p in BOARDS["layers.json"]["panels"] if p["title"].endswith(": layer by head")]
    assert matrices
    for panel in matrices:
        assert play(panel["transformations"], answer[1:]) == ([1, 2, 10, 11], ["3", "9", "10"])


def play(transformations: list[dict[str, Any]], rows: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """What Grafana makes of a table: the rows and the columns of its matrix, each in the order of its first entry."""
    columns: list[str] = []
    for transformation in transformations:
        options = transformation["options"]
        if transformation["id"] == "convertFieldType":
            [conversion] = options["conversions"]
            rows = [row | {conversion["targetField"]: float(row[conversion["targetField"]])} for row in rows]
        elif transformation["id"] == "sortBy":
            [order] = options["sort"]
            rows = sorted(rows, key=lambda row: row[order["field"]])
        else:
            assert transformation["id"] == "groupingToMatrix"
            columns = list(dict.fromkeys(f"{row[options['columnField']]:g}" for row in rows))
            name = f"{options['rowField']}\\{options['columnField']}"
            rows = [{name: layer} for layer in dict.fromkeys(row[options["rowField"]] for row in rows)]
    return [int(row["layer\\head"]) for row in rows], columns
