"""Grafana panels from catalogue entries, as the plain data of Grafana's classic dashboard JSON (schema version 42).

skeletons.json has the parts of each kind of panel that no metric changes, in Grafana's own form. The board
decides where a panel is (`gridPos`). Its id is a hash of its title, so that links to a panel still work when its
neighbours change.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foreshock.contract.metrics.metric import Metric
from foreshock.contract.modes import all_modes, mode_name

Panel = dict[str, Any]

_SKELETONS: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("skeletons.json").read_text())

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


def skeleton(name: str, *, title: str = "", grafana_unit: str = "") -> dict[str, Any]:
    """What skeletons.json has under a name, with the title and the unit of a metric in their places."""
    text = json.dumps(_SKELETONS[name]).replace("{title}", title).replace("{unit}", grafana_unit)
    made: dict[str, Any] = json.loads(text)
    return made


def panel(
    name: str,
    title: str,
    description: str,
    targets: Sequence[dict[str, Any]],
    *,
    grafana_unit: str,
    metric_title: str = "",
    custom: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Panel:
    """A panel of the skeleton `name`; `custom` and `defaults` add to its fields."""
    made = skeleton(name, title=metric_title, grafana_unit=grafana_unit)
    fields = {"unit": grafana_unit, "custom": {**made.get("custom", {}), **(custom or {})}, **(defaults or {})}
    return {
        "id": 1 + zlib.crc32(title.encode()) % 1_000_000,
        "type": made["type"],
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": list(targets),
        "fieldConfig": {"defaults": fields, "overrides": made.get("overrides", [])},
        "options": made["options"],
        "transformations": made.get("transformations", []),
    }


def time_series(metric: Metric, filters: Filters) -> Panel:
    """A metric over time; counters as bars."""
    one_run = filters is ONE_RUN
    labels = [label for label in metric.labels if not (one_run and label == "run")]
    title = f"Since {metric.title.lower()}" if metric.unit == "timestamp_seconds" else metric.title
    name = "counter" if metric.kind == "counter" else "timeseries"
    targets = [target(query(metric, filters), legend_format=legend(labels, fallback=metric.title))]
    links = {"links": [page_link()]} if "run" in metric.labels and one_run else {}
    return panel(
        name, title, describe(metric), targets, grafana_unit=unit(metric), custom=scale(metric), defaults=links
    )


def stat(metric: Metric, title: str, expr: str) -> Panel:
    """One number, coloured by the catalogue's levels."""
    targets = [target(expr, legend_format=title)]
    own = {**thresholds(metric, quiet="text", watch="orange", alarm="red"), "noValue": "none"}
    return panel("stat", title, describe(metric), targets, grafana_unit=unit(metric), defaults=own)


def by_step(metric: Metric, step: str, expr: str) -> Panel:
    """A metric against the optimizer step, for one run.

    The trend panel refuses steps that do not ascend, as after a rollback; so its transformations group and sort by
    step, and show the later value of a step that was taken twice. It has no annotations: those are on the time axis.
    """
    words = f"{describe(metric)} Against the optimizer step; after a rollback the later value of a step is shown."
    targets = [target(step, legend_format="step"), target(expr, legend_format=metric.title, ref="B")]
    return panel(
        "trend",
        f"{metric.title} by step",
        words,
        [each | {"format": "table"} for each in targets],
        grafana_unit=unit(metric),
        metric_title=metric.title,
        custom=scale(metric),
    )


def matrix(metric: Metric, expr: str) -> Panel:
    """The last value of every head that Prometheus holds: a row for each layer, a column for each head.

    Rows and columns come in the order of the answer, and labels are text: "10" before "2". So the transformations make
    numbers of them and sort.
    """
    words = "Rows are layers, columns heads; empty heads are not among the worst that Prometheus is given (the "
    words = f"{describe(metric)} {words}service's page shows all)."
    colours = thresholds(metric, quiet="transparent", watch="semi-dark-orange", alarm="semi-dark-red")
    mapped = {"mappings": _modes()} if metric.key == "head.mode" else {}
    title, targets = f"{metric.title}: layer by head", [target(expr, table=True)]
    own = {**colours, "links": [page_link()], **mapped}
    return panel("matrix", title, words, targets, grafana_unit=unit(metric), defaults=own)


def layers_over_time(metric: Metric, expr: str) -> Panel:
    """The worst head of every layer over time, as a heat map with a row for each layer.

    Its colours are a perceptually even scale that colour-blind people can read.
    """
    words = f"{describe(metric)} Each row is a layer, coloured by its worst head."
    title, targets = f"{metric.title} by layer over time", [target(expr, legend_format="{{layer}}")]
    return panel("heatmap", title, words, targets, grafana_unit=unit(metric), metric_title=metric.title)


def _modes() -> list[dict[str, Any]]:
    """Mode flags by their names, whatever is switched in blue."""
    names = {
        str(int(mode)): {"text": mode_name(mode), "index": index, **({"color": "semi-dark-blue"} if mode else {})}
        for index, mode in enumerate(all_modes())
    }
    return [{"type": "value", "options": names}]


def modes_over_time(metric: Metric, expr: str) -> Panel:
    """Which mode each head is in, over time."""
    targets, shown = [target(expr, legend_format="layer {{layer}} head {{head}}")], describe(metric)
    own = {"mappings": _modes(), "links": [page_link()]}
    return panel("modes", "Modes over time", shown, targets, grafana_unit="short", defaults=own)


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
    targets = [target(expr, ref=ref, table=True) for ref, (_, expr, _) in zip(refs, columns, strict=True)]
    made = panel("table", title, description, targets, grafana_unit="short")
    properties = {
        name: [{"id": "unit", "value": grafana_unit}, *_coloured((levels or {}).get(name))]
        for name, _, grafana_unit in columns
    }
    links = [board_link("run", "Board of the run"), board_link("layers", "Its layers and heads"), page_link("value")]
    properties["run"] = [{"id": "links", "value": links}, {"id": "unit", "value": "string"}]
    made["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": each} for name, each in properties.items()
    ]
    single = len(columns) == 1
    rename = {"Value" if single else f"Value #{ref}": name for ref, (name, _, _) in zip(refs, columns, strict=True)}
    organized = {"excludeByName": dict.fromkeys(("Time", *hide), True), "renameByName": rename}
    made["transformations"] = [*([] if single else [{"id": "merge", "options": {}}])]
    made["transformations"].append({"id": "organize", "options": organized})
    if sort:
        made["options"]["sortBy"] = [{"displayName": sort, "desc": True}]
    return made


def _coloured(metric: Metric | None) -> list[dict[str, Any]]:
    """The properties that paint a column's cells by a metric's levels."""
    if metric is None:
        return []
    colours = thresholds(metric, quiet="transparent", watch="semi-dark-orange", alarm="semi-dark-red")
    return [
        {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}},
        {"id": "thresholds", "value": colours["thresholds"]},
    ]
