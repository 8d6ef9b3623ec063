"""Writes every generated file of the dashboards and docs/metrics.md, and compares the committed ones with them."""

import json
from pathlib import Path
from typing import Final

import yaml

from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.run_metrics import RUN_METRICS
from foreshock.contract.metrics.service_metrics import SERVICE_METRICS
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, alerts, prometheus_rules

GENERATED: Final = Path("src/foreshock/dashboards/generated")
"""In a checkout, below its root."""
METRICS_PAGE: Final = Path("docs/metrics.md")
_ELSEWHERE: Final = Path("dashboards/generated")
"""Below the folder that the user of a wheel names."""
_NOTE: Final = "Generated from contract/metrics by `foreshock dashboards generate`; change that, not this."


def files(links: Links, *, checkout: bool = True) -> dict[Path, str]:
    """Every generated file: its path below the root, and its text. Only a checkout has the page of metrics."""
    rules = yaml.safe_dump(prometheus_rules(links), sort_keys=False, width=120, allow_unicode=True)
    folder = GENERATED if checkout else _ELSEWHERE
    return {
        folder / "prometheus-rules.yml": f"# {_NOTE}\n{rules}",
        **{
            folder / "boards" / name: json.dumps(board, indent=1, ensure_ascii=False) + "\n"
            for name, board in boards(links).items()
        },
        **({METRICS_PAGE: f"<!-- {_NOTE} -->\n{metrics_page()}"} if checkout else {}),
    }


def generate(root: Path, links: Links | None = None, *, checkout: bool = True) -> list[Path]:
    """Write the generated files below `root`; returns their paths."""
    written = []
    for path, text in files(links or Links(), checkout=checkout).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return written


def check(root: Path) -> list[Path]:
    """The generated files that differ from what the catalogue says, are missing, or are left over; none is good."""
    expected = files(Links())
    changed = [
        path for path, text in expected.items() if not (root / path).is_file() or (root / path).read_text() != text
    ]
    on_disk = {path.relative_to(root) for path in (root / GENERATED).rglob("*") if path.is_file()}
    return sorted({*changed, *(on_disk - set(expected))})


_SECTIONS: Final = (
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
        parts += [f"\n## {title}\n\n{text}\n\n", _row("Metric", "Meaning", "Bad"), _row(*["---"] * 3)]
        for metric in metrics:
            labels = [] if metric.head else [label for label in metric.labels if label != "run"]
            name = f"`{metric.name}`" + (f" ({', '.join(labels)})" if labels else "")
            parts.append(_row(name, metric.help, metric.bad))
    parts.append("\n## Alerts\n\nEach runbook begins with what to do. Rules: `generated/prometheus-rules.yml`.\n\n")
    for watched, alert in alerts():
        severity = "the warning's own severity" if watched and "severity" in watched.labels else alert.severity
        parts.append(f"- [{alert.name}](runbooks/{alert.name}.md): {severity}\n")
    return "".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
