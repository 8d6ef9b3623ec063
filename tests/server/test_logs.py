"""What strangers can make the service log is bounded, and counted."""

import logging
from typing import Any

from foreshock.server.logs import Seldom, lines


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, message, None, None)


async def test_a_message_is_logged_once_in_ten_seconds_and_the_metrics_count_those_left_out(service: Any) -> None:
    now, before = 0.0, lines["left out"]
    seldom = Seldom(lambda: now)
    assert [seldom.filter(record("bad")) for _ in range(5)] == [True, False, False, False, False]
    assert seldom.filter(record("worse"))
    now = 10.0
    again = record("bad")
    assert seldom.filter(again)
    assert again.getMessage() == "bad (4 more of these were left out)"
    metrics = (await service.client.get("/metrics")).text
    assert f"\nforeshock_service_log_lines_dropped_total {before + 4}.0\n" in metrics
