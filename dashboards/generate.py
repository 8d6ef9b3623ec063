"""Writes every generated file of this room, and compares the committed ones with what the catalogue says now."""

from pathlib import Path
from typing import Final

from foreshock.dashboards.provisioning import alertmanager_config, prometheus_config, to_yaml
from foreshock.dashboards.rules import Links, prometheus_rules

GENERATED: Final = Path("dashboards/generated")
_YAML_NOTE: Final = "# Generated from contract/catalog.py by `foreshock dashboards generate`; change that, not this.\n"

# Addresses and paths inside docker-compose.yml.
_SERVICE: Final = "foreshock:8050"
_RULES: Final = Path("/etc/prometheus/rules.yml")
_SCRAPE_TOKEN: Final = Path("/run/secrets/foreshock_read_token")
_WEBHOOK_TOKEN: Final = Path("/run/secrets/foreshock_webhook_token")


def files(links: Links) -> dict[Path, str]:
    """Every generated file: its path below the repository's root, and its text."""
    prometheus = prometheus_config(_SERVICE, _RULES, "alertmanager:9093", token_file=_SCRAPE_TOKEN)
    alertmanager = alertmanager_config(f"http://{_SERVICE}/v1/webhooks/alertmanager", _WEBHOOK_TOKEN)
    return {
        GENERATED / "prometheus-rules.yml": _YAML_NOTE + to_yaml(prometheus_rules(links)),
        GENERATED / "prometheus.yml": _YAML_NOTE + prometheus,
        GENERATED / "alertmanager.yml": _YAML_NOTE + alertmanager,
    }


def generate(root: Path, links: Links | None = None) -> list[Path]:
    """Write every generated file below `root`; returns their paths."""
    written = []
    for path, text in files(links or Links()).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return written


def check(root: Path) -> list[Path]:
    """The generated files below `root` that are missing or differ from what the catalogue says; none is good."""
    return [
        path
        for path, text in files(Links()).items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]
