"""The four boards, built from the catalogue with Grafana's own builders: overview, run, layers by head, and service."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, statetimeline, table, timeseries, trend
from grafana_foundation_sdk.builders import dashboard as make
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as ui
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.metrics.run_metrics import RUN_METRICS
from foreshock.contract.metrics.service_metrics import SERVICE_METRICS
from foreshock.contract.modes import all_modes, mode_name
from foreshock.dashboards.rules import DATASOURCE_UID, JOB, Links

Board = dict[str, Any]
Filters = Mapping[str, str]
"""What a board's variables choose: a PromQL matcher for each label."""
Panel = TypeVar("Panel", timeseries.Panel, stat.Panel, trend.Panel, table.Panel, heatmap.Panel, statetimeline.Panel)
Lines = TypeVar("Lines", timeseries.Panel, trend.Panel, statetimeline.Panel)

MANY_RUNS: Final[Filters] = {"run": 'run=~"$run"'}
# Equality, since Grafana does not escape a dot in a variable of a single value. Of layers, also the empty one: warnings
# about a run as a whole have none.
ONE_RUN: Final[Filters] = {"run": 'run="$run"', "layer": 'layer=~"$layer|"'}

_TITLES: Final = {
    "overview": ("Overview", "All runs"),
    "run": ("Run", "The run"),
    "layers": ("Layer by head", "Its layers and heads"),
    "service": ("Fleet and service health", "Fleet and service health"),
}
"""The title of each board, and the words of a link to it."""

_UNITS: Final = {
    "": "short",
    "ratio": "short",
    "seconds": "s",
    "bytes": "bytes",
    "steps": "locale",  # in full: 12,345 and not 12.3 K
    "timestamp_seconds": "s",  # shown as the time since
}
_SOURCE: Final = ui.DataSourceRef(type_val="prometheus", uid="${datasource}")
_DECIDING: Final = ("run.loss", "head.score_offset", "head.score_max")
"""The metrics that tell first whether a run is about to fail."""
_CELLS: Final = ui.TableColoredBackgroundCellOptions(ui.TableCellBackgroundDisplayMode.BASIC)
_COLOURS: Final = ("transparent", "semi-dark-orange", "semi-dark-red")


def boards(links: Links) -> dict[str, Board]:
    """Every board by its file name, as the plain data of Grafana's classic dashboard JSON."""
    return {
        "overview.json": _board("overview", _overview(), links, MANY_RUNS),
        "run.json": _board("run", _run(), links, ONE_RUN),
        "layers.json": _board("layers", _layers(), links, ONE_RUN),
        "service.json": _board("service", _service(), links, MANY_RUNS),
    }


def _overview() -> Iterator[Any]:
    yield _number("run.active", "Active runs", f"sum({_select('run.active', MANY_RUNS)})")
    yield from _state(MANY_RUNS)
    by_run = {
        name: f"max by (run) ({_select(f'run.{name}', MANY_RUNS)})"
        for name in ("active", "step", "last_step", "worst_risk", "last_heard")
    }
    living = f"and on (run) {_select('run.active', MANY_RUNS)} == 1"
    runs = _table(
        "Runs",
        "Every run with its state, the risk of its worst head and the forecast of steps left. Click a run for its "
        "board, its layers or its page. Bad: a warning, risk near 1, few steps left, an active run whose last step is "
        "old.",
        {
            "active": (by_run["active"], "bool_yes_no"),
            "step": (by_run["step"], "locale"),
            "last step": (f"(time() - {by_run['last_step']}) {living}", BY_KEY["run.last_step"]),
            "worst risk": (by_run["worst_risk"], BY_KEY["run.worst_risk"]),
            "heard of": (f"(time() - {by_run['last_heard']}) {living}", BY_KEY["run.last_heard"]),
            "warnings": (f"sum by (run) ({_select('warning.active', MANY_RUNS)})", BY_KEY["warning.active"]),
            "steps left": (f"min by (run) ({_select('warning.forecast', MANY_RUNS)})", BY_KEY["warning.forecast"]),
        },
        values=[f"Value #{ref}" for ref in "ABCDEFG"],
    )
    yield runs.height(10).sort_by([common.TableSortByFieldState().display_name("worst risk").desc(True)])
    yield _alerts(MANY_RUNS)
    yield _listing(
        "Warnings that are raised now",
        f"{_describe(BY_KEY['warning.active'])} Click the run to see the evidence and to switch the head.",
        "raised",
        f"max by (run, layer, head, cause, signal, severity) ({_select('warning.active', MANY_RUNS)} == 1)",
    )
    words = BY_KEY["incident.words"]
    yield _listing(
        "Incidents in words",
        f"{_describe(words)} This is what an alert says.",
        "open",
        f"max by ({', '.join(words.labels)}) ({_select(words.key, MANY_RUNS)})",
    )
    yield _row("Incidents")
    parts = ("active", "heads", "opened_step", "corrected_step", "forecast", "acknowledged")
    yield from _grid((f"incident.{part}" for part in parts), MANY_RUNS)
    yield _row("Warnings and switches")
    yield from _grid(
        ("run.worst_risk", "warning.forecast", "warning.raised", "switch.outcomes", "switch.not_arrested"), MANY_RUNS
    )


def _run() -> Iterator[Any]:
    step = f"max({_select('run.step', ONE_RUN)})"
    yield _number("run.step", "Step", step)
    yield from _state(ONE_RUN)
    yield _alerts(ONE_RUN).height(5)
    yield _row("What decides")
    yield from _grid((*_DECIDING, "run.worst_risk"), ONE_RUN)
    yield _row("Incidents, warnings and switches")
    yield from _grid(("incident.active", "incident.forecast", "warning.forecast", "warning.raised"), ONE_RUN)
    yield from _grid(("switch.outcomes", "switch.not_arrested"), ONE_RUN)
    for title, metrics in (("The training", RUN_METRICS), ("The worst heads", HEAD_METRICS)):
        yield _row(title)
        yield from _grid((m.key for m in metrics if m.board == "run" and m.key not in _DECIDING), ONE_RUN)
    yield _row("Against the step")
    for key in ("run.loss", "head.score_max"):
        yield _by_step(BY_KEY[key], step)


def _layers() -> Iterator[Any]:
    yield _row("The last value of every head")
    for metric in (*(m for m in HEAD_METRICS if m.levels), BY_KEY["head.mode"]):
        yield _matrix(metric)
    yield _row("Over time")
    for key in ("head.risk", "head.score_max"):
        yield _layers_over_time(BY_KEY[key])
    yield _modes_over_time(BY_KEY["head.mode"])
    yield _row("The worst heads")
    yield from _grid((m.key for m in HEAD_METRICS if m.board == "heads" and m.key != "head.mode"), ONE_RUN)


def _service() -> Iterator[Any]:
    words = "1 while Prometheus can scrape the service. Bad: 0; agents still detect failures, but the page is stale."
    levels = [schema.Threshold(color="red"), schema.Threshold(1, "green")]
    up = _stat("Service", words, "bool_on_off", _query(f'max(up{{job="{JOB}"}})', "service"))
    yield up.thresholds(make.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(levels))
    yield _number("service.watchdog", "Since the last watchdog", _shown(BY_KEY["service.watchdog"], MANY_RUNS))
    yield _number("service.store", "Store", BY_KEY["service.store"].name)
    yield _number("service.series_dropped", "Series left out", BY_KEY["service.series_dropped"].name)
    yield from _grid((m.key for m in (*RUN_METRICS, *SERVICE_METRICS) if m.board == "service"), MANY_RUNS)
    yield from _grid(("run.step", "run.last_step", "run.last_heard", "run.active"), MANY_RUNS)


def _board(name: str, panels: Iterable[Any], links: Links, filters: Filters) -> Board:
    made = (
        make.Dashboard(f"foreshock / {_TITLES[name][0]}")
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
    for other, (_, words) in _TITLES.items():
        if other != name:
            way = make.DashboardLink(words).type(schema.DashboardLinkType.LINK).icon("dashboard")
            made.link(way.url(f"/d/foreshock-{other}").include_vars(True).keep_time(True))
    page = make.DashboardLink("The service's page").type(schema.DashboardLinkType.LINK).icon("external link")
    made.link(page.url(links.service).target_blank(True))
    for panel in panels:
        made.with_row(panel) if isinstance(panel, make.Row) else made.with_panel(panel)
    board: Board = json.loads(JSONEncoder().encode(made.build()))
    for each in (*board["links"], *board["annotations"]["list"]):
        del each["placement"]  # the builders would hide both in a menu
    return board


def _variables(links: Links, filters: Filters) -> list[Any]:
    """The variables that the filters name, and the service's address for data links, which is hidden.

    The run that stepped last comes first, and a board of one run opens with it.
    """
    own = schema.VariableOption(text="foreshock", value=DATASOURCE_UID)
    found = [
        make.DatasourceVariable("datasource").label("Data source").type("prometheus").current(own),
        make.ConstantVariable("service").label("Service").value(links.service),
    ]
    asked = {
        "run": f"query_result(sort_desc({BY_KEY['run.last_step'].name}))",
        "layer": f"label_values({_select('head.risk', {'run': ONE_RUN['run']}, of_layers=True)}, layer)",
    }
    for name in filters:
        made = make.QueryVariable(name).label(name.capitalize()).datasource(_SOURCE)
        made.query({"query": asked[name], "refId": name}).refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        if name == "run":
            made.regex('/run="([^"]+)"/').sort(schema.VariableSort.DISABLED)
        else:
            made.sort(schema.VariableSort.NUMERICAL_ASC)
        if name == "layer" or filters is MANY_RUNS:
            every = schema.VariableOption(text="All", value=["$__all"], selected=True)
            made.multi(True).include_all(True).all_value(".+").current(every)
        found.append(made)
    return found


def _annotations(run: Filters) -> list[Any]:
    """A band for as long as a head is warned about, and a mark at every switch decision.

    Grafana joins the samples of a warning that follow each other. A counter is born with its first event, which
    `increase` cannot see.
    """
    warning, outcomes = BY_KEY["warning.active"], BY_KEY["switch.outcomes"]
    counter = _select(outcomes.key, run)
    grown = f"increase({counter}[1m]) > 0 or ({counter} > 0 unless {counter} offset 1m)"
    warned, switched = (
        make.AnnotationQuery().name(name).icon_color(colour).datasource(_SOURCE).enable(True).step("15s")
        for name, colour in (("Warnings", "orange"), ("Switches", "blue"))
    )
    warned.expr(f"max by ({', '.join(warning.labels)}) ({_select(warning.key, run)} == 1)").tag_keys("severity,cause")
    warned.title_format("{{run}}: layer {{layer}} head {{head}} warned")
    warned.text_format("{{signal}} tripped, cause: {{cause}}")
    switched.expr(f"sum by ({', '.join(outcomes.labels)}) ({grown})").tag_keys("mode,outcome")
    switched.title_format("{{run}}: switch to {{mode}} {{outcome}}")
    switched.text_format("The run's page has who, why, before and after.")
    return [warned, switched]


def _unit(metric: Metric) -> str:
    return "percentunit" if metric.percent else _UNITS[metric.unit]


def _describe(metric: Metric) -> str:
    """What a panel says behind its information sign: what it is, and what bad looks like."""
    return f"{metric.help} Bad: {metric.bad}"


def _select(key: str, filters: Filters, *, of_layers: bool = False) -> str:
    """A metric's selector, or that of its values per layer, with the filters of the board's variables."""
    metric = BY_KEY[key]
    name, labels = (metric.layer_name, ("run", "layer")) if of_layers else (metric.name, metric.labels)
    matchers = ", ".join(filters[label] for label in labels if label in filters)
    return f"{name}{{{matchers}}}" if matchers else name


def _of_heads(metric: Metric) -> str:
    return f"max by (layer, head) ({_select(metric.key, ONE_RUN)})"


def _shown(metric: Metric, filters: Filters) -> str:
    """What a metric's panel shows: a gauge as it is, a counter by its increase, a point in time by the time since."""
    selector = _select(metric.key, filters)
    if metric.kind == "counter":
        return f"increase({selector}[$__rate_interval])"
    if metric.unit == "timestamp_seconds":
        return f"time() - ({selector} > 0)"  # zero means never
    return selector


def _query(expr: str, legend: str = "", *, table: bool = False) -> prometheus.Dataquery:
    """One query of a panel; a table asks for the last value only."""
    made = prometheus.Dataquery().datasource(_SOURCE).expr(expr).legend_format(legend)
    return made.instant().format(PromQueryFormat.TABLE) if table else made.range().format(PromQueryFormat.TIME_SERIES)


def _levels(metric: Metric, quiet: str, watch: str, alarm: str) -> make.ThresholdsConfig:
    """The catalogue's levels as colours; `quiet` alone for a metric that has none."""
    steps = [schema.Threshold(color=quiet)]
    if (levels := metric.levels) and levels.below:
        steps = [schema.Threshold(color=alarm), schema.Threshold(levels.alarm, quiet)]
    elif levels:
        steps += [schema.Threshold(levels.watch, watch)] if levels.watch is not None else []
        steps.append(schema.Threshold(levels.alarm, alarm))
    return make.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(steps)


def _page_link(run: str = "${run:percentencode}") -> make.DashboardLink:
    """A data link to the service's page of the run, where a switch is confirmed: a board can switch nothing itself."""
    made = make.DashboardLink("Open the run's page (evidence, switch)")
    return made.url(f"${{service}}/?runs={run}").target_blank(True)


def _panel(made: Panel, title: str, words: str, unit: str, *queries: prometheus.Dataquery) -> Panel:
    """The parts of every panel. The id is a hash of the title, so that links still work when neighbours change."""
    made.id(1 + zlib.crc32(title.encode()) % 1_000_000).title(title).description(words).datasource(_SOURCE).unit(unit)
    for ref, query in zip("ABCDEFG", queries, strict=False):
        made.with_target(query.ref_id(ref))
    return made.span(12).height(8)


def _row(title: str) -> make.Row:
    """A heading; the panels below it fold with it."""
    return make.Row(title).id(1 + zlib.crc32(f"row {title}".encode()) % 1_000_000)


def _lines(made: Lines, metric: Metric) -> Lines:
    """The legend, the tooltip and the axis of lines over time or steps."""
    tooltip = common.VizTooltipOptions().mode(ui.TooltipDisplayMode.MULTI).sort(ui.SortOrder.DESCENDING)
    legend = common.VizLegendOptions().display_mode(ui.LegendDisplayMode.LIST).placement(ui.LegendPlacement.BOTTOM)
    axis = common.ScaleDistributionConfig().type(ui.ScaleDistribution(metric.scale))
    if metric.scale != "linear":
        axis.log(10).linear_threshold(1)
    return made.tooltip(tooltip).legend(legend.show_legend(True).calcs(["lastNotNull"])).scale_distribution(axis)


def _grid(keys: Iterable[str], filters: Filters) -> Iterator[timeseries.Panel]:
    """The given metrics over time, two in a line; counters as bars."""
    named = {"layer": "layer {{layer}}", "head": "head {{head}}"}
    for metric in map(BY_KEY.__getitem__, keys):
        of_run = filters is ONE_RUN and "run" in metric.labels
        labels = [label for label in metric.labels if not (of_run and label == "run")]
        legend = " ".join(named.get(label, f"{{{{{label}}}}}") for label in labels) or metric.title
        title = f"Since {metric.title.lower()}" if metric.unit == "timestamp_seconds" else metric.title
        query = _query(_shown(metric, filters), legend)
        made = _lines(_panel(timeseries.Panel(), title, _describe(metric), _unit(metric), query), metric)
        if metric.kind == "counter":
            made.draw_style(ui.GraphDrawStyle.BARS).fill_opacity(50).show_points(ui.VisibilityMode.NEVER)
        yield made.data_links([_page_link()]) if of_run else made


def _stat(title: str, words: str, unit: str, query: prometheus.Dataquery) -> stat.Panel:
    made = _panel(stat.Panel(), title, words, unit, query).text_mode(ui.BigValueTextMode.VALUE)
    return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).span(6).height(4)


def _number(key: str, title: str, expr: str) -> stat.Panel:
    """One number, coloured by the catalogue's levels."""
    made = _stat(title, _describe(BY_KEY[key]), _unit(BY_KEY[key]), _query(expr, title))
    return made.no_value("none").thresholds(_levels(BY_KEY[key], "text", "orange", "red"))


def _state(filters: Filters) -> Iterator[stat.Panel]:
    """Three numbers on how the chosen runs are."""
    yield _number("warning.active", "Active warnings", f"sum({_select('warning.active', filters)}) or vector(0)")
    yield _number("run.worst_risk", "Worst risk now", f"max({_select('run.worst_risk', filters)})")
    yield _number("warning.forecast", "Least time left", f"min({_select('warning.forecast', filters)})")


def _by_step(metric: Metric, step: str) -> trend.Panel:
    """A metric against the optimizer step, for one run.

    The trend panel refuses steps that do not ascend, as after a rollback; so its transformations group and sort by
    step, and show the later value of a step that was taken twice. It has no annotations: those are on the time axis.
    """
    words = f"{_describe(metric)} Against the optimizer step; after a rollback the later value of a step is shown."
    queries = [_query(step, "step"), _query(f"max({_select(metric.key, ONE_RUN)})", metric.title)]
    for each in queries:
        each.format(PromQueryFormat.TABLE)
    made = _lines(_panel(trend.Panel(), f"{metric.title} by step", words, _unit(metric), *queries), metric)
    fields = {
        "Value #A": {"operation": "groupby", "aggregations": []},
        "Value #B": {"operation": "aggregate", "aggregations": ["lastNotNull"]},
    }
    named = {"Value #A": "step", "Value #B (lastNotNull)": metric.title}
    return _reshaped(
        made.x_field("step").override_by_name("step", _properties(unit="short")),
        ("merge", {}),
        ("groupBy", {"fields": fields}),
        ("sortBy", {"sort": [{"field": "Value #A"}]}),
        ("organize", {"renameByName": named}),
    )


def _reshaped(made: Panel, *transformations: tuple[str, dict[str, Any]]) -> Panel:
    for name, options in transformations:
        made.with_transformation(schema.DataTransformerConfig(name, options=options))
    return made


def _properties(**values: Any) -> list[schema.DynamicConfigValue]:
    return [schema.DynamicConfigValue(name.replace("__", "."), value) for name, value in values.items()]


def _matrix(metric: Metric) -> table.Panel:
    """The last value of every head that Prometheus holds: a row for each layer, a column for each head.

    Rows and columns come in the order of the answer, and labels are text: "10" before "2". So the transformations make
    numbers of them and sort.
    """
    words = "Rows are layers, columns heads; empty heads are not among the worst that Prometheus is given (the"
    words = f"{_describe(metric)} {words} service's page shows all)."
    query, corner = _query(_of_heads(metric), table=True), "layer\\head"
    made = _panel(table.Panel(), f"{metric.title}: layer by head", words, _unit(metric), query).height(10)
    made.align(ui.FieldTextAlignment.CENTER).cell_options(_CELLS)
    made.override_by_name(corner, _properties(custom__cellOptions={"type": "auto"}, unit="string"))
    made.thresholds(_levels(metric, *_COLOURS)).data_links([_page_link()])
    if metric.key == "head.mode":
        made.mappings(_modes())
    shape = {"rowField": "layer", "columnField": "head", "valueField": "Value", "emptyValue": "null"}
    for field, further in (("head", [("groupingToMatrix", shape)]), (corner, [])):
        conversions = [{"targetField": field, "destinationType": "number"}]
        numbers = ("convertFieldType", {"conversions": conversions, "fields": {}})
        _reshaped(made, numbers, ("sortBy", {"sort": [{"field": field}]}), *further)
    return made


def _layers_over_time(metric: Metric) -> heatmap.Panel:
    """The worst head of every layer over time, as a heat map with a row for each layer.

    Its colours are a perceptually even scale that colour-blind people can read.
    """
    words = f"{_describe(metric)} Each row is a layer, coloured by its worst head."
    query = _query(f"max by (layer) ({_select(metric.key, ONE_RUN, of_layers=True)})", "{{layer}}")
    made = _panel(heatmap.Panel(), f"{metric.title} by layer over time", words, _unit(metric), query).height(9)
    colour = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis").steps(64).exponent(0.5)
    layers = heatmap.YAxisConfig().axis_label("layer").axis_placement(ui.AxisPlacement.LEFT).reverse(True)
    made.color(colour).cell_gap(0).y_axis(layers).show_legend().show_value(ui.VisibilityMode.NEVER)
    made.rows_frame(heatmap.RowsHeatmapOptions().value(metric.title))
    made.tooltip(heatmap.HeatmapTooltip().mode(ui.TooltipDisplayMode.SINGLE).show_color_scale(True))
    return made.cell_values(heatmap.CellValues().unit(_unit(metric)))


def _modes() -> list[schema.ValueMapping]:
    """Mode flags by their names, whatever is switched in blue."""
    names = {
        str(int(mode)): schema.ValueMappingResult(mode_name(mode), "semi-dark-blue" if mode else None, index=index)
        for index, mode in enumerate(all_modes())
    }
    return [schema.ValueMap(names)]


def _modes_over_time(metric: Metric) -> statetimeline.Panel:
    """Which mode each head is in, over time."""
    query = _query(_of_heads(metric), "layer {{layer}} head {{head}}")
    made = _lines(_panel(statetimeline.Panel(), "Modes over time", _describe(metric), "short", query), metric)
    return made.span(24).line_width(0).mappings(_modes()).data_links([_page_link()])


def _table(
    title: str, words: str, columns: Mapping[str, tuple[str, Metric | str]], values: Iterable[str] = ("Value",)
) -> table.Panel:
    """Rows that share labels, with columns by name: an expression, and a metric that gives unit and levels, or a unit.

    values: the names that Grafana gives to the columns.
    """
    queries = [_query(expr, table=True) for expr, _ in columns.values()]
    made = _panel(table.Panel(), title, words, "short", *queries)
    for name, (_, shows) in columns.items():
        if isinstance(shows, Metric):
            coloured = {"custom__cellOptions": _CELLS, "thresholds": _levels(shows, *_COLOURS).build()}
            made.override_by_name(name, _properties(unit=_unit(shows), **coloured))
        else:
            made.override_by_name(name, _properties(unit=shows))
    links = [
        make.DashboardLink(words).url(
            f"/d/foreshock-{board}?var-run=${{__value.raw:percentencode}}&"
            "${datasource:queryparam}&${__url_time_range}"
        )
        for board, words in (("run", "Board of the run"), ("layers", "Its layers and heads"))
    ]
    links.append(_page_link("${__value.raw:percentencode}"))
    made.override_by_name("run", _properties(links=[link.build() for link in links], unit="string"))
    hidden = ["Time"]
    if len(columns) > 1:
        _reshaped(made, ("merge", {}))
    else:
        hidden.append("Value")
    named = dict(zip(values, columns, strict=True))
    _reshaped(made, ("organize", {"excludeByName": dict.fromkeys(hidden, True), "renameByName": named}))
    return made.span(24).height(6)


def _listing(title: str, words: str, name: str, expr: str) -> table.Panel:
    """Rows whose labels are what is read: the value is always 1."""
    return _table(title, words, {name: (expr, "short")})


def _alerts(filters: Filters) -> table.Panel:
    """Alerts that fire now, as Prometheus evaluates them: no plugin, no right beyond reading metrics."""
    run = filters["run"]
    # without a run: the service's own alerts, which concern every run
    firing = f'ALERTS{{alertname=~"Foreshock.*", alertname!="{WATCHDOG.name}", alertstate="firing", {run}}}'
    ours = firing.replace(run, 'run=""')
    return _listing(
        "Alerts that fire now",
        "Every alert of the run and of the service that fires. Bad: any; each has a page under docs/runbooks.",
        "firing",
        f"max by (alertname, severity, run, layer, head) ({firing} or {ours})",
    )
