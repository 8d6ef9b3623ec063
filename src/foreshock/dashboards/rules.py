"""Alert rules from the catalogue, as Prometheus evaluates them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import STEPS_BEFORE
from foreshock.contract.metrics.catalog import EXTRA_ALERTS, METRICS
from foreshock.contract.metrics.metric import Alert, Metric

FOLDER: Final = "foreshock"
"""The Grafana folder of the boards; its title and its uid."""

DATASOURCE_UID: Final = "foreshock-prometheus"
SCRAPE_INTERVAL_SECONDS: Final = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Where people find things; the defaults are the addresses of docker-compose.yml."""

    grafana: str = "http://127.0.0.1:3000"
    service: str = "http://127.0.0.1:8765"
    runbooks: str = "docs/runbooks"
    """Address of the folder with the runbook pages, as the built site serves them; by default their place in the
    source tree.
    """

    def __post_init__(self) -> None:
        for name, field in type(self).__dataclass_fields__.items():
            given = getattr(self, name)
            if given != field.default and not given.startswith(("http://", "https://")):
                raise ValueError(f"{given!r} is no address; give http:// or https:// and the name of a machine")
            object.__setattr__(self, name, getattr(self, name).rstrip("/"))


def alerts() -> Iterator[tuple[Metric | None, Alert]]:
    """Every alert of the catalogue with the metric that it watches; None for those that belong to no metric of ours."""
    for metric in METRICS:
        for alert in metric.alerts:
            yield metric, alert
    for alert in EXTRA_ALERTS:
        yield None, alert


def rules(links: Links) -> list[dict[str, Any]]:
    """Every alert as a rule of Prometheus, in plain data."""
    return [_rule(metric, alert, links) for metric, alert in alerts()]


def prometheus_rules(links: Links) -> dict[str, Any]:
    """A Prometheus rule file as plain data."""
    return {"groups": [{"name": "foreshock", "rules": rules(links)}]}


def _rule(metric: Metric | None, alert: Alert, links: Links) -> dict[str, Any]:
    expr, page = alert.expr, {"dashboard_url": f"{links.grafana}/d/foreshock-service"}
    if metric is not None:
        expr = expr.replace("{m}", metric.name)
        if "run" in metric.labels:
            expr = f"({expr}) and on (run) foreshock_run_active == 1"  # nobody is woken for a run that has ended
            run = "{{ $labels.run | urlquery }}"
            page = {
                "dashboard_url": f"{links.grafana}/d/foreshock-run?var-run={run}",
                "page_url": f"{links.service}/?runs={run}{_place(metric)}",
            }
    # A label of the rule would hide the series' own, and a warning knows best how severe it is.
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
    """What follows the run in the address of its page: the head to look at first, the metric that shows what is wrong,
    and the steps from shortly before it on."""
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
    """A template that asks Prometheus and writes `text` about the answer; nothing where there is none."""
    given = " ".join(f"$labels.{label}" for label in labels)
    return f'{{{{ with printf "{query}" {given} | query }}}}{text}{{{{ else }}}}{{{{ end }}}}'


def _head_of(query: str, *labels: str) -> str:
    return _asked(query, labels, '&head={{ . | first | label "layer" }}.{{ . | first | label "head" }}')


def _steps_from(query: str, *labels: str) -> str:
    return _asked(f"{query} > 0", labels, '&steps={{ . | first | value | printf "%.0f" }}-')
