"""The four boards, built from the catalogue: overview, run, layer by head, fleet and service health."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from foreshock.contract.metrics.catalog import BY_KEY, HEAD_METRICS, RUN_METRICS, SERVICE_METRICS, WATCHDOG
from foreshock.contract.metrics.metric import Metric
from foreshock.dashboards.panels import (
    MANY_RUNS,
    ONE_RUN,
    Filters,
    Panel,
    by_step,
    describe,
    layers_over_time,
    matrix,
    modes_over_time,
    panel,
    query,
    row,
    select,
    skeleton,
    stat,
    table,
    target,
    time_series,
    unit,
)
from foreshock.dashboards.rules import DATASOURCE_UID, JOB, Links

Board = dict[str, Any]

COLUMNS: Final = 24

Sized = tuple[Panel, int, int]
"""A panel with its width (of 24 columns) and height (in grid units of 30 pixels)."""


def boards(links: Links) -> dict[str, Board]:
    """Every board by its file name."""
    return {f"{name}.json": make(links) for name, make in _BOARDS.items()}


def _overview(links: Links) -> Board:
    active, risk, warning, forecast = (
        BY_KEY[key] for key in ("run.active", "run.worst_risk", "warning.active", "warning.forecast")
    )
    words, warnings = BY_KEY["incident.words"], select(warning, MANY_RUNS)
    living = f"{select(active, MANY_RUNS)} == 1"
    columns = [
        ("active", _by_run("run.active"), "bool_yes_no"),
        ("step", _by_run("run.step"), "locale"),
        ("last step", f"(time() - {_by_run('run.last_step')}) and on (run) {living}", "s"),
        ("worst risk", _by_run("run.worst_risk"), unit(BY_KEY["run.worst_risk"])),
        ("heard of", f"(time() - {_by_run('run.last_heard')}) and on (run) {living}", "s"),
        ("warnings", f"sum by (run) ({warnings})", "short"),
        ("steps left", f"min by (run) ({select(forecast, MANY_RUNS)})", "locale"),
    ]
    panels: list[Sized] = [
        (stat(active, "Active runs", f"sum({select(active, MANY_RUNS)})"), 6, 4),
        (stat(warning, "Active warnings", f"sum({warnings}) or vector(0)"), 6, 4),
        (stat(risk, "Worst risk now", f"max({select(risk, MANY_RUNS)})"), 6, 4),
        (stat(forecast, "Least time left", f"min({select(forecast, MANY_RUNS)})"), 6, 4),
        (
            table(
                "Runs",
                "Every run with its state, the risk of its worst head and the forecast of steps left. Click a run for "
                "its board, its layers or its page. Bad: a warning, risk near 1, few steps left, an active run whose "
                "last step is old.",
                columns,
                levels={
                    "last step": BY_KEY["run.last_step"],
                    "heard of": BY_KEY["run.last_heard"],
                    "worst risk": risk,
                    "warnings": warning,
                    "steps left": forecast,
                },
                sort="worst risk",
            ),
            24,
            10,
        ),
        (_alerts(MANY_RUNS), 24, 6),
        (
            table(
                "Warnings that are raised now",
                f"{describe(warning)} Click the run to see the evidence and to switch the head.",
                [("raised", f"max by (run, layer, head, cause, signal, severity) ({warnings} == 1)", "short")],
                hide=("Value",),  # always 1; the labels are what is read
            ),
            24,
            6,
        ),
        (
            table(
                "Incidents in words",
                f"{describe(words)} This is what an alert says.",
                [("open", f"max by ({', '.join(words.labels)}) ({select(words, MANY_RUNS)})", "short")],
                hide=("Value",),  # always 1; the labels are what is read
            ),
            24,
            6,
        ),
        _row("Incidents"),
        *_grid(
            [
                *("incident.active", "incident.heads", "incident.opened_step", "incident.corrected_step"),
                *("incident.forecast", "incident.acknowledged"),
            ],
            MANY_RUNS,
        ),
        _row("Warnings and switches"),
        *_grid(
            ["run.worst_risk", "warning.forecast", "warning.raised", "switch.outcomes", "switch.not_arrested"],
            MANY_RUNS,
        ),
    ]
    return _board("overview", "Overview", panels, links, filters=MANY_RUNS)


def _run(links: Links) -> Board:
    worst = "head.score_max"
    step = f"max({select(BY_KEY['run.step'], ONE_RUN)})"
    warning, risk, forecast = (BY_KEY[key] for key in ("warning.active", "run.worst_risk", "warning.forecast"))
    panels: list[Sized] = [
        (stat(BY_KEY["run.step"], "Step", step), 6, 4),
        (stat(warning, "Active warnings", f"sum({select(warning, ONE_RUN)}) or vector(0)"), 6, 4),
        (stat(risk, "Worst risk now", f"max({select(risk, ONE_RUN)})"), 6, 4),
        (stat(forecast, "Least time left", f"min({select(forecast, ONE_RUN)})"), 6, 4),
        (_alerts(ONE_RUN), 24, 5),
        _row("What decides"),
        *_grid([*_DECIDING, "run.worst_risk"], ONE_RUN),
        _row("Incidents, warnings and switches"),
        *_grid(["incident.active", "incident.forecast"], ONE_RUN),
        *_grid(["warning.forecast", "warning.raised", "switch.outcomes", "switch.not_arrested"], ONE_RUN),
        _row("The training"),
        *_grid([m.key for m in RUN_METRICS if m.board == "run" and m.key not in _DECIDING], ONE_RUN),
        _row("The worst heads"),
        *_grid([m.key for m in HEAD_METRICS if m.board == "run" and m.key not in _DECIDING], ONE_RUN),
        _row("Against the step"),
        (by_step(BY_KEY["run.loss"], step, f"max({select(BY_KEY['run.loss'], ONE_RUN)})"), 12, 8),
        (by_step(BY_KEY[worst], step, f"max({select(BY_KEY[worst], ONE_RUN)})"), 12, 8),
    ]
    return _board("run", "Run", panels, links, filters=ONE_RUN)


def _layers(links: Links) -> Board:
    def heads(key: str) -> tuple[Metric, str]:
        return BY_KEY[key], f"max by (layer, head) ({select(BY_KEY[key], ONE_RUN)})"

    def layers(key: str) -> tuple[Metric, str]:
        return BY_KEY[key], f"max by (layer) ({select(BY_KEY[key], ONE_RUN, of_layers=True)})"

    panels: list[Sized] = [
        _row("The last value of every head"),
        *[(matrix(*heads(m.key)), 12, 10) for m in (*(m for m in HEAD_METRICS if m.levels), BY_KEY["head.mode"])],
        _row("Over time"),
        (layers_over_time(*layers("head.risk")), 12, 9),
        (layers_over_time(*layers("head.score_max")), 12, 9),
        (modes_over_time(*heads("head.mode")), 24, 8),
        _row("The worst heads"),
        *_grid([m.key for m in HEAD_METRICS if m.board == "heads" and m.key != "head.mode"], ONE_RUN),
    ]
    return _board("layers", "Layer by head", panels, links, filters=ONE_RUN)


def _service(links: Links) -> Board:
    words = "1 while Prometheus can scrape the service. Bad: 0; agents still detect failures, but the page is stale."
    steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
    targets = [target(f'max(up{{job="{JOB}"}})', legend_format="service")]
    colours = {"thresholds": {"mode": "absolute", "steps": steps}}
    up = panel("service", "Service", words, targets, grafana_unit="bool_on_off", defaults=colours)
    watchdog, store, dropped = (BY_KEY[key] for key in ("service.watchdog", "service.store", "service.series_dropped"))
    panels: list[Sized] = [
        (up, 6, 4),
        (stat(watchdog, "Since the last watchdog", query(watchdog, MANY_RUNS)), 6, 4),
        (stat(store, "Store", store.name), 6, 4),
        (stat(dropped, "Series left out", dropped.name), 6, 4),
        *_grid([m.key for m in (*RUN_METRICS, *SERVICE_METRICS) if m.board == "service"], MANY_RUNS),
        *_grid(["run.step", "run.last_step", "run.last_heard", "run.active"], MANY_RUNS),
    ]
    return _board("service", "Fleet and service health", panels, links, filters=MANY_RUNS)


_BOARDS: Final[dict[str, Callable[[Links], Board]]] = {
    "overview": _overview,
    "run": _run,
    "layers": _layers,
    "service": _service,
}


_DECIDING: Final = ("run.loss", "head.score_offset", "head.score_max")
"""What tells first whether a run is about to fail."""


def _row(title: str) -> Sized:
    return row(title), COLUMNS, 1


def _alerts(filters: Filters) -> Panel:
    """Alerts that fire now, as Prometheus evaluates them: no plugin, no right beyond reading metrics."""
    run = filters["run"]
    # without a run: the service's own alerts, which concern every run
    firing = f'ALERTS{{alertname=~"Foreshock.*", alertname!="{WATCHDOG.name}", alertstate="firing", {run}}}'
    ours = firing.replace(run, 'run=""')
    return table(
        "Alerts that fire now",
        "Every alert of the run and of the service that fires. Bad: any; each has a page under docs/runbooks.",
        [("firing", f"max by (alertname, severity, run, layer, head) ({firing} or {ours})", "short")],
        hide=("Value",),
    )


def _by_run(key: str) -> str:
    return f"max by (run) ({select(BY_KEY[key], MANY_RUNS)})"


def _grid(keys: Sequence[str], filters: Filters) -> list[Sized]:
    """Time series panels of the given metrics, two abreast."""
    return [(time_series(BY_KEY[key], filters), 12, 8) for key in keys]


def _place(panels: Sequence[Sized]) -> list[Panel]:
    """The panels with their places: left to right, a new line when one is full."""
    placed, x, y, line_height = [], 0, 0, 0
    for item, width, height in panels:
        if x + width > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        placed.append({**item, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
        x, line_height = x + width, max(line_height, height)
    return placed


def _board(name: str, title: str, panels: Sequence[Sized], links: Links, *, filters: Filters) -> Board:
    return {
        "uid": f"foreshock-{name}",
        "title": f"foreshock / {title}",
        "description": "Generated from contract/metrics by `foreshock dashboards generate`; change that, not this.",
        **skeleton("board"),
        "templating": {"list": _variables(links, filters)},
        "annotations": {"list": [_warning_annotation(filters), _switch_annotation(filters)]},
        "links": [
            *(
                {"title": words, "url": f"/d/foreshock-{other}", **skeleton("board link")}
                for other, words in _WAYS.items()
                if other != name
            ),
            {"url": links.service, **skeleton("page link")},
        ],
        "panels": _place(panels),
    }


_WAYS: Final = {
    "overview": "All runs",
    "run": "The run",
    "layers": "Its layers and heads",
    "service": "Fleet and service health",
}
"""The way from board to board, in the words of a link."""


def _variables(links: Links, filters: Filters) -> list[dict[str, Any]]:
    """The variables that the filters name, and the service's address for data links, which is hidden.

    The run that stepped last comes first, and a board of one run opens with it.
    """
    layers = select(BY_KEY["head.risk"], {"run": ONE_RUN["run"]}, of_layers=True)
    last = {"query": f"query_result(sort_desc({BY_KEY['run.last_step'].name}))", "refId": "run"}
    of_layers = {"query": f"label_values({layers}, layer)", "refId": "layer"}
    current = {"text": "foreshock", "value": DATASOURCE_UID}
    common = [
        {**skeleton("datasource variable"), "current": current},
        {**skeleton("service variable"), "query": links.service},
    ]
    run = {**skeleton("run variable"), "query": last}
    if filters is MANY_RUNS:
        return [*common, {**run, **skeleton("many")}]
    return [*common, run, {**skeleton("layer variable"), "query": of_layers, **skeleton("many")}]


def _warning_annotation(filters: Filters) -> dict[str, Any]:
    """A band for as long as a head is warned about: Grafana joins the samples that stand side by side."""
    metric = BY_KEY["warning.active"]
    expr = f"max by ({', '.join(metric.labels)}) ({select(metric, {'run': filters['run']})} == 1)"
    return {**skeleton("warnings"), "expr": expr}


def _switch_annotation(filters: Filters) -> dict[str, Any]:
    """A mark at every switch decision; a counter is born with its first event, which `increase` cannot see."""
    metric = BY_KEY["switch.outcomes"]
    counter = select(metric, {"run": filters["run"]})
    grown = f"increase({counter}[1m]) > 0 or ({counter} > 0 unless {counter} offset 1m)"
    return {**skeleton("switches"), "expr": f"sum by ({', '.join(metric.labels)}) ({grown})"}
