"""Writes every generated file of the dashboards, and compares the committed ones with what the catalogue says now."""

import json
from pathlib import Path
from typing import Final

from foreshock.dashboards.alertmanager import Email, Receivers, alertmanager_config, receiver_parts
from foreshock.dashboards.boards import boards
from foreshock.dashboards.messages import TEMPLATES
from foreshock.dashboards.metrics_table import metrics_page
from foreshock.dashboards.plain import to_yaml
from foreshock.dashboards.provisioning import (
    boards_config,
    datasource_config,
    prometheus_config,
)
from foreshock.dashboards.rules import Links, prometheus_rules

GENERATED: Final = Path("dashboards/generated")
METRICS_PAGE: Final = Path("docs/metrics.md")
_NOTE: Final = "Generated from contract/catalog.py by `foreshock dashboards generate`; change that, not this."

# Addresses and paths inside docker-compose.yml.
_SERVICE: Final = "foreshock:8765"
_SECRETS: Final = Path("/run/secrets")
_EVERY_RECEIVER: Final = Receivers(
    slack=_SECRETS / "slack_url",
    pagerduty=_SECRETS / "pagerduty_key",
    webhook=_SECRETS / "people_webhook_url",
    email=Email(  # scripts/compose-secrets fills in what is in capitals
        to="EMAIL_TO",
        sender="EMAIL_FROM",
        smarthost="EMAIL_SMARTHOST",
        user="EMAIL_USER",
        password_file=_SECRETS / "email_password",
    ),
    dead_mans_switch=_SECRETS / "dead_mans_switch_url",
)


def files(links: Links) -> dict[Path, str]:
    """Every generated file: its path below the repository's root, and its text."""
    scrape = {
        name: prometheus_config(
            _SERVICE,
            Path("/etc/prometheus/prometheus-rules.yml"),
            "alertmanager:9093",
            token_file=_SECRETS / "foreshock_read_token",
            remote_write_url=remote,
        )
        for name, remote in {
            "prometheus.yml": None,
            "prometheus-victoriametrics.yml": "http://victoriametrics:8428/api/v1/write",
        }.items()
    }
    yaml_files = {
        **scrape,
        "prometheus-rules.yml": to_yaml(prometheus_rules(links)),
        "alertmanager.yml": alertmanager_config(
            f"http://{_SERVICE}/v1/webhooks/alertmanager",
            _SECRETS / "foreshock_webhook_token",
            templates=Path("/etc/alertmanager/messages.tmpl"),
        ),
        "grafana/datasources/prometheus.yml": datasource_config("http://prometheus:9090"),
        "grafana/dashboards/boards.yml": boards_config(Path("/var/lib/foreshock/boards")),
    }
    return {
        **{GENERATED / name: f"# {_NOTE}\n{text}" for name, text in yaml_files.items()},
        **{
            GENERATED / "receivers" / f"{kind}.yml": f"  # {_NOTE}\n{text}"
            for kind, text in receiver_parts(_EVERY_RECEIVER).items()
        },
        **{
            GENERATED / "boards" / name: json.dumps(board, indent=1, ensure_ascii=False) + "\n"
            for name, board in boards(links).items()
        },
        GENERATED / "messages.tmpl": f"{{{{/* {_NOTE} */}}}}\n{TEMPLATES}",
        METRICS_PAGE: f"<!-- {_NOTE} -->\n{metrics_page()}",
    }


def generate(root: Path, links: Links | None = None) -> list[Path]:
    """Write every generated file below `root`, the repository; returns their paths."""
    written = []
    for path, text in files(links or Links()).items():
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
