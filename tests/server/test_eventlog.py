"""The log of events: what names one, and to whom."""

from typing import Any

import pytest
from tests.server.test_tenants import OTHER, OWN, TOKENS, two_tenants

from foreshock.server.runs.eventlog import cursor_of


@pytest.mark.full
@pytest.mark.promise("S21")
@pytest.mark.parametrize(
    "last", ["0", "-1", "", "x", f"999 {OWN}", f"1 {OTHER}", f"1{OWN}", "9" * 400, "1 \u00e9", f"1 {'r' * 300}"]
)
@pytest.mark.settings(tokens=TOKENS)
async def test_a_strange_last_event_id_begins_the_stream_anew_and_is_no_error(last: str, service: Any) -> None:
    await two_tenants(service)
    with service.app.state.store.reader.engine.begin() as connection:
        assert cursor_of(connection, last, "team-e/") is None
        assert cursor_of(connection, f"1 {OWN}", "team-e/") is not None
