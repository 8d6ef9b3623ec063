"""Every kind of message that people can be sent, as the notifier would send it."""

import re

from tests.server.every_message import messages

from foreshock.contract.causes import CAUSES
from foreshock.server.notifier import LONGEST

MESSAGES = dict(messages())


def test_every_cause_and_every_end_of_an_incident_is_printed() -> None:
    assert len(MESSAGES) == len(list(messages())) > 20
    for cause in CAUSES:
        assert any(title.lower().startswith(cause) for title in MESSAGES), cause
    for state in ("switched", "arrested", "not arrested", "acknowledged", "closed"):
        assert f"Rounding, {state}" in MESSAGES


def test_no_message_is_longer_than_people_read_or_has_a_hole_and_each_ends_with_where_to_look() -> None:
    for title, message in MESSAGES.items():
        assert 0 < len(message) <= LONGEST, title
        assert not re.search(r"None|nan\b|  |\{|<built|object at", message), title
        assert "https://foreshock.example.org" in message.splitlines()[-1], title
