"""People are told of incidents, once each, together where they come together, and in few words however much fails."""

import json
import time
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import update
from tests.constants import settings_with

from foreshock.contract.metrics.run_metrics import SILENT_SECONDS
from foreshock.contract.wire import Finished
from foreshock.server.notifier import LONGEST, Notifier
from foreshock.server.settings import Settings
from foreshock.server.store.schema import runs, service_state
from foreshock.server.testing import FakeRank


class Out:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def post(self, _url: str, body: bytes) -> int:
        self.said.append(json.loads(body)["message"])
        return 200


async def notifier_of(service: Any, out: Out, gather: float = 0.0) -> Notifier:
    url = SecretStr("https://hooks.example.org/x")
    settings = settings_with(
        Settings,
        notify_webhook_url=url,
        notify_hosts=("hooks.example.org",),
        notify_gather_seconds=gather,
        token=SecretStr("a-secret-of-sixteen-or-more"),
        public_url="https://foreshock.example.org",
    )
    notifier = Notifier(service.app.state.store, settings, out)  # type: ignore[arg-type]
    await notifier.turn()
    return notifier


async def test_growth_alone_is_no_news_and_every_change_of_state_is_told_once_in_a_short_message(service: Any) -> None:
    out, rank = Out(), FakeRank(layers=12, heads=tuple(range(12)))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(policy="observe"), rank.sample(1), rank.verdict(1, name="first"))
    await notifier.turn()
    for layer in range(12):
        flood = [rank.verdict(20 + layer, layer=layer, head=h, name=f"l{layer}h{h}") for h in range(12)]
        await service.store(rank, *flood)
    await notifier.turn()
    assert len(out.said) == 1
    await service.store(rank, rank.verdict(90, name="first", state="updated", severity="critical"))
    await notifier.turn()
    care = {"who": "ann", "reason": "on it", "incident": "rounding"}
    await service.client.post("/v1/runs/run-1/acknowledge", json=care)
    await notifier.turn()
    await notifier.turn()
    assert [said.split(":")[0] for said in out.said] == ["Warning", "Critical", "Critical, acknowledged"]
    start = "Critical: Run run-1: Rounding makes attention scores drift in 144 heads of layers 0 to 11"
    assert (out.said[1].startswith(start), len(out.said[1]) < LONGEST) == (True, True)
    assert "To do: Switch every head to exact_delta." in out.said[1]
    assert out.said[1].endswith("https://foreshock.example.org/?runs=run-1&head=0.2&metric=head.score_offset")


async def test_news_wait_for_what_comes_with_them(service: Any) -> None:
    out, rank = Out(), FakeRank()
    notifier = await notifier_of(service, out, gather=60.0)
    await service.store(rank, rank.started(), rank.verdict(5))
    await notifier.turn()
    assert out.said == []
    type(notifier.settings).notify_gather_seconds = 0.0  # a kind of its own
    await notifier.turn()
    assert len(out.said) == 1


async def test_two_hundred_runs_that_fall_silent_together_are_at_most_two_messages_and_told_once(service: Any) -> None:
    out, now = Out(), time.time()
    notifier = await notifier_of(service, out, gather=5.0)
    for number in range(200):
        rank = FakeRank(run=f"fleet/run-{number:03}", layers=1, heads=(0,))
        ended = [Finished(step=2, unix_seconds=1.0, status="completed")] if number >= 190 else []
        await service.store(rank, rank.started(), *ended)
    with service.app.state.store.writer.engine.begin() as connection:
        for number in range(200):  # their last heartbeats lie within ten seconds
            heard = now - SILENT_SECONDS - 40 + number % 10
            own = runs.c.name == f"fleet/run-{number:03}"
            connection.execute(update(runs).where(own).values(last_seen=heard))
        own = service_state.c.key == "notified silence"
        connection.execute(update(service_state).where(own).values(value=now - SILENT_SECONDS - 60))
    for _ in range(3):
        await notifier.turn()
    [message] = out.said
    assert message.startswith("Warning: 190 runs have sent nothing for 5 minutes: fleet/run-000, ")
    assert "and 184 more" in message
    assert len(message) < LONGEST


async def test_a_run_that_falls_silent_is_told_after_a_clock_was_a_day_ahead_and_is_set_right(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that starts with a wrong clock: until that day came, no run was silent, and nobody was told."""
    right, ahead = time.time, [86_400.0]
    monkeypatch.setattr(time, "time", lambda: right() + ahead[0])
    out, rank = Out(), FakeRank(run="clocked", layers=1, heads=(0,))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(), rank.sample(1))
    ahead[0] += 1.0
    await notifier.turn()
    await service.store(rank, rank.verdict(1, head=0))
    ahead[0] = 0.0
    await notifier.turn()
    assert "clocked" in out.said.pop()
    await service.store(rank, rank.sample(2))
    assert (await service.get("/v1/runs/clocked"))["last_seen_unix_seconds"] <= time.time()
    await notifier.turn()
    ahead[0] = SILENT_SECONDS + 60.0
    await notifier.turn()
    assert (await service.get("/v1/runs/clocked"))["condition"] == "silent"
    [message] = out.said
    assert "clocked has sent nothing" in message
