"""Grafana panels from catalogue entries, as the plain data of Grafana's classic dashboard JSON (schema version 42).

A panel's place (`gridPos`) is left to the board. Its id is a hash of its title, so that links to a panel survive the
coming and going of its neighbours.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foreshock.contract.metrics.metric import Metric
from foreshock.contract.modes import all_modes, mode_name

Panel = dict[str, Any]

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
RUN_PAGE: Final = "${service}/?runs="
"""The service's own page, where a switch is confirmed; a board carries no token and can switch nothing itself."""

_UNITS: Final = {
    "": "short",
    "ratio": "short",
    "seconds": "s",
    "bytes": "bytes",
    "steps": "locale",  # in full: 12,345 and not 12.3 K
    "timestamp_seconds": "s",  # shown as the time since
}
Filters = Mapping[str, str]
"""What a board's variables choose: a PromQL matcher for each label."""

MANY_RUNS: Final[Filters] = {"run": 'run=~"$run"'}
# Equality, since Grafana does not escape a dot in a variable of a single value. Of layers, also the empty one: warnings
# about a run as a whole have none.
ONE_RUN: Final[Filters] = {"run": 'run="$run"', "layer": 'layer=~"$layer|"'}

_LEGENDS: Final = {"layer": "layer {{layer}}", "head": "head {{head}}"}


def unit(metric: Metric) -> str:
    """Grafana's unit of a metric."""
    return "percentunit" if metric.percent else _UNITS[metric.unit]


def scale(metric: Metric) -> dict[str, Any]:
    """The axis that the catalogue asks for, as a panel's custom field."""
    kinds = {
        "linear": {"type": "linear"},
        "log": {"type": "log", "log": 10},
        "symlog": {"type": "symlog", "log": 10, "linearThreshold": 1},
    }
    return {"scaleDistribution": kinds[metric.scale]}


def thresholds(metric: Metric, *, quiet: str, watch: str, alarm: str) -> dict[str, Any]:
    """The catalogue's levels as colours; `quiet` alone for a metric that has none."""
    steps: list[dict[str, Any]] = [{"color": quiet, "value": None}]
    if levels := metric.levels:
        steps += [{"color": watch, "value": levels.watch}] if levels.watch is not None else []
        steps.append({"color": alarm, "value": levels.alarm})
        if levels.below:
            steps = [{"color": alarm, "value": None}, {"color": quiet, "value": levels.alarm}]
    return {"thresholds": {"mode": "absolute", "steps": steps}}


def describe(metric: Metric) -> str:
    """What a panel says behind its information sign: what it is, and what bad looks like."""
    return f"{metric.help} Bad: {metric.bad}"


def select(metric: Metric, filters: Filters, *, of_layers: bool = False) -> str:
    """A metric's selector, or that of its values per layer, with the filters of the board's variables."""
    name, labels = (metric.layer_name, ("run", "layer")) if of_layers else (metric.name, metric.labels)
    matchers = ", ".join(filters[label] for label in labels if label in filters)
    return f"{name}{{{matchers}}}" if matchers else name


def query(metric: Metric, filters: Filters) -> str:
    """What a metric's panel shows: a gauge as it is, a counter by its increase, a point in time by the time since."""
    selector = select(metric, filters)
    if metric.kind == "counter":
        return f"increase({selector}[$__rate_interval])"
    if metric.unit == "timestamp_seconds":
        return f"time() - ({selector} > 0)"  # zero means never
    return selector


def legend(labels: Sequence[str], *, fallback: str) -> str:
    """A series' name on a panel from its labels; `fallback` where it has none."""
    return " ".join(_LEGENDS.get(label, f"{{{{{label}}}}}") for label in labels) or fallback


def target(expr: str, *, legend_format: str = "", ref: str = "A", table: bool = False) -> dict[str, Any]:
    """One query of a panel; a table asks for the last value only."""
    shape = (
        {"format": "table", "instant": True, "range": False}
        if table
        else {"format": "time_series", "instant": False, "range": True}
    )
    return {"refId": ref, "datasource": DATASOURCE, "expr": expr, "legendFormat": legend_format, **shape}


def board_link(board: str, title: str) -> dict[str, Any]:
    """A data link from a row about a run to another board of ours, at the same time."""
    url = (
        f"/d/foreshock-{board}?var-run=${{__value.raw:percentencode}}&${{datasource:queryparam}}&${{__url_time_range}}"
    )
    return {"title": title, "url": url, "targetBlank": False}


def row(title: str) -> Panel:
    """A heading; what stands below it folds with it."""
    return {
        "id": 1 + zlib.crc32(f"row {title}".encode()) % 1_000_000,
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
    }


def page_link(label: str = "run") -> dict[str, Any]:
    """A data link to the service's page of the run under the pointer."""
    run = "${run:percentencode}" if label == "run" else "${__value.raw:percentencode}"
    return {"title": "Open the run's page (evidence, switch)", "url": RUN_PAGE + run, "targetBlank": True}


def panel(
    kind: str,
    title: str,
    description: str,
    targets: Sequence[dict[str, Any]],
    *,
    grafana_unit: str,
    options: Mapping[str, Any],
    custom: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    overrides: Sequence[dict[str, Any]] = (),
    transformations: Sequence[dict[str, Any]] = (),
) -> Panel:
    """A panel of any kind with the parts that every panel has."""
    return {
        "id": 1 + zlib.crc32(title.encode()) % 1_000_000,
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": list(targets),
        "fieldConfig": {
            "defaults": {"unit": grafana_unit, "custom": dict(custom or {}), **(defaults or {})},
            "overrides": list(overrides),
        },
        "options": dict(options),
        "transformations": list(transformations),
    }


_LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]}
_TOOLTIP: Final = {"mode": "multi", "sort": "desc"}
_LINE: Final = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "auto", "spanNulls": False}
_BARS: Final = {"drawStyle": "bars", "lineWidth": 1, "fillOpacity": 50, "showPoints": "never"}


def time_series(metric: Metric, filters: Filters) -> Panel:
    """A metric over time; counters as bars."""
    one_run = filters is ONE_RUN
    labels = [label for label in metric.labels if not (one_run and label == "run")]
    title = f"Since {metric.title.lower()}" if metric.unit == "timestamp_seconds" else metric.title
    return panel(
        "timeseries",
        title,
        describe(metric),
        [target(query(metric, filters), legend_format=legend(labels, fallback=metric.title))],
        grafana_unit=unit(metric),
        options={"legend": _LEGEND, "tooltip": _TOOLTIP},
        custom={
            **(_BARS if metric.kind == "counter" else _LINE),
            **scale(metric),
        },
        defaults={"links": [page_link()]} if "run" in metric.labels and one_run else None,
    )


def stat(metric: Metric, title: str, expr: str) -> Panel:
    """One number, coloured by the catalogue's levels."""
    return panel(
        "stat",
        title,
        describe(metric),
        [target(expr, legend_format=title)],
        grafana_unit=unit(metric),
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value",
        },
        defaults={**thresholds(metric, quiet="text", watch="orange", alarm="red"), "noValue": "none"},
    )


def by_step(metric: Metric, step: str, expr: str) -> Panel:
    """A metric against the optimizer step, for one run.

    The trend panel refuses steps that do not ascend, as after a rollback; grouping and sorting by step mends that, and
    of a step that was taken twice shows the later value. It shows no annotations: those are on the time axis.
    """
    return panel(
        "trend",
        f"{metric.title} by step",
        f"{describe(metric)} Against the optimizer step; after a rollback the later value of a step is shown.",
        [
            target(step, legend_format="step") | {"format": "table"},
            target(expr, legend_format=metric.title, ref="B") | {"format": "table"},
        ],
        grafana_unit=unit(metric),
        options={"legend": _LEGEND, "tooltip": _TOOLTIP, "xField": "step"},
        custom={**_LINE, **scale(metric)},
        overrides=[{"matcher": {"id": "byName", "options": "step"}, "properties": [{"id": "unit", "value": "short"}]}],
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "groupBy",
                "options": {
                    "fields": {
                        "Value #A": {"operation": "groupby", "aggregations": []},
                        "Value #B": {"operation": "aggregate", "aggregations": ["lastNotNull"]},
                    }
                },
            },
            {"id": "sortBy", "options": {"sort": [{"field": "Value #A"}]}},
            {
                "id": "organize",
                "options": {"renameByName": {"Value #A": "step", "Value #B (lastNotNull)": metric.title}},
            },
        ],
    )


def matrix(metric: Metric, expr: str) -> Panel:
    """The last value of every head that Prometheus holds: a row for each layer, a column for each head."""
    colours = thresholds(metric, quiet="transparent", watch="semi-dark-orange", alarm="semi-dark-red")
    return panel(
        "table",
        f"{metric.title}: layer by head",
        f"{describe(metric)} Rows are layers, columns heads; empty heads are not among the worst that Prometheus is "
        "given (the service's page shows all).",
        [target(expr, table=True)],
        grafana_unit=unit(metric),
        options={"showHeader": True, "cellHeight": "sm"},
        custom={"align": "center", "cellOptions": {"type": "color-background", "mode": "basic"}},
        defaults={**colours, "links": [page_link()], **({"mappings": _modes()} if metric.key == "head.mode" else {})},
        overrides=[
            {
                "matcher": {"id": "byName", "options": "layer\\head"},
                "properties": [
                    {"id": "custom.cellOptions", "value": {"type": "auto"}},
                    {"id": "unit", "value": "string"},
                ],
            }
        ],
        # Rows and columns come in the order in which they are met, and labels are text: "10" before "2".
        transformations=[
            *_ascending("head"),
            {
                "id": "groupingToMatrix",
                "options": {"rowField": "layer", "columnField": "head", "valueField": "Value", "emptyValue": "null"},
            },
            *_ascending("layer\\head"),
        ],
    )


def _ascending(field: str) -> list[dict[str, Any]]:
    """Transformations that sort by a field of numbers that are written as text."""
    numbers = [{"targetField": field, "destinationType": "number"}]
    return [
        {"id": "convertFieldType", "options": {"conversions": numbers, "fields": {}}},
        {"id": "sortBy", "options": {"sort": [{"field": field}]}},
    ]


def layers_over_time(metric: Metric, expr: str) -> Panel:
    """The worst head of every layer over time, as a heat map with a row for each layer."""
    return panel(
        "heatmap",
        f"{metric.title} by layer over time",
        f"{describe(metric)} Each row is a layer, coloured by its worst head.",
        [target(expr, legend_format="{{layer}}")],
        grafana_unit=unit(metric),
        options={
            "calculate": False,
            "rowsFrame": {"layout": "auto", "value": metric.title},
            # A perceptually even scale that colour-blind people can read.
            "color": {"mode": "scheme", "scheme": "Viridis", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
            "cellGap": 0,
            "yAxis": {"axisLabel": "layer", "axisPlacement": "left", "reverse": True},
            "cellValues": {"unit": unit(metric)},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
            "showValue": "never",
        },
    )


def _modes() -> list[dict[str, Any]]:
    """Mode flags by their names, whatever is switched in blue."""
    names = {
        str(int(mode)): {"text": mode_name(mode), "index": index, **({"color": "semi-dark-blue"} if mode else {})}
        for index, mode in enumerate(all_modes())
    }
    return [{"type": "value", "options": names}]


def modes_over_time(metric: Metric, expr: str) -> Panel:
    """Which mode each head is in, over time."""
    return panel(
        "state-timeline",
        "Modes over time",
        describe(metric),
        [target(expr, legend_format="layer {{layer}} head {{head}}")],
        grafana_unit="short",
        options={"showValue": "auto", "mergeValues": True, "rowHeight": 0.9, "legend": _LEGEND, "tooltip": _TOOLTIP},
        custom={"lineWidth": 0, "fillOpacity": 70},
        defaults={"mappings": _modes(), "links": [page_link()]},
    )


def table(
    title: str,
    description: str,
    columns: Sequence[tuple[str, str, str]],
    *,
    hide: Sequence[str] = (),
    levels: Mapping[str, Metric] | None = None,
    sort: str | None = None,
) -> Panel:
    """Rows that share labels, one column for each (name, expression, Grafana unit).

    `hide` names columns as Grafana has them before they get their names here. A column is coloured by the levels of
    the metric that `levels` names for it; the largest of the column `sort` come first.
    """
    refs = [chr(ord("A") + index) for index in range(len(columns))]
    overrides: list[dict[str, Any]] = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "unit", "value": grafana_unit}, *_coloured((levels or {}).get(name))],
        }
        for name, _, grafana_unit in columns
    ]
    overrides.append(
        {
            "matcher": {"id": "byName", "options": "run"},
            "properties": [
                {
                    "id": "links",
                    "value": [
                        board_link("run", "Board of the run"),
                        board_link("layers", "Its layers and heads"),
                        page_link("value"),
                    ],
                },
                {"id": "unit", "value": "string"},
            ],
        }
    )
    single = len(columns) == 1
    rename = {"Value" if single else f"Value #{ref}": name for ref, (name, _, _) in zip(refs, columns, strict=True)}
    return panel(
        "table",
        title,
        description,
        [target(expr, ref=ref, table=True) for ref, (_, expr, _) in zip(refs, columns, strict=True)],
        grafana_unit="short",
        options={
            "showHeader": True,
            "cellHeight": "sm",
            **({"sortBy": [{"displayName": sort, "desc": True}]} if sort else {}),
        },
        overrides=overrides,
        transformations=[
            *([] if single else [{"id": "merge", "options": {}}]),
            {
                "id": "organize",
                "options": {"excludeByName": dict.fromkeys(("Time", *hide), True), "renameByName": rename},
            },
        ],
    )


def _coloured(metric: Metric | None) -> list[dict[str, Any]]:
    """The properties that paint a column's cells by a metric's levels."""
    if metric is None:
        return []
    colours = thresholds(metric, quiet="transparent", watch="semi-dark-orange", alarm="semi-dark-red")
    return [
        {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}},
        {"id": "thresholds", "value": colours["thresholds"]},
    ]
