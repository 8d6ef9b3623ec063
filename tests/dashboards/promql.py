"""The boards as they are made, their queries, and what a query of PromQL is made of."""

from collections.abc import Iterator
from typing import Any

import promql_parser
from tests.dashboards.live import Query, concrete, queries

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, rules

BOARDS = boards(Links())
QUERIES = [query for query in queries() if query.kind != "rule"] + [
    Query(rule["alert"], "rule", rule["expr"]) for rule in rules(Links())
]
LABELS = {
    **{metric.name: set(metric.labels) for metric in METRICS},
    **{metric.layer_name: {"run", "layer"} for metric in HEAD_METRICS},
    "up": {"job"},
    "ALERTS": {"alertname", "alertstate", "severity", "run", "layer", "head"},  # of Prometheus itself
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
    """The syntax tree of a query with Grafana's variables filled in; raises ValueError on a mistake."""
    return promql_parser.parse(concrete(expr, run="a"))
