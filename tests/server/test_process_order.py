"""What a batch costs does not grow with the process starts before it, and each of them counts as far as it should."""

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.pool import Pool

from foreshock.server.store.schema import boots
from foreshock.server.testing import FakeRank

_INSTRUCTIONS = 50


class Work:
    """What SQLite does for the service: rows that it hands over, and instructions of its machine (in fifties)."""

    rows = instructions = 0

    def watch(self, connection: Any, _record: Any) -> None:
        """Count what a new connection does."""
        real = getattr(connection, "driver_connection", connection)
        real = getattr(real, "_conn", real)
        real.row_factory = self._row
        real.set_progress_handler(self._step, _INSTRUCTIONS)

    def _row(self, _cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        self.rows += 1
        return row

    def _step(self) -> None:
        self.instructions += 1


@contextmanager
def counted() -> Iterator[Work]:
    work = Work()
    event.listen(Pool, "connect", work.watch)
    try:
        yield work
    finally:
        event.remove(Pool, "connect", work.watch)


async def restarted(service: Any, number: int) -> None:
    """A process start that does the steps of the one before again, and warns of the same."""
    rank = FakeRank(boot=f"{1_800_000_000_000 + number}-0-aaaa")
    again = 10 + number // 100
    events = rank.started(step=again), rank.sample(again + 1), rank.verdict(again + 1)
    await service.store(rank, *events, age=0.1)


@pytest.mark.full
@pytest.mark.promise("S12")
@pytest.mark.promise("S17")
def test_a_restart_costs_the_same_after_ten_others_as_after_five_hundred(play: Any) -> None:
    costs: dict[str, list[tuple[int, int]]] = {}
    order = {"who": "ann", "reason": "drift", "heads": [[0, 1]], "mode": "exact_delta", "dry_run": True}

    async def story(service: Any) -> None:
        asked: dict[str, Callable[[], Any]] = {
            "list": lambda: service.get("/v1/runs"),
            "run": lambda: service.get("/v1/runs/run-1"),
            "metrics": lambda: service.client.get("/metrics"),
            "order": lambda: service.client.post("/v1/runs/run-1/commands", json=order),
        }
        for number in range(501):
            before = work.rows, work.instructions
            await restarted(service, number)
            if number in (10, 500):
                costs.setdefault("restart", []).append((work.rows - before[0], work.instructions - before[1]))
                for name, ask in asked.items():
                    before = work.rows, work.instructions
                    await ask()
                    costs.setdefault(name, []).append((work.rows - before[0], work.instructions - before[1]))

    with counted() as work:
        play(story)
    assert all(0 < many[0] <= few[0] + 8 for few, many in costs.values()), costs
    few, many = costs["restart"]
    assert 0 < _INSTRUCTIONS * (many[1] - few[1]) < 50 * 490, costs  # an entry of an index is passed over, no more


Start = tuple[int, int | None, int | None]
"""Rank, world size and first step of a process start, where they are known."""


def does_again(later: Sequence[Start], earlier: Start) -> bool:
    """Whether the last of `later` does again what an earlier process start did: it is of the same rank, or a generation
    with another world size has begun since."""
    worlds = {world for _, world, _ in (earlier, *later) if world is not None}
    return later[-1][0] == earlier[0] or len(worlds) > 1


def start_of(row: Any) -> Start:
    return row.rank, row.world_size, row.started_step if row.started_step is not None else row.earliest_step


@pytest.mark.promise("S2")
@pytest.mark.promise("S27")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("seed", range(6))
async def test_in_whatever_order_process_starts_move_each_counts_up_to_where_a_later_one_began(
    service: Any, seed: int, ranks: int
) -> None:
    """What is stored after every batch is what follows from all process starts of the run at once."""
    draw = random.Random(seed)
    starts = [
        FakeRank(boot=f"{1_800_000_000_000 + draw.randrange(9000)}-{n}-aaaa", rank=draw.randrange(ranks))
        for n in range(12)
    ]
    worlds = [draw.choice([ranks, ranks, ranks + 1]) for _ in starts]
    for number in range(60):
        which = draw.randrange(2 + number // 6)
        step = draw.randrange(100)
        said = (
            starts[which].started(step=step, world_size=worlds[which])
            if draw.random() < 0.4
            else starts[which].sample(step + 1, since=draw.randrange(step + 1))
        )
        age = draw.choice([None, draw.uniform(0, 9000)])
        await service.store(starts[which], said, age=age, replayed=draw.random() < 0.3)
        with service.app.state.store.reader.engine.begin() as connection:
            known = connection.execute(select(boots).order_by(boots.c.place)).all()
        living = [row for row in known if not row.replayed] or known
        newest = []
        for i, row in enumerate(living):
            later = [start_of(one) for one in living[i + 1 :]]
            if not any(does_again(later[: n + 1], start_of(row)) for n in range(len(later))):
                newest.append(row)
        order = [row for row in known if row not in newest] + newest
        for i, row in enumerate(order):
            assert row.newest == (row in newest), (number, row)
            later = [] if row in newest else [start_of(one) for one in order[i + 1 :]]
            first = [last[2] for n, last in enumerate(later) if does_again(later[: n + 1], start_of(row))]
            assert row.until_step == min((step for step in first if step is not None), default=None), (number, row)
