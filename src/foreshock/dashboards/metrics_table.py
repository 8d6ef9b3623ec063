"""The page of documentation that lists every metric and every alert of the catalogue."""

from collections.abc import Iterable

from foreshock.contract.metrics.catalog import HEAD_METRICS, RUN_METRICS, SERVICE_METRICS
from foreshock.contract.metrics.metric import Metric
from foreshock.dashboards.rules import alerts

_SECTIONS = (
    (
        "Per head",
        "The service stores every head of every sample. Prometheus gets the worst heads of each run, under a series "
        "budget (`foreshock_head_*`, labels run, layer, head). Of every layer it gets the value of the worst head "
        "(`foreshock_layer_*` for each name below, labels run, layer).",
        HEAD_METRICS,
    ),
    ("Per run", "Reported by a run and its agents.", RUN_METRICS),
    ("Service", "Reported by the service about itself.", SERVICE_METRICS),
)


def metrics_page() -> str:
    """docs/metrics.md as text."""
    parts = ["# Metrics and alerts\n"]
    for title, text, metrics in _SECTIONS:
        parts += [f"\n## {title}\n\n{text}\n\n", *_table(metrics)]
    parts.append("\n## Alerts\n\nThe page of each begins with what to do.\n\n")
    parts.append(_row("Alert", "Severity", "Fires when", "For"))
    parts.append(_row(*["---"] * 4))
    for metric, alert in alerts():
        expr = alert.expr.replace("{m}", metric.name) if metric else alert.expr
        severity = "the warning's own" if metric and "severity" in metric.labels else alert.severity
        name = f"[{alert.name}](runbooks/{alert.name}.md)"
        parts.append(_row(name, severity, f"`{expr}`", alert.for_))
    return "".join(parts)


def _table(metrics: Iterable[Metric]) -> Iterable[str]:
    yield _row("Metric", "What it is", "Bad")
    yield _row(*["---"] * 3)
    for metric in metrics:
        labels = "" if metric.head else "".join(f", {label}" for label in metric.labels)
        yield _row(f"`{metric.name}` ({metric.kind}{labels})", metric.help, metric.bad)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
