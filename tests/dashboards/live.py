"""Puts every query of the boards and rules to a running Prometheus: which are in error, which return nothing?

A panel that is always empty looks like good news.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx

from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, rules

Kind = Literal["panel", "variable", "annotation", "rule"]

_LABEL_VALUES: Final = re.compile(r"label_values\((.*),\s*(\w+)\)")
_QUERY_RESULT: Final = re.compile(r"query_result\((.*)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and where it stands. `expr` may still hold Grafana's variables."""

    where: str
    kind: Kind
    expr: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What Prometheus said to a query: how many series, or an error."""

    query: Query
    series: int
    error: str = ""


def queries() -> Iterator[Query]:
    """Every query of every board, and every metric that a rule watches.

    A rule that does not fire returns nothing, as it should; what it watches must be there all the same.
    """
    for name, board in boards(Links()).items():
        for panel in charts(board):
            for target in panel["targets"]:
                yield Query(f"{name}: {panel['title']} ({target['refId']})", "panel", target["expr"])
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield Query(f"{name}: ${variable['name']}", "variable", asked_by(variable["query"]["query"]))
        for annotation in board["annotations"]["list"]:
            yield Query(f"{name}: {annotation['name']}", "annotation", annotation["expr"])
    for rule in rules(Links()):
        for metric in sorted(set(re.findall(r"foreshock_\w+", rule["expr"]))):
            yield Query(rule["alert"], "rule", metric)


def charts(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a board that ask for something; the others are headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def asked_by(text: str) -> str:
    """The PromQL of a variable: that of a `query_result`, or the selector of a `label_values`."""
    match = _QUERY_RESULT.fullmatch(text)
    return match[1] if match else label_values(text)[0]


def label_values(text: str) -> tuple[str, str]:
    """The selector and the label of a Grafana `label_values(selector, label)` query."""
    match = _LABEL_VALUES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not label_values(selector, label)")
    return match[1], match[2]


def concrete(expr: str, *, run: str, rate_interval: str = "1m") -> str:
    """A query with Grafana's variables filled in, as Grafana sends it for one run and all its layers."""
    return expr.replace("$__rate_interval", rate_interval).replace("$run", run).replace("$layer", ".+")


def ask(
    prometheus_url: str,
    asked: Sequence[Query],
    *,
    run: str,
    rate_interval: str = "1m",
    window: str = "1h",
    resolution: str = "15s",
) -> list[Answer]:
    """Evaluate each query every `resolution` of the last `window`; a query is alive if any point has a series.

    `rate_interval` should be four scrape intervals, as in Grafana.

    Raises httpx.HTTPError when Prometheus cannot be reached.
    """
    answers = []
    with httpx.Client(base_url=prometheus_url, timeout=30) as client:
        for query in asked:
            expr = concrete(query.expr, run=run, rate_interval=rate_interval)
            response = client.post("/api/v1/query", data={"query": f"count_over_time(({expr})[{window}:{resolution}])"})
            if response.status_code not in (200, 400, 422):  # the last two are Prometheus's word on a wrong query
                response.raise_for_status()
            body = response.json()
            if body["status"] != "success":
                answers.append(Answer(query, 0, body["error"]))
            else:
                answers.append(Answer(query, len(body["data"]["result"])))
    return answers
