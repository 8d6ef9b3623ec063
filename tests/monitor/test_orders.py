"""Many orders in one answer are spread over boundaries: in their order, each once, and none after it has expired."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.switching import AT_ONCE, MAX_WAITING, Switching


def order(number: int, **changes: Any) -> wire.Command:
    fields: dict[str, Any] = {"id": f"c{number}", "mode": "exact_delta", "reason": "a test", "issued_by": "ada"}
    return wire.Command(**{**fields, **changes})


@pytest.fixture
def agent() -> Iterator[Agent]:
    settings: dict[str, Any] = {"sample_every_steps": 1, "sample_every_seconds": 0.0, "quiet": True, "url": None}
    with attach(tiny_gpt(), attention="kernels", **settings) as made:
        yield made


def steps_of(agent: Agent, monkeypatch: pytest.MonkeyPatch, *answers: list[wire.Command]) -> list[list[wire.Switched]]:
    """What the agent does at each boundary, of which each brings one of `answers`, until it has done everything."""
    heard = Listener()
    agent.subscribe(heard)
    steps: list[list[wire.Switched]] = []
    waiting = list(answers)
    while waiting or len(steps) < len(answers) or steps[-1]:
        arrived = waiting.pop(0) if waiting else []
        monkeypatch.setattr(agent._outbox, "commands", lambda arrived=arrived: arrived)
        heard.events.clear()
        agent.step(1.0)
        steps.append(heard.of(wire.Switched))
    return steps


def test_a_boundary_carries_out_a_few_orders_and_the_next_ones_the_rest_in_their_order(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = [order(number) for number in range(256)]
    steps = steps_of(agent, monkeypatch, flood, flood, flood)  # sent again with every answer until it is answered
    assert max(map(len, steps)) == AT_ONCE
    assert [done.command for step in steps for done in step] == [command.id for command in flood]
    assert len(steps) == 256 // AT_ONCE + 1


def test_an_order_that_expires_while_it_waits_is_not_carried_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = [order(number) for number in range(AT_ONCE)]
    late = [order(100, expires_step=1), order(101, expires_unix_seconds=time.time() - 1), order(102)]
    steps = steps_of(agent, monkeypatch, flood + late)
    assert [done.outcome for done in steps[1]] == ["expired", "expired", "applied"]


def test_no_more_orders_wait_than_have_room_and_the_oldest_stay() -> None:
    class Answered:
        """Stands for the heads' modes: it carried out one order before."""

        def answered(self, name: str) -> bool:
            return name == "c3"

    board: Any = Answered()
    orders = Switching(AgentConfig(url=None), board, lambda _: None, lambda _: None)
    first = orders.due([order(number) for number in range(2 * MAX_WAITING)])
    assert [command.id for command in first] == ["c0", "c1", "c2", "c4"]
    rest = [command.id for _ in range(MAX_WAITING) for command in orders.due([])]
    assert (len(rest), rest[-1]) == (MAX_WAITING - AT_ONCE, f"c{MAX_WAITING}")
