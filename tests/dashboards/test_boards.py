"""The boards follow Grafana's linter and the catalogue: queries parse, and panels describe bad values."""

import json
import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from tests.dashboards.promql import (
    BOARDS,
    LABELS,
    QUERIES,
    Query,
    charts,
    grouping_labels,
    nodes,
    parse,
    promql_of,
    selectors,
)

from foreshock.contract.metrics.catalog import METRICS

every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())


def test_every_metric_is_on_a_board() -> None:
    shown = {selector.name for query in QUERIES if query.kind == "panel" for selector in selectors(parse(query.expr))}
    assert {metric.name for metric in METRICS} <= shown


@every_board
def test_legend_uses_only_labels_that_remain_after_aggregation(board: dict[str, Any]) -> None:
    for panel in charts(board):
        for target in panel["targets"]:
            tree = parse(target["expr"])
            names = [selector.name for selector in selectors(tree)]
            remaining = grouping_labels(tree) or set().union(*(LABELS[name] for name in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= remaining, panel["title"]


@every_board
def test_panels_have_unique_ids_and_do_not_overlap(board: dict[str, Any]) -> None:
    assert len(board["uid"]) <= 40
    assert board["schemaVersion"] == 42
    assert Counter(panel["id"] for panel in board["panels"]).most_common(1)[0][1] == 1
    cells = [panel["gridPos"] for panel in board["panels"]]
    assert all(cell["x"] >= 0 and cell["x"] + cell["w"] <= 24 for cell in cells)
    for one, other in combinations(cells, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


@every_board
def test_board_has_no_credentials_and_links_to_the_live_page(board: dict[str, Any]) -> None:
    text = json.dumps(board)
    assert not re.search(r"authorization|bearer|password|secret|api_?key", text, re.IGNORECASE)
    assert '"type": "fetch"' not in text  # panel actions call from the browser without authentication
    assert "${service}/?runs=" in text or board["uid"] == "foreshock-service"


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The board's variables by name."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


@every_board
def test_board_variables_follow_grafanas_linter(board: dict[str, Any]) -> None:
    assert board["editable"] is False
    sources = [variable for variable in variables(board).values() if variable["type"] == "datasource"]
    assert [(v["name"], v["label"], v["query"]) for v in sources] == [("datasource", "Data source", "prometheus")]
    queried = [variable for variable in variables(board).values() if variable["type"] == "query"]
    assert queried
    for variable in queried:
        names = [node.name for node in selectors(parse(promql_of(variable["query"]["query"])))]
        assert variable["name"] in LABELS[names[0]]
        assert variable["refresh"] == 2
        assert not variable.get("includeAll") or variable["allValue"] == ".+"


@pytest.mark.parametrize("key", ["warning.active", "warning.forecast"])
def test_run_board_includes_warnings_without_a_layer(key: str) -> None:
    """Warnings about the whole run have an empty layer label, which the matcher `.+` does not match."""
    [metric] = [metric for metric in METRICS if metric.key == key]
    expressions = [t["expr"] for p in charts(BOARDS["run.json"]) for t in p["targets"] if metric.name in t["expr"]]
    assert expressions
    for expr in expressions:
        for matcher in re.findall(r'layer=~"([^"]*)"', expr):
            for chosen in (".+", "(3|17)", "17"):
                pattern = matcher.replace("$layer", chosen)
                assert re.fullmatch(pattern, ""), expr
                assert re.fullmatch(pattern, "17"), expr
                assert chosen == ".+" or not re.fullmatch(pattern, "7"), expr


def property_of(panel: dict[str, Any], column: str, name: str) -> Any:
    """A property of a table's column."""
    overrides = panel["fieldConfig"]["overrides"]
    [found] = [o["properties"] for o in overrides if o["matcher"]["options"] == column]
    return next(p["value"] for p in found if p["id"] == name)


@every_board
def test_every_board_links_to_the_others_with_variables_and_time_range(board: dict[str, Any]) -> None:
    links = {link["url"]: link for link in board["links"] if link["url"].startswith("/d/")}
    assert set(links) == {f"/d/{other['uid']}" for other in BOARDS.values() if other["uid"] != board["uid"]}
    assert all(link["includeVars"] and link["keepTime"] and not link["targetBlank"] for link in links.values())
    assert not any("placement" in each for each in (*board["links"], *board["annotations"]["list"])), "not in a menu"


def test_overview_run_links_to_its_run_and_layers_boards() -> None:
    [runs] = [panel for panel in charts(BOARDS["overview.json"]) if panel["title"] == "Runs"]
    urls = [link["url"] for link in property_of(runs, "run", "links")]
    assert urls[0].startswith("/d/foreshock-run?var-run=${__value.raw:percentencode}&")
    assert urls[1].startswith("/d/foreshock-layers?var-run=${__value.raw:percentencode}&")
    assert all("${__url_time_range}" in url for url in urls[:2])


@pytest.mark.parametrize("name", ["run.json", "layers.json"])
def test_run_boards_select_the_run_with_the_latest_step(name: str) -> None:
    run = variables(BOARDS[name])["run"]
    assert promql_of(run["query"]["query"]) == "sort_desc(foreshock_run_last_step_timestamp_seconds)"
    assert run["sort"] == 0, "in the order of the query result"
    pattern = re.compile(run["regex"].strip("/"))
    result = 'foreshock_run_last_step_timestamp_seconds{instance="i", job="foreshock", run="a.b/c-1"} 5 17'
    assert pattern.findall(result) == ["a.b/c-1"]


PANELS = [
    pytest.param(panel, id=f"{name} {panel['title']}") for name, board in BOARDS.items() for panel in charts(board)
]
every_panel = pytest.mark.parametrize("panel", PANELS)
every_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)


@every_query
def test_query_parses_and_uses_only_known_metrics_and_labels(query: Query) -> None:
    tree = parse(query.expr)
    known: set[str] = set()
    for selector in selectors(tree):
        assert selector.name in LABELS, f"{query.where}: no metric {selector.name}"
        filtered = {matcher.name for matcher in selector.matchers.matchers}
        assert filtered <= LABELS[selector.name], f"{query.where}: {selector.name} has no label {filtered}"
        known |= LABELS[selector.name]
    assert grouping_labels(tree) <= known


@every_panel
def test_panel_follows_grafanas_linter_and_describes_bad_values(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert "Bad:" in panel["description"]
    assert panel["targets"]
    assert {each["datasource"]["uid"] for each in (panel, *panel["targets"])} == {"${datasource}"}
    known = {"short", "locale", "s", "bytes", "percentunit"}
    assert panel["fieldConfig"]["defaults"]["unit"] in known
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


def test_matrix_rows_and_columns_are_sorted_as_numbers() -> None:
    """Grafana treats labels as text, in the order of the query result, which is not guaranteed."""
    matrices = [p for p in BOARDS["layers.json"]["panels"] if p["title"].endswith(": layer by head")]
    assert matrices
    for panel in matrices:
        order = [(step["id"], step["options"]) for step in panel["transformations"]]
        assert [name for name, _ in order] == [
            *("convertFieldType", "sortBy", "groupingToMatrix", "convertFieldType", "sortBy")
        ]
        for place, field in ((0, "head"), (3, "layer\\head")):
            assert order[place][1]["conversions"] == [{"targetField": field, "destinationType": "number"}]
            assert order[place + 1][1]["sort"] == [{"field": field}]
        assert (order[2][1]["rowField"], order[2][1]["columnField"]) == ("layer", "head")
