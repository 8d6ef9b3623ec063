"""What alerts tell people, as real tools write it from the rules: every alert, once."""

import re

import pytest
from tests.dashboards.every_alert import messages

from foreshock.dashboards.rules import alerts


@pytest.mark.servers
def test_every_alert_fires_and_its_message_is_short_has_no_hole_and_asks_for_something_only_while_it_fires() -> None:
    written = messages()
    named = {title.split(":")[0] for title in written}
    assert {alert.name for _, alert in alerts()} - {"ForeshockWatchdog"} <= named
    for title, message in written.items():
        assert 0 < len(message) < 1500, title
        for hole in ("<no value>", "NaN", "unknown", "{{", "%!"):
            assert hole not in message.replace("NaN or infinite", ""), title
        assert not re.search(r"\b1 (applied switches|commands)\b", message), title
        asked = 0 if message.startswith(("Resolved", "No longer alerting")) else max(1, title.startswith("Two") * 2)
        assert message.count("To do: ") == asked, title
