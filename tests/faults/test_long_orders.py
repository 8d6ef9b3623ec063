"""More orders than one acknowledgement may hold: the agent takes them all, and sends no batch twice for them."""

from pathlib import Path

import pytest
from tests.constants import settings_with
from tests.faults.sending import eventually

from foreshock.contract import wire
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport.sender import Sender
from foreshock.server.testing import FakeRank, LiveService

ORDERS = 14


@pytest.mark.full
@pytest.mark.promise("S11")
def test_an_agent_takes_more_than_a_mebibyte_of_orders_and_sends_no_batch_twice(tmp_path: Path) -> None:
    rank = FakeRank(run="a-run", layers=100, heads=range(100))
    config = settings_with(
        AgentConfig, run="a-run", spool_directory=None, send_every_seconds=0.02, heartbeat_seconds=3600.0
    )
    order = {"who": "ann", "reason": "it drifts", "heads": wire.head_refs(rank.layers), "mode": "row_corrected"}
    taken: dict[str, wire.Command] = {}
    with LiveService(tmp_path) as service, service.client() as client:
        config = config.model_copy(update={"url": service.url})
        sender = Sender(config, run="a-run", boot="boot-1", health=lambda: (7, {}))
        sender.start()
        sender.put(rank.started())
        eventually("the run is known", lambda: client.get("/v1/runs/a-run").status_code == 200, 60)
        wanted = [client.post("/v1/runs/a-run/commands", json=order).json()["id"] for _ in range(ORDERS)]

        def obey() -> bool:
            if not len(sender._own):  # every batch has been acknowledged
                sender.put(wire.AgentHealth(step=8))
            for command in sender.commands():
                taken[command.id] = command
                sender.put(
                    rank.answer(command, 8, "refused").model_copy(update={"heads": (), "before": (), "after": ()})
                )
            return len(taken) == ORDERS

        eventually("every order has come", obey, 60)
        sender.close(10)
        counted = client.get("/metrics").text
    assert sum(len(command.model_dump_json()) for command in taken.values()) > wire.MAX_ACK_BYTES
    assert sorted(taken) == sorted(wanted)
    assert 'foreshock_service_batches_total{result="duplicate"} 0\n' in counted
    assert (sender._failures, dict(sender.dropped), dict(sender.faults)) == (0, {}, {})
