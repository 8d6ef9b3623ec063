"""The shipped configuration of Prometheus and Alertmanager, with a test's addresses and intervals."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROVISIONING = Path(__file__).parents[2] / "src/foreshock/dashboards" / "provisioning"
TEMPLATES = PROVISIONING / "messages.tmpl"
SWITCHING = "ForeshockHeadFailing"
"""The alert that is never inhibited."""


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """Addresses of receivers, as scripts/compose-secrets adds them: a file with the address, or the address."""

    slack: Path | str | None = None
    webhook: Path | str | None = None
    dead_mans_switch: Path | str | None = None

    def configs(self, kind: str) -> dict[str, Any]:
        """The settings that a receiver of this kind adds below its name; empty without an address."""
        address: Path | str | None = getattr(self, kind)
        if address is None:
            return {}
        configs: dict[str, Any] = yaml.safe_load((PROVISIONING / "receivers" / f"{kind}.yml").read_text())
        [config] = next(iter(configs.values()))
        [key] = [key for key in config if key.endswith("_file")]
        del config[key]
        config[key if isinstance(address, Path) else key.removesuffix("_file")] = str(address)
        return configs


def alertmanager_config(
    service_url: str,
    token_file: Path | None,
    *,
    templates: Path | None = None,
    receivers: Receivers = Receivers(),
    group_wait: str = "5s",
    group_interval: str = "1m",
    watchdog_interval: str = "30s",
    fleet_wait: str = "1m",
    fleet_interval: str = "15m",
) -> str:
    """alertmanager.yml for a service with this webhook, at other intervals."""
    config = yaml.safe_load((PROVISIONING / "alertmanager.yml").read_text())
    config["templates"] = [] if templates is None else [str(templates)]
    route = config["route"]
    route |= {"group_wait": group_wait, "group_interval": group_interval}
    watchdog, dead, _, fleet, *_ = route["routes"]
    for frequent in (watchdog, dead):
        frequent |= {"group_interval": watchdog_interval, "repeat_interval": watchdog_interval}
    fleet |= {"group_wait": fleet_wait, "group_interval": fleet_interval}
    by_name = {receiver["name"]: receiver for receiver in config["receivers"]}
    for name in ("service", "watchdog"):
        [webhook] = by_name[name]["webhook_configs"]
        webhook["url"] = service_url
        if token_file is None:
            webhook.pop("http_config", None)
        else:
            webhook["http_config"]["authorization"]["credentials_file"] = str(token_file)
    by_name["people"] |= receivers.configs("slack") | receivers.configs("webhook")
    by_name["dead-mans-switch"] |= receivers.configs("dead_mans_switch")
    return yaml.safe_dump(config, sort_keys=False)


def prometheus_config(
    target: str,
    rules: Path,
    alertmanager: str,
    *,
    scrape_interval: str,
    evaluation_interval: str = "15s",
    token_file: Path | None = None,
    remote_write_url: str | None = None,
) -> str:
    """prometheus.yml (or the one for VictoriaMetrics) for a service at `target`, at other intervals."""
    name = "prometheus.yml" if remote_write_url is None else "prometheus-victoriametrics.yml"
    config = yaml.safe_load((PROVISIONING / name).read_text())
    config["global"] = {"scrape_interval": scrape_interval, "evaluation_interval": evaluation_interval}
    config["global"]["scrape_timeout"] = scrape_interval
    config["rule_files"] = [str(rules)]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    [scrape] = config["scrape_configs"]
    scrape["static_configs"][0]["targets"] = [target]
    if token_file is None:
        del scrape["authorization"]
    else:
        scrape["authorization"]["credentials_file"] = str(token_file)
    if remote_write_url is not None:
        config["remote_write"][0]["url"] = remote_write_url
    return yaml.safe_dump(config, sort_keys=False)
