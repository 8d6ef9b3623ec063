"""The four boards, built from the catalogue with Grafana's builders: overview, run, layers by head, and service."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from grafana_foundation_sdk.builders import common, prometheus, table, timeseries
from grafana_foundation_sdk.builders import dashboard as make
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as ui
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.metrics.run_metrics import RUN_METRICS
from foreshock.contract.metrics.service_metrics import SERVICE_METRICS
from foreshock.contract.modes import all_modes, mode_name
from foreshock.dashboards.rules import DATASOURCE_UID, Links

Board = dict[str, Any]
Filters = Mapping[str, str]
"""A PromQL matcher for each label that a board's variables select."""
Panel = TypeVar("Panel", timeseries.Panel, table.Panel)

MANY_RUNS: Final[Filters] = {"run": 'run=~"$run"'}
# `=`, because Grafana does not escape a dot in a single-valued variable. The empty layer is included, because warnings
# about a whole run have that label value.
ONE_RUN: Final[Filters] = {"run": 'run="$run"', "layer": 'layer=~"$layer|"'}

_BOARDS: Final = {
    "overview": ("Overview", "All runs", MANY_RUNS),
    "run": ("Run", "The run", ONE_RUN),
    "layers": ("Layer by head", "Its layers and heads", ONE_RUN),
    "service": ("Fleet and service health", "Fleet and service health", MANY_RUNS),
}
"""The title of each board, the text of links to it, and its filters."""
_DECIDING: Final = ("run.loss", "head.score_offset", "head.score_max")
"""The metrics that show first whether a run is about to fail."""
_CHARTS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "overview": {
        "Incidents": tuple(
            f"incident.{part}"
            for part in ("active", "heads", "opened_step", "corrected_step", "forecast", "acknowledged")
        ),
        "Warnings and switches": (
            *("run.worst_risk", "warning.forecast", "warning.raised"),
            *("switch.outcomes", "switch.not_arrested"),
        ),
    },
    "run": {
        "What decides": (*_DECIDING, "run.worst_risk"),
        "Incidents, warnings and switches": (
            *("incident.active", "incident.forecast", "warning.active", "warning.forecast", "warning.raised"),
            *("switch.outcomes", "switch.not_arrested"),
        ),
        "The training": tuple(m.key for m in RUN_METRICS if m.board == "run" and m.key not in _DECIDING),
        "The worst heads": tuple(m.key for m in HEAD_METRICS if m.board == "run" and m.key not in _DECIDING),
    },
    "layers": {"The worst heads": tuple(m.key for m in HEAD_METRICS if m.board == "heads" and m.key != "head.mode")},
    "service": {
        "Over time": (
            *(m.key for m in (*RUN_METRICS, *SERVICE_METRICS) if m.board == "service"),
            *("run.step", "run.last_step", "run.last_heard", "run.active"),
        ),
    },
}
"""The metrics that each board shows over time, by the heading above them."""
_UNITS: Final = {
    "": "short",
    "ratio": "short",
    "seconds": "s",
    "bytes": "bytes",
    "steps": "locale",  # in full: 12,345 and not 12.3 K
    "timestamp_seconds": "s",  # shown as the time since
}
_SOURCE: Final = ui.DataSourceRef(type_val="prometheus", uid="${datasource}")
_READ_BY_LABELS: Final = ("Time", "Value")
"""Columns to hide in tables that show texts in labels; the value is always 1."""
_CELLS: Final = ui.TableColoredBackgroundCellOptions(ui.TableCellBackgroundDisplayMode.BASIC)
_COLOURS: Final = ("transparent", "semi-dark-orange", "semi-dark-red")


def boards(links: Links) -> dict[str, Board]:
    """Every board by its file name, as the plain data of Grafana's classic dashboard JSON."""
    return {f"{name}.json": _board(name, links) for name in _BOARDS}


def _board(name: str, links: Links) -> Board:
    title, _, filters = _BOARDS[name]
    made = (
        make.Dashboard(f"foreshock / {title}")
        .uid(f"foreshock-{name}")
        .description("Generated from contract/metrics by `foreshock dashboards generate`; change that, not this.")
        .tags(["foreshock"])
        .readonly()
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .variables(_variables(links, filters))
        .annotations(_annotations({"run": filters["run"]}))
    )
    for other, (_, words, _) in _BOARDS.items():
        if other != name:
            way = make.DashboardLink(words).type(schema.DashboardLinkType.LINK).icon("dashboard")
            made.link(way.url(f"/d/foreshock-{other}").include_vars(True).keep_time(True))
    page = make.DashboardLink("The service's page").type(schema.DashboardLinkType.LINK).icon("external link")
    made.link(page.url(links.service).target_blank(True))
    for panel in _tables(name, filters):
        made.with_panel(panel)
    for heading, keys in _CHARTS[name].items():
        made.with_row(make.Row(heading).id(_id(f"row {heading}")))
        for key in keys:
            made.with_panel(_chart(BY_KEY[key], filters))
    board: Board = json.loads(JSONEncoder().encode(made.build()))
    for each in (*board["links"], *board["annotations"]["list"]):
        del each["placement"]  # the builders would hide both in a menu
    return board


def _tables(name: str, filters: Filters) -> Iterator[table.Panel | timeseries.Panel]:
    """Yield the panels above a board's charts."""
    if name == "overview":
        yield _runs(filters)
    if name != "layers":
        yield _alerts(filters)
    if name == "overview":
        words = BY_KEY["incident.words"]
        expr = f"max by ({', '.join(words.labels)}) ({_select(words, filters)})"
        description = f"{_describe(words)} Alerts have the same text."
        yield _table("Incidents in words", description, _READ_BY_LABELS, {}, expr)
    if name == "layers":
        for metric in (*(m for m in HEAD_METRICS if m.levels), BY_KEY["head.mode"]):
            yield _matrix(metric)
        for key in ("head.risk", "head.score_max"):
            yield _by_layer(BY_KEY[key])


def _variables(links: Links, filters: Filters) -> list[Any]:
    """Return the variables named in the filters, and a hidden one with the service's address for data links.

    Runs are sorted by their last step, and a board of one run opens with the newest.
    """
    own = schema.VariableOption(text="foreshock", value=DATASOURCE_UID)
    found = [
        make.DatasourceVariable("datasource").label("Data source").type("prometheus").current(own),
        make.ConstantVariable("service").label("Service").value(links.service),
    ]
    asked = {
        "run": f"query_result(sort_desc({BY_KEY['run.last_step'].name}))",
        "layer": f"label_values({_of_layers(BY_KEY['head.risk'], {'run': ONE_RUN['run']})}, layer)",
    }
    for name in filters:
        made = make.QueryVariable(name).label(name.capitalize()).datasource(_SOURCE)
        made.query({"query": asked[name], "refId": name}).refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        made.sort(schema.VariableSort.DISABLED if name == "run" else schema.VariableSort.NUMERICAL_ASC)
        if name == "run":
            made.regex('/run="([^"]+)"/')
        if name == "layer" or filters is MANY_RUNS:
            every = schema.VariableOption(text="All", value=["$__all"], selected=True)
            made.multi(True).include_all(True).all_value(".+").current(every)
        found.append(made)
    return found


def _annotations(run: Filters) -> list[Any]:
    """Return annotations: a region for the time of each warning, and a mark at every switch decision.

    Grafana joins consecutive samples of a warning. A counter first appears with its first event, which `increase` does
    not count.
    """
    warning, outcomes = BY_KEY["warning.active"], BY_KEY["switch.outcomes"]
    counter = _select(outcomes, run)
    grown = f"increase({counter}[1m]) > 0 or ({counter} > 0 unless {counter} offset 1m)"
    warned, switched = (
        make.AnnotationQuery().name(name).icon_color(colour).datasource(_SOURCE).enable(True).step("15s")
        for name, colour in (("Warnings", "orange"), ("Switches", "blue"))
    )
    warned.expr(f"max by ({', '.join(warning.labels)}) ({_select(warning, run)} == 1)").tag_keys("severity,cause")
    warned.title_format("{{run}}: layer {{layer}} head {{head}} warned")
    warned.text_format("{{signal}} tripped, cause: {{cause}}")
    switched.expr(f"sum by ({', '.join(outcomes.labels)}) ({grown})").tag_keys("mode,outcome")
    switched.title_format("{{run}}: switch to {{mode}} {{outcome}}")
    switched.text_format("The run's page has who, why, before and after.")
    return [warned, switched]


def _unit(metric: Metric) -> str:
    return "percentunit" if metric.percent else _UNITS[metric.unit]


def _describe(metric: Metric) -> str:
    """Return the description of a panel: what it measures, and what bad values look like."""
    return f"{metric.help} Bad: {metric.bad}"


def _select(metric: Metric, filters: Filters) -> str:
    """Return a metric's selector with the filters of the board's variables."""
    matchers = ", ".join(filters[label] for label in metric.labels if label in filters)
    return f"{metric.name}{{{matchers}}}" if matchers else metric.name


def _of_layers(metric: Metric, filters: Filters) -> str:
    """Return the selector of a metric's values per layer."""
    return f"{metric.layer_name}{{{', '.join(filters.values())}}}"


def _shown(metric: Metric, filters: Filters) -> str:
    """Return the expression of a metric's panel: a gauge, the increase of a counter, or the time since a timestamp."""
    selector = _select(metric, filters)
    if metric.kind == "counter":
        return f"increase({selector}[$__rate_interval])"
    if metric.unit == "timestamp_seconds":
        return f"time() - ({selector} > 0)"  # zero means never
    return selector


def _query(expr: str, legend: str = "", *, last: bool = False) -> prometheus.Dataquery:
    """Return one query of a panel; with `last`, only the last value, for a table."""
    made = prometheus.Dataquery().datasource(_SOURCE).expr(expr).legend_format(legend)
    return made.instant().format(PromQueryFormat.TABLE) if last else made.range().format(PromQueryFormat.TIME_SERIES)


def _levels(metric: Metric, quiet: str, watch: str, alarm: str) -> make.ThresholdsConfig:
    """Return the catalogue's levels as colours; only `quiet` for a metric without levels."""
    steps = [schema.Threshold(color=quiet)]
    if (levels := metric.levels) and levels.below:
        steps = [schema.Threshold(color=alarm), schema.Threshold(levels.alarm, quiet)]
    elif levels:
        steps += [schema.Threshold(levels.watch, watch)] if levels.watch is not None else []
        steps.append(schema.Threshold(levels.alarm, alarm))
    return make.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(steps)


def _page_link(run: str = "${run:percentencode}") -> make.DashboardLink:
    """Return a data link to the service's page of the run, where heads can be switched; boards cannot do so."""
    made = make.DashboardLink("Open the run's page (evidence, switch)")
    return made.url(f"${{service}}/?runs={run}").target_blank(True)


def _id(title: str) -> int:
    """Return a panel id derived from the title, so that links still work when other panels change."""
    return 1 + zlib.crc32(title.encode()) % 1_000_000


def _panel(made: Panel, title: str, words: str, unit: str, *queries: prometheus.Dataquery) -> Panel:
    """Set the properties that every panel has."""
    made.id(_id(title)).title(title).description(words).datasource(_SOURCE).unit(unit)
    for ref, query in zip("ABCDEFG", queries, strict=False):
        made.with_target(query.ref_id(ref))
    return made.span(12).height(8)


def _lines(metric: Metric, title: str, words: str, query: prometheus.Dataquery) -> timeseries.Panel:
    made = _panel(timeseries.Panel(), title, words, _unit(metric), query)
    tooltip = common.VizTooltipOptions().mode(ui.TooltipDisplayMode.MULTI).sort(ui.SortOrder.DESCENDING)
    legend = common.VizLegendOptions().display_mode(ui.LegendDisplayMode.LIST).placement(ui.LegendPlacement.BOTTOM)
    axis = common.ScaleDistributionConfig().type(ui.ScaleDistribution(metric.scale))
    if metric.scale != "linear":
        axis.log(10).linear_threshold(1)
    return made.tooltip(tooltip).legend(legend.show_legend(True).calcs(["lastNotNull"])).scale_distribution(axis)


def _chart(metric: Metric, filters: Filters) -> timeseries.Panel:
    """Return a chart of a metric over time; bars for a counter."""
    named = {"layer": "layer {{layer}}", "head": "head {{head}}"}
    of_run = filters is ONE_RUN and "run" in metric.labels
    labels = [label for label in metric.labels if not (of_run and label == "run")]
    legend = " ".join(named.get(label, f"{{{{{label}}}}}") for label in labels) or metric.title
    title = f"Since {metric.title.lower()}" if metric.unit == "timestamp_seconds" else metric.title
    made = _lines(metric, title, _describe(metric), _query(_shown(metric, filters), legend))
    if metric.kind == "counter":
        made.draw_style(ui.GraphDrawStyle.BARS).fill_opacity(50).show_points(ui.VisibilityMode.NEVER)
    return made.data_links([_page_link()]) if of_run else made


def _by_layer(metric: Metric) -> timeseries.Panel:
    words = f"{_describe(metric)} Each line is the worst head of a layer."
    query = _query(f"max by (layer) ({_of_layers(metric, ONE_RUN)})", "layer {{layer}}")
    return _lines(metric, f"{metric.title} by layer", words, query).data_links([_page_link()])


def _reshaped(made: table.Panel, *transformations: tuple[str, dict[str, Any]]) -> table.Panel:
    for name, options in transformations:
        made.with_transformation(schema.DataTransformerConfig(name, options=options))
    return made


def _properties(**values: Any) -> list[schema.DynamicConfigValue]:
    return [schema.DynamicConfigValue(name.replace("__", "."), value) for name, value in values.items()]


def _matrix(metric: Metric) -> table.Panel:
    """Return a table of the last value of every head in Prometheus: a row for each layer, a column for each head.

    Rows and columns have the order of the response, and labels are text ("10" is before "2"), so the transformations
    convert them to numbers and sort.
    """
    words = (
        f"{_describe(metric)} Rows are layers, columns heads; empty heads are not among the worst ones, which are the "
        "only ones in Prometheus (the service's page shows all)."
    )
    query, corner = _query(f"max by (layer, head) ({_select(metric, ONE_RUN)})", last=True), "layer\\head"
    made = _panel(table.Panel(), f"{metric.title}: layer by head", words, _unit(metric), query).height(10)
    made.align(ui.FieldTextAlignment.CENTER).cell_options(_CELLS)
    made.override_by_name(corner, _properties(custom__cellOptions={"type": "auto"}, unit="string"))
    made.thresholds(_levels(metric, *_COLOURS)).data_links([_page_link()])
    if metric.key == "head.mode":
        named = {
            str(int(mode)): schema.ValueMappingResult(mode_name(mode), "semi-dark-blue" if mode else None, index=index)
            for index, mode in enumerate(all_modes())
        }
        made.mappings([schema.ValueMap(named)])
    shape = {"rowField": "layer", "columnField": "head", "valueField": "Value", "emptyValue": "null"}
    for field, further in (("head", [("groupingToMatrix", shape)]), (corner, [])):
        conversions = [{"targetField": field, "destinationType": "number"}]
        numbers = ("convertFieldType", {"conversions": conversions, "fields": {}})
        _reshaped(made, numbers, ("sortBy", {"sort": [{"field": field}]}), *further)
    return made


def _runs(filters: Filters) -> table.Panel:
    """Return a table with a row for each run. A column has an expression, and a metric for its unit and levels."""
    living = f"and on (run) {_select(BY_KEY['run.active'], filters)} == 1"
    columns = {
        "active": ("max by (run) ({})", "run.active"),
        "step": ("max by (run) ({})", "run.step"),
        "last step": (f"(time() - max by (run) ({{}})) {living}", "run.last_step"),
        "worst risk": ("max by (run) ({})", "run.worst_risk"),
        "heard of": (f"(time() - max by (run) ({{}})) {living}", "run.last_heard"),
        "warnings": ("sum by (run) ({})", "warning.active"),
        "steps left": ("min by (run) ({})", "warning.forecast"),
    }
    queries = [expr.replace("{}", _select(BY_KEY[key], filters)) for expr, key in columns.values()]
    words = (
        "Every run with its state, the risk of its worst head and the forecast of steps left. Click a run for its "
        "board, its layers or its page. Bad: a warning, risk near 1, few steps left, an active run whose last step is "
        "old."
    )
    names = {f"Value #{ref}": name for ref, name in zip("ABCDEFG", columns, strict=True)}
    made = _table("Runs", words, ("Time",), names, *queries)
    for name, (_, key) in columns.items():
        shown = {"custom__cellOptions": _CELLS, "thresholds": _levels(BY_KEY[key], *_COLOURS).build()}
        unit = "bool_yes_no" if key == "run.active" else _unit(BY_KEY[key])
        made.override_by_name(name, _properties(unit=unit, **(shown if BY_KEY[key].levels else {})))
    return made.height(10).sort_by([common.TableSortByFieldState().display_name("worst risk").desc(True)])


def _table(title: str, words: str, hidden: Sequence[str], names: Mapping[str, str], *exprs: str) -> table.Panel:
    """Return a table that joins rows with equal labels; a run links to its boards and its page."""
    made = _panel(table.Panel(), title, words, "short", *(_query(expr, last=True) for expr in exprs))
    links = [
        make.DashboardLink(_BOARDS[board][1]).url(
            f"/d/foreshock-{board}?var-run=${{__value.raw:percentencode}}&"
            "${datasource:queryparam}&${__url_time_range}"
        )
        for board in ("run", "layers")
    ]
    links.append(_page_link("${__value.raw:percentencode}"))
    made.override_by_name("run", _properties(links=[link.build() for link in links], unit="string"))
    columns = {"excludeByName": dict.fromkeys(hidden, True), "renameByName": dict(names)}
    return _reshaped(made, ("merge", {}), ("organize", columns)).span(24).height(6)


def _alerts(filters: Filters) -> table.Panel:
    """Return a table of firing alerts from Prometheus, which needs neither a plugin nor further permissions."""
    run = filters["run"]
    # with an empty run: the service's own alerts, which concern every run
    firing = f'ALERTS{{alertname=~"Foreshock.*", alertname!="{WATCHDOG.name}", alertstate="firing", {run}}}'
    ours = firing.replace(run, 'run=""')
    words = "Every alert of the run and of the service that fires. Bad: any; each has a page under docs/runbooks."
    expr = f"max by (alertname, severity, run, layer, head) ({firing} or {ours})"
    return _table("Alerts that fire now", words, _READ_BY_LABELS, {}, expr)
