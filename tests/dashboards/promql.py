"""The generated boards, the queries of boards and rules, and helpers that parse PromQL."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import promql_parser

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, rules

Kind = Literal["panel", "variable", "annotation", "rule"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and its place. `expr` may contain Grafana's variables."""

    where: str
    kind: Kind
    expr: str


def queries() -> Iterator[Query]:
    """Every query of every board, and every metric in a rule.

    The expression of a rule that does not fire correctly returns nothing, so its metrics are queried instead.
    """
    for name, board in boards(Links()).items():
        for panel in charts(board):
            for target in panel["targets"]:
                yield Query(f"{name}: {panel['title']} ({target['refId']})", "panel", target["expr"])
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield Query(f"{name}: ${variable['name']}", "variable", promql_of(variable["query"]["query"]))
        for annotation in board["annotations"]["list"]:
            yield Query(f"{name}: {annotation['name']}", "annotation", annotation["expr"])
    for rule in rules(Links()):
        for metric in sorted(set(re.findall(r"foreshock_\w+", rule["expr"]))):
            yield Query(rule["alert"], "rule", metric)


def charts(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a board that have queries; the others are headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def promql_of(text: str) -> str:
    """The PromQL of a variable: the query of a `query_result`, or the selector of a `label_values`."""
    match = re.fullmatch(r"query_result\((.*)\)|label_values\((.*), *\w+\)", text)
    assert match is not None, text
    return match[1] or match[2]


def concrete(expr: str, *, run: str, rate_interval: str = "1m") -> str:
    """A query with Grafana's variables replaced, as Grafana sends it for one run and all its layers."""
    return expr.replace("$__rate_interval", rate_interval).replace("$run", run).replace("$layer", ".+")


BOARDS = boards(Links())
QUERIES = [query for query in queries() if query.kind != "rule"] + [
    Query(rule["alert"], "rule", rule["expr"]) for rule in rules(Links())
]
LABELS = {
    **{metric.name: set(metric.labels) for metric in METRICS},
    **{metric.layer_name: {"run", "layer"} for metric in HEAD_METRICS},
    "up": {"job"},
    "ALERTS": {"alertname", "alertstate", "severity", "run", "layer", "head"},  # written by Prometheus
}


def nodes(tree: Any) -> Iterator[Any]:
    """Every node of a PromQL syntax tree, the root first."""
    yield tree
    for part in ("lhs", "rhs", "expr", "vector_selector"):
        child = getattr(tree, part, None)
        if hasattr(child, "prettify"):
            yield from nodes(child)
    for argument in getattr(tree, "args", None) or []:
        yield from nodes(argument)


def selectors(tree: Any) -> Iterator[Any]:
    """Every vector selector of a syntax tree."""
    return (node for node in nodes(tree) if type(node).__name__ == "VectorSelector")


def grouping_labels(tree: Any) -> set[str]:
    """Labels that the expression groups or matches by."""
    labels: set[str] = set()
    for node in nodes(tree):
        modifier = getattr(node, "modifier", None)
        grouping = modifier if type(node).__name__ == "AggregateExpr" else getattr(modifier, "matching", None)
        labels |= set(grouping.labels) if grouping is not None else set()
    return labels


def parse(expr: str) -> Any:
    """The syntax tree of a query with Grafana's variables replaced; raises ValueError if the query is invalid."""
    return promql_parser.parse(concrete(expr, run="a"))
