"""The page of documentation that lists every metric and every alert of the catalogue."""

from collections.abc import Iterable

from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.metrics.run_metrics import RUN_METRICS
from foreshock.contract.metrics.service_metrics import SERVICE_METRICS
from foreshock.dashboards.rules import alerts

_SECTIONS = (
    (
        "Per head",
        "The service stores every head of every sample. Prometheus gets the worst heads of each run, under a series "
        "budget (labels run, layer, head), and the worst head's value of every layer (`foreshock_layer_*` instead of "
        "`foreshock_head_*`, labels run, layer). Names that end in `_total` are counters; all others are gauges.",
        HEAD_METRICS,
    ),
    ("Per run", "Each has the label run, and those in brackets.", RUN_METRICS),
    ("Service", "The service's own state. Labels are in brackets.", SERVICE_METRICS),
)


def metrics_page() -> str:
    """docs/metrics.md as text."""
    parts = ["# Metrics and alerts\n"]
    for title, text, metrics in _SECTIONS:
        parts += [f"\n## {title}\n\n{text}\n\n", *_table(metrics)]
    parts.append("\n## Alerts\n\nEach runbook begins with what to do. Rules: `generated/prometheus-rules.yml`.\n\n")
    for metric, alert in alerts():
        severity = "the warning's own severity" if metric and "severity" in metric.labels else alert.severity
        parts.append(f"- [{alert.name}](runbooks/{alert.name}.md): {severity}\n")
    return "".join(parts)


def _table(metrics: Iterable[Metric]) -> Iterable[str]:
    yield _row("Metric", "Meaning", "Bad")
    yield _row(*["---"] * 3)
    for metric in metrics:
        labels = [] if metric.head else [label for label in metric.labels if label != "run"]
        yield _row(f"`{metric.name}`" + (f" ({', '.join(labels)})" if labels else ""), metric.help, metric.bad)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
