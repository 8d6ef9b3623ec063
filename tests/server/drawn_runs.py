"""Runs long or wide enough to be drawn, and their roll-ups."""

from typing import Any

from foreshock.server.testing import FakeRank


async def store_run(service: Any, steps: range) -> FakeRank:
    rank = FakeRank()
    await service.store(rank, rank.started())
    events = [rank.sample(step, since=step - steps.step, loss=float(step % 97)) for step in steps]
    for i in range(0, len(events), 400):
        await service.store(rank, *events[i : i + 400])
    return rank
