"""Each process start of a run counts up to where a later one began."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from foreshock.server.store.schema import boots
from foreshock.server.testing import FakeRank

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
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
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
