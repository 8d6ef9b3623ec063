"""The boards hold Grafana's own rules and ours: the linter's, the schema's, the catalogue's."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from tests.dashboards.live import asked_by, charts
from tests.dashboards.promql import BOARDS, LABELS, QUERIES, grouping_labels, parse, selectors

from foreshock.contract.metrics.catalog import METRICS

with warnings.catch_warnings():
    # The model points to its successor for schema version 2, which Grafana 13 cannot load from files.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.models.dashboard import Dashboard
every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())


def test_every_metric_of_the_catalogue_is_on_a_board() -> None:
    shown = {selector.name for query in QUERIES if query.kind == "panel" for selector in selectors(parse(query.expr))}
    assert {metric.name for metric in METRICS} <= shown


@every_board
def test_a_legend_names_only_labels_that_its_series_keep(board: dict[str, Any]) -> None:
    for panel in charts(board):
        for target in panel["targets"]:
            tree = parse(target["expr"])
            names = [selector.name for selector in selectors(tree)]
            kept = grouping_labels(tree) or set().union(*(LABELS[name] for name in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where `after` lacks or changes something of `before`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after[key], f"{path}/{key}") if key in after else [f"{path}/{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{index}")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


def round_trip(board: dict[str, Any]) -> dict[str, Any]:
    """A board read and written again by Grafana's own typed model, which drops what it does not know."""
    register_default_plugins()
    copy = json.loads(json.dumps(board))
    result: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(copy)))
    return result


@every_board
def test_grafanas_own_model_knows_every_key(board: dict[str, Any]) -> None:
    assert not list(lost(board, round_trip(board)))


@every_board
def test_ids_and_places_are_sound(board: dict[str, Any]) -> None:
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
def test_a_board_holds_no_credentials_and_links_to_the_page_for_a_switch(board: dict[str, Any]) -> None:
    text = json.dumps(board)
    assert not re.search(r"authorization|bearer|password|secret|api_?key", text, re.IGNORECASE)
    assert '"type": "fetch"' not in text  # panel actions call from the browser without authentication
    assert "${service}/?runs=" in text or board["uid"] == "foreshock-service"


EXCLUDED = yaml.safe_load(Path("src/foreshock/dashboards/.lint").read_text())["exclusions"]


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The board's variables by name."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def test_every_exclusion_from_the_linter_has_a_reason_and_is_needed() -> None:
    assert all(entry["reason"] for entry in EXCLUDED.values())
    assert set(EXCLUDED) == {f"{kind}-{name}-rule" for kind in ("template", "target") for name in ("job", "instance")}
    for board in BOARDS.values():
        assert not {"job", "instance"} & set(variables(board))


@every_board
def test_template_datasource_rule(board: dict[str, Any]) -> None:
    sources = [variable for variable in variables(board).values() if variable["type"] == "datasource"]
    assert [(v["name"], v["label"], v["query"]) for v in sources] == [("datasource", "Data source", "prometheus")]


@every_board
def test_template_label_promql_and_template_on_time_change_reload_rules(board: dict[str, Any]) -> None:
    asked = [variable for variable in variables(board).values() if variable["type"] == "query"]
    assert asked
    for variable in asked:
        names = [node.name for node in selectors(parse(asked_by(variable["query"]["query"])))]
        assert variable["name"] in LABELS[names[0]]
        assert variable["refresh"] == 2
        assert not variable.get("includeAll") or variable["allValue"] == ".+"


@every_board
def test_uneditable_dashboard_rule(board: dict[str, Any]) -> None:
    assert board["editable"] is False


def test_a_threshold_of_a_board_is_a_level_of_the_catalogue() -> None:
    levels = {level for m in METRICS if m.levels for level in (m.levels.watch, m.levels.alarm)} | {None}
    for panel in (panel for board in BOARDS.values() for panel in charts(board)):
        if panel["title"] == "Service":  # whether it can be scraped is no metric of ours
            continue
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        assert {step["value"] for step in steps} <= levels, panel["title"]


@pytest.mark.parametrize("key", ["warning.active", "warning.forecast"])
def test_the_run_board_shows_warnings_about_the_run_as_a_whole(key: str) -> None:
    """They have an empty layer, which a matcher for any text does not match."""
    [metric] = [metric for metric in METRICS if metric.key == key]
    asked = [t["expr"] for p in charts(BOARDS["run.json"]) for t in p["targets"] if metric.name in t["expr"]]
    assert asked
    for expr in asked:
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
def test_every_board_leads_to_every_other_within_grafana_and_takes_run_and_time_along(board: dict[str, Any]) -> None:
    ways = {link["url"]: link for link in board["links"] if link["url"].startswith("/d/")}
    assert set(ways) == {f"/d/{other['uid']}" for other in BOARDS.values() if other["uid"] != board["uid"]}
    assert all(way["includeVars"] and way["keepTime"] and not way["targetBlank"] for way in ways.values())


def test_a_run_of_the_overview_leads_to_its_board_and_its_layers() -> None:
    [runs] = [panel for panel in charts(BOARDS["overview.json"]) if panel["title"] == "Runs"]
    urls = [link["url"] for link in property_of(runs, "run", "links")]
    assert urls[0].startswith("/d/foreshock-run?var-run=${__value.raw:percentencode}&")
    assert urls[1].startswith("/d/foreshock-layers?var-run=${__value.raw:percentencode}&")
    assert all("${__url_time_range}" in url for url in urls[:2])


@pytest.mark.parametrize("name", ["run.json", "layers.json"])
def test_a_board_of_one_run_opens_with_the_one_that_stepped_last(name: str) -> None:
    run = variables(BOARDS[name])["run"]
    assert asked_by(run["query"]["query"]) == "sort_desc(foreshock_run_last_step_timestamp_seconds)"
    assert run["sort"] == 0, "as it was answered"
    pattern = re.compile(run["regex"].strip("/"))
    answered = 'foreshock_run_last_step_timestamp_seconds{instance="i", job="foreshock", run="a.b/c-1"} 5 17'
    assert pattern.findall(answered) == ["a.b/c-1"]
