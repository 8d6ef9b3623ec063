"""docs/reference/alert-messages.md prints what alerts tell people, as real tools write it from the rules."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from foreshock.dashboards.rules import alerts

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/reference/alert-messages.md").read_text()
MESSAGES = re.findall(r"^## (.*?)\n\n```\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.servers
def test_the_page_of_alerts_is_what_prometheus_and_alertmanager_write() -> None:
    script: dict[str, Any] = runpy.run_path(str(REPOSITORY / "scripts/alert_messages.py"))
    assert script["page"]() == PAGE, "scripts/alert_messages.py writes it anew"


def test_the_page_prints_every_alert_that_people_are_sent() -> None:
    printed = {title.split(":")[0] for title, _ in MESSAGES}
    assert {alert.name for _, alert in alerts()} - {"ForeshockWatchdog"} <= printed


@pytest.mark.parametrize(("title", "message"), MESSAGES, ids=[title for title, _ in MESSAGES])
def test_a_message_is_short_has_no_hole_and_asks_for_something_only_while_it_fires(title: str, message: str) -> None:
    assert len(message) < 1500
    for hole in ("<no value>", "NaN", "unknown", "{{", "%!"):
        assert hole not in message.replace("NaN or infinite", "")
    assert not re.search(r"\b1 (applied switches|commands)\b", message)
    assert message.count("To do: ") == (0 if message.startswith("Resolved") else max(1, title.startswith("Two") * 2))
