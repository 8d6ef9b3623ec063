"""Alertmanager's configuration: who is told what, how much at once, and what is not told beside something worse.

The service gets every alert but that of its own death, run by run and at once: it keeps the audit trail and acts under
its policy. People get the same alerts grouped: those of one run together, and those that strike many runs at once
in one message for the fleet. The watchdog goes to the service, and to a dead man's switch outside, whose silence wakes
somebody when nothing here can.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foreshock.contract.catalog import SERVICE_DOWN, WATCHDOG
from foreshock.dashboards.messages import MESSAGE, TITLE
from foreshock.dashboards.plain import to_yaml

PEOPLE: Final = "people"
DEAD_MANS_SWITCH: Final = "dead-mans-switch"
FLEET_ALERTS: Final = ("ForeshockRunHung", "ForeshockRunUnreachable", "ForeshockCommandUnanswered")
"""A network or a machine that fails strikes many runs at once: one message for all of them."""
FLEET_WAIT: Final = "1m"
FLEET_INTERVAL: Final = "15m"
SWITCHING: Final = "ForeshockHeadFailing"
"""Never held back beside something worse: the service may order a switch for it."""

Address = Path | str
"""A file that holds the secret address or key, or the text itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Email:
    """A mailbox that is written to, and the server that takes the mail."""

    to: str
    sender: str
    smarthost: str
    """HOST:PORT; the connection must be secured."""
    user: str
    password_file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Receivers:
    """Who is woken; nobody by default, which `scripts/compose-secrets` says aloud."""

    slack: Address | None = None
    pagerduty: Address | None = None
    webhook: Address | None = None
    email: Email | None = None
    dead_mans_switch: Address | None = None
    """Gets the watchdog, as healthchecks.io, Dead Man's Snitch or Opsgenie's heartbeats take it."""


def alertmanager_config(
    service_url: str,
    token_file: Path | None,
    *,
    templates: Path | None = None,
    receivers: Receivers = Receivers(),
    group_wait: str = "5s",
    group_interval: str = "1m",
    repeat_interval: str = "4h",
    watchdog_interval: str = "30s",
    fleet_wait: str = FLEET_WAIT,
    fleet_interval: str = FLEET_INTERVAL,
) -> str:
    """The configuration as YAML.

    `service_url` is the service's webhook, `token_file` holds its bearer token. `templates` is the file of
    messages.TEMPLATES, which receivers of people need. The watchdog repeats after one to two `watchdog_interval`.
    """
    webhook: dict[str, Any] = {"url": service_url, "send_resolved": True}
    if token_file is not None:
        webhook["http_config"] = {"authorization": {"type": "Bearer", "credentials_file": str(token_file)}}
    watchdog = [f'alertname="{WATCHDOG.name}"']
    often = {"group_wait": "0s", "group_interval": watchdog_interval, "repeat_interval": watchdog_interval}
    routes = [
        {"receiver": "watchdog", "matchers": watchdog, **often, "continue": True},
        {"receiver": DEAD_MANS_SWITCH, "matchers": watchdog, **often},
        {"receiver": "service", "matchers": [f'alertname!="{SERVICE_DOWN.name}"'], "continue": True},
        {
            "receiver": PEOPLE,
            "matchers": [f'alertname=~"{"|".join(FLEET_ALERTS)}"'],
            "group_by": ["alertname"],
            "group_wait": fleet_wait,
            "group_interval": fleet_interval,
        },
        {"receiver": PEOPLE, "matchers": ['run=~".+"'], "group_by": ["run"]},
        {"receiver": PEOPLE},
    ]
    return to_yaml(
        {
            **({} if templates is None else {"templates": [str(templates)]}),
            "route": {
                "receiver": PEOPLE,
                "group_by": ["alertname", "run"],
                "group_wait": group_wait,
                "group_interval": group_interval,
                "repeat_interval": repeat_interval,
                "routes": routes,
            },
            "inhibit_rules": _INHIBIT_RULES,
            "receivers": [
                {"name": "service", "webhook_configs": [webhook]},
                {"name": "watchdog", "webhook_configs": [webhook]},
                {"name": PEOPLE} | _configs(receivers),
                {"name": DEAD_MANS_SWITCH} | _dead_mans_switch(receivers),
            ],
        }
    )


_INHIBIT_RULES: Final = [
    {  # nothing is known of runs while the service is down, and everything about them follows from that
        "source_matchers": [f'alertname="{SERVICE_DOWN.name}"'],
        "target_matchers": ['run=~".+"', f'alertname!="{SWITCHING}"'],
    },
    {
        "source_matchers": ['severity="critical"', 'run=~".+"'],
        "target_matchers": ['severity=~"warning|info"', 'run=~".+"', f'alertname!="{SWITCHING}"'],
        "equal": ["run"],
    },
]


def receiver_parts(receivers: Receivers) -> dict[str, str]:
    """What each kind of receiver adds below its name, as text that scripts/compose-secrets puts in."""
    parts = {**_configs(receivers), "dead_mans_switch": _dead_mans_switch(receivers)["webhook_configs"]}
    return {
        kind.removesuffix("_configs"): "  "
        + to_yaml({"webhook_configs" if kind == "dead_mans_switch" else kind: configs}).strip().replace("\n", "\n  ")
        + "\n"
        for kind, configs in parts.items()
    }


def _configs(receivers: Receivers) -> dict[str, list[dict[str, Any]]]:
    """The parts of a receiver that reach people, in the words of the templates."""
    found: dict[str, list[dict[str, Any]]] = {}
    if receivers.slack is not None:
        found["slack_configs"] = [
            {**_secret("api_url", receivers.slack), "title": TITLE, "text": MESSAGE, "send_resolved": True}
        ]
    if receivers.pagerduty is not None:
        found["pagerduty_configs"] = [
            {**_secret("routing_key", receivers.pagerduty), "description": TITLE, "details": {"message": MESSAGE}}
        ]
    if receivers.webhook is not None:
        found["webhook_configs"] = [{**_secret("url", receivers.webhook), "send_resolved": True, "max_alerts": 20}]
    if (email := receivers.email) is not None:
        found["email_configs"] = [
            {
                "to": email.to,
                "from": email.sender,
                "smarthost": email.smarthost,
                "auth_username": email.user,
                "auth_password_file": str(email.password_file),
                "headers": {"Subject": TITLE},
                "text": MESSAGE,
                "html": "",
                "send_resolved": True,
            }
        ]
    return found


def _dead_mans_switch(receivers: Receivers) -> dict[str, list[dict[str, Any]]]:
    if receivers.dead_mans_switch is None:
        return {}
    return {"webhook_configs": [{**_secret("url", receivers.dead_mans_switch), "send_resolved": False}]}


def _secret(name: str, where: Address) -> dict[str, str]:
    return {f"{name}_file": str(where)} if isinstance(where, Path) else {name: where}
