"""Prometheus alert rules, built from the catalogue."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import STEPS_BEFORE
from foreshock.contract.metrics.catalog import EXTRA_ALERTS, METRICS
from foreshock.contract.metrics.metric import Alert, Metric

FOLDER: Final = "foreshock"
"""Title and uid of the Grafana folder for the boards."""

DATASOURCE_UID: Final = "foreshock-prometheus"
SCRAPE_INTERVAL_SECONDS: Final = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Addresses for links in alerts and boards; the defaults are those of docker-compose.yml."""

    grafana: str = "http://127.0.0.1:3000"
    service: str = "http://127.0.0.1:8765"
    runbooks: str = "docs/runbooks"
    """Address of the runbook pages on the built documentation site; by default their folder in the source tree."""

    def __post_init__(self) -> None:
        for name, field in type(self).__dataclass_fields__.items():
            given = getattr(self, name)
            if given != field.default and not given.startswith(("http://", "https://")):
                raise ValueError(f"{given!r} is not an address; use http:// or https:// and the name of a host")
            object.__setattr__(self, name, getattr(self, name).rstrip("/"))


def alerts() -> Iterator[tuple[Metric | None, Alert]]:
    """Yield every alert of the catalogue with the metric that it watches, or None if it has none."""
    for metric in METRICS:
        for alert in metric.alerts:
            yield metric, alert
    for alert in EXTRA_ALERTS:
        yield None, alert


def rules(links: Links) -> list[dict[str, Any]]:
    """Return every alert as a Prometheus rule, in plain data."""
    return [_rule(metric, alert, links) for metric, alert in alerts()]


def prometheus_rules(links: Links) -> dict[str, Any]:
    """Return a Prometheus rule file as plain data."""
    return {"groups": [{"name": "foreshock", "rules": rules(links)}]}


def _rule(metric: Metric | None, alert: Alert, links: Links) -> dict[str, Any]:
    expr, page = alert.expr, {"dashboard_url": f"{links.grafana}/d/foreshock-service"}
    if metric is not None:
        expr = expr.replace("{m}", metric.name)
        if "run" in metric.labels:
            expr = f"({expr}) and on (run) foreshock_run_active == 1"  # no alerts for a run that has ended
            run = "{{ $labels.run | urlquery }}"
            page = {
                "dashboard_url": f"{links.grafana}/d/foreshock-run?var-run={run}",
                "page_url": f"{links.service}/?runs={run}{_place(metric)}",
            }
    # A severity label of the rule would override the label of the series, which has the warning's own severity.
    own_severity = metric is not None and "severity" in metric.labels
    return {
        "alert": alert.name,
        "expr": expr,
        "for": alert.for_,
        **({} if alert.keep_firing_for == "0s" else {"keep_firing_for": alert.keep_firing_for}),
        "labels": {} if own_severity else {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "action": alert.to_do or alert.action,
            "runbook_url": f"{links.runbooks}/{alert.name}.{'md' if links.runbooks == Links().runbooks else 'html'}",
            **page,
            **({"done": alert.done} if alert.done else {}),
        },
    }


def _place(metric: Metric) -> str:
    """Return the part after the run in the address of its page: the first head to look at, the metric to show, and the
    steps from shortly before the problem."""
    if "cause" not in metric.labels:
        steps = _steps_from(f"foreshock_run_step{{run=%q}} - {STEPS_BEFORE}", "run")
        if metric.head is None:
            return (f"&metric={metric.key}" if metric.has_series else "") + steps
        own = f"{metric.name}{{run=%q,layer=%q}}"
        below = metric.levels is not None and metric.levels.below
        worst = f"bottomk(1, {own})" if below else f"topk(1, {own} > 0)"
        return _head_of(worst, "run", "layer") + f"&metric={metric.key}" + steps
    soonest = (
        "bottomk(1, foreshock_warning_forecast_steps{run=%q} "
        "and on (run, layer, head) foreshock_warning_active{run=%q,cause=%q}) "
        "or on (run) topk(1, foreshock_warning_active{run=%q,cause=%q,head!=''})"
    )
    head = _head_of(soonest, "run", "run", "cause", "run", "cause")
    opened = "foreshock_incident_opened_step{run=%q,cause=%q}"
    lasted = f"scalar(foreshock_run_step{{run=%q}}) - {opened}"
    since = f"{opened} - clamp_min(2 * ({lasted}), {STEPS_BEFORE})"
    steps = _steps_from(since, "run", "cause", "run", "run", "cause")
    shown = "{{ else ".join(f'if eq $labels.cause "{name}" }}}}&metric={one.shown_by}' for name, one in CAUSES.items())
    return head + "{{ " + shown + "{{ end }}" + steps


def _asked(query: str, labels: Sequence[str], text: str) -> str:
    """Return a template that queries Prometheus and renders `text` with the result; empty without a result."""
    given = " ".join(f"$labels.{label}" for label in labels)
    return f'{{{{ with printf "{query}" {given} | query }}}}{text}{{{{ else }}}}{{{{ end }}}}'


def _head_of(query: str, *labels: str) -> str:
    return _asked(query, labels, '&head={{ . | first | label "layer" }}.{{ . | first | label "head" }}')


def _steps_from(query: str, *labels: str) -> str:
    return _asked(f"{query} > 0", labels, '&steps={{ . | first | value | printf "%.0f" }}-')
