"""A run that is resumed in another shape is what it is now: nothing of the ranks that it had before counts any more."""

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foreshock.contract.wire import AgentHealth, Batch, Event, Finished
from foreshock.server import recorder
from foreshock.server.testing import FakeRank

pytestmark = [pytest.mark.promise("S27"), pytest.mark.promise("S2")]
HEADS = 4
Headers = dict[str, Any]


@dataclass(frozen=True)
class Life:
    """One launch: what each of its ranks holds, and the steps that it does."""

    shares: tuple[tuple[int, ...], ...]
    begins: int
    ends: int


REPLICAS = {world: (tuple(range(HEADS)),) * world for world in (1, 2, 4)}
SPLIT = {world: tuple(tuple(range(rank, HEADS, world)) for rank in range(world)) for world in (1, 2, 4)}
RUNS = {
    "fewer ranks": [Life(REPLICAS[4], 0, 100), Life(REPLICAS[2], 50, 80)],
    "fewer ranks that hold other heads": [Life(SPLIT[4], 0, 100), Life(SPLIT[2], 50, 80)],
    "as many ranks that hold other heads": [Life(SPLIT[2], 0, 100), Life(SPLIT[2][::-1], 50, 80)],
    "fewer, and as many as before": [Life(SPLIT[4], 0, 100), Life(REPLICAS[2], 50, 80), Life(SPLIT[4], 40, 70)],
    "more ranks": [Life(REPLICAS[2], 0, 100), Life(REPLICAS[4], 60, 90)],
    "one rank in the end": [Life(REPLICAS[4], 0, 100), Life(REPLICAS[2], 80, 120), Life(REPLICAS[1], 30, 90)],
}


def batches_of(life: Life, number: int, *, last: bool, finished: bool) -> list[list[Batch]]:
    """The batches of each rank, the names of whose process starts say nothing of their order."""
    made = []
    for rank, heads in enumerate(life.shares):
        boot = f"{1_800_000_000_000 + (7 * number + 5 * rank) % 11}-{rank}-{number}"
        fake = FakeRank(rank=rank, boot=boot, heads=heads)
        steps = range(life.begins + 10, life.ends + 1, 10)
        taken: list[Event] = [fake.sample(step, since=step - 10, loss=float(number)) for step in steps]
        begun = fake.started(step=life.begins, world_size=len(life.shares), policy="approve")
        warned = fake.verdict(life.ends, 1, heads[0], f"l1h{heads[0]}-{life.ends}", severity="critical")
        end: list[Event] = [] if last and rank else [warned]
        if finished or (not last and rank % 2):
            end.append(Finished(step=life.ends, unix_seconds=1.0, status="completed" if last else "failed"))
        first: list[Event] = [begun, taken[0]]
        if last:  # the newest word counts, however they come
            raised = fake.verdict(life.begins + 10, 0, heads[-1], f"l0h{heads[-1]}")
            first += [raised, AgentHealth(step=life.begins + 10, dropped={"queue_full": 3})]
            end += [raised.model_copy(update={"state": "cleared"}), AgentHealth(step=life.ends, dropped={"other": 4})]
        made.append([fake.batch(*first), fake.batch(*taken[1:], *end)])
    return made


async def seen(
    service: Any, since: int, finished: bool, ranks: list[FakeRank], headers: list[Headers]
) -> dict[str, Any]:
    """What the service says of the run, from a step on where it speaks of steps; and what becomes of an order."""
    found: dict[str, Any] = {}
    detail = await service.get("/v1/runs/run-1")
    [listed] = (await service.get("/v1/runs"))["runs"]
    found["listed"] = {key: value for key, value in listed.items() if key in detail}
    found |= {"detail": detail, "incidents": (await service.get("/v1/runs/run-1/incidents"))["incidents"]}
    for key in ("head.score_max", "head.mode", "head.risk"):
        found[f"{key} now"] = await service.get("/v1/runs/run-1/matrix", metric=key, max_steps=0)
    for line in ("run.loss", "run.grad_norm", "run.worst_risk", "head.score_max:1:2", "head.score_offset"):
        for one in (await service.get("/v1/runs/run-1/curves", line=line, max_points=5))["lines"]:
            found[f"{line} {one['layer']} to"] = one["steps"][-1:]
        for one in (await service.get("/v1/runs/run-1/curves", line=line, from_step=since + 1))["lines"]:
            found[f"{line} {one['layer']}"] = one
    lines = (await service.client.get("/metrics")).text.splitlines()
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss", to_step=since))["lines"]
    found["history"] = dict(zip(line["steps"], line["last"], strict=True))
    found["metrics"] = [line for line in lines if 'run="run-1"' in line and "_total{" not in line]
    if not finished:
        body = {"who": "ann", "reason": "drift", "heads": None, "mode": "exact_delta"}
        made = await service.client.post("/v1/runs/run-1/commands", json=body)
        assert made.status_code == 201, made.text
        for fake, own in zip(ranks, headers, strict=True):
            ack = await service.store(fake, fake.sample(200, since=190, loss=7.0), **own)
            [command] = ack.commands
            await service.store(fake, fake.answer(command, 201), **own)
        [order] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        found["order"] = {key: value for key, value in order.items() if key not in ("id", "created", "expires")}
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        # two processes that share a rank are told by when they are heard, and here all are heard at once
        return {key: timeless(one) for key, one in value.items() if "unix" not in key and key != "shared_ranks"}
    return [timeless(one) for one in value if "_seconds{" not in str(one)] if isinstance(value, list) else value


def history(lives: list[Life]) -> dict[int, float]:
    """The loss of the steps before the last life: of each the mean of what counts."""
    found: dict[int, list[float]] = {}
    for n, life in enumerate(lives[:-1]):
        for step in range(life.begins + 10, min([life.ends, *(later.begins for later in lives[n + 1 :])]) + 1, 10):
            found.setdefault(step, []).extend([float(n)] * len(life.shares))
    last = lives[-1].begins
    return {step: sum(losses) / len(losses) for step, losses in sorted(found.items()) if step <= last}


def seen_after(
    player: Any,
    batches: list[Batch],
    look: Callable[[Any], Awaitable[dict[str, Any]]],
    at_once: int,
    headers_of: Callable[[Batch, float], Headers],
) -> dict[str, Any]:
    """What `look` finds in a service on a new store that took the batches in their order, `at_once` at a time.

    headers_of: the headers of a batch, given when the story began on the monotonic clock.
    """
    seen: dict[str, Any] = {}

    async def story(service: Any) -> None:
        began = time.monotonic()
        for i in range(0, len(batches), at_once):
            sent = (service.post(batch, **headers_of(batch, began)) for batch in batches[i : i + at_once])
            answers = await asyncio.gather(*sent)
            assert {answer.status_code for answer in answers} == {200}
        seen.update(await look(service))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(player(f"sqlite:///{Path(folder) / 'foreshock.db'}", story))
    return seen


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.full] * ((n + seed) % 2))
        for n, name in enumerate(RUNS)
        for seed in range(2)
    ],
)
def test_resumed_run_matches_its_last_launch_for_any_order_of_batches(player: Any, name: str, seed: int) -> None:
    lives, draw = RUNS[name], random.Random(f"{name} {seed}")
    finished = bool(seed % 2)
    made = [batches_of(life, n, last=n == len(lives) - 1, finished=finished) for n, life in enumerate(lives)]
    ages: dict[tuple[int, str], float] = {}
    for n, of_life in enumerate(made):
        for own in of_life:
            ages[own[0].rank, own[0].boot] = 1000.0 * (len(lives) - n) - draw.uniform(0, 400)
    dead = {batch.boot for of_life in made[:-1] for own in of_life for batch in own}
    spooled = {boot for boot in sorted(dead) if draw.random() < 0.3}

    def headers_of(batch: Batch, began: float) -> Headers:
        age = ages[batch.rank, batch.boot] + time.monotonic() - began
        return {"age": age, "replayed": batch.boot in spooled and batch.sequence > 1}

    since = lives[-1].begins
    only_last = [batch for own in made[-1] for batch in own]
    everything = [batch for of_life in made for own in of_life for batch in own]
    everything += draw.choices(everything, k=draw.randrange(20))
    draw.shuffle(everything)

    async def look(service: Any) -> dict[str, Any]:
        ranks = [FakeRank(rank=own[0].rank, boot=own[0].boot, heads=lives[-1].shares[own[0].rank]) for own in made[-1]]
        for fake in ranks:
            fake.sequence = 10
        headers = [headers_of(own[0], time.monotonic()) for own in made[-1]]
        return await seen(service, since, finished, ranks, headers)

    control = seen_after(player, only_last, look, 1, headers_of)
    assert control["detail"]["status"] == ("completed" if finished else "active")
    assert control["detail"]["agent_dropped"] == {"other": 4 * len(made[-1])}
    found = seen_after(player, everything, look, draw.randint(1, 4), headers_of)
    assert found.pop("history") == history(lives)
    for key in found:
        assert timeless(found[key]) == timeless(control[key]), key


@pytest.mark.parametrize("left", [1, 2])
async def test_rank_missing_after_restart_is_excluded_until_it_reports(
    service: Any, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The number of ranks stays, so only silence tells that one of them is gone."""
    since = time.time()

    class Clock:
        now = 0.0

        def time(self) -> float:
            return since + self.now

    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    began: dict[str, float] = {}

    async def say(fake: FakeRank, *taken: Event) -> Any:
        return await service.store(fake, *taken, age=clock.now - began.setdefault(fake.boot, clock.now))

    async def losses() -> dict[int, float]:
        [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
        return dict(zip(line["steps"], line["last"], strict=True))

    async def launched(number: int, ranks: range, first: int, last: int) -> list[FakeRank]:
        fakes = [FakeRank(rank=rank, boot=f"{number}-{rank}", layers=1, heads=(0, 1)) for rank in ranks]
        for fake in fakes:
            await say(fake, fake.started(step=first, world_size=3))
        for step in range(first + 10, last + 1, 10):
            clock.now += 10.0
            for fake in fakes:
                await say(fake, fake.sample(step, since=step - 10, loss=float(number)))
        return fakes

    await launched(8, range(3), 0, 100)
    former = await launched(9, range(3), 80, 100)
    await say(former[2], former[2].verdict(100, 0, 0, "l0h0-100", severity="critical"))
    clock.now += 60.0
    living = await launched(1, range(left), 50, 70)
    assert (await service.get("/v1/runs/run-1"))["ranks"] == 3, "the third may be late"
    for _ in range(5):
        clock.now += 60.0
        for fake in living:
            await say(fake, AgentHealth(step=70))
    detail = await service.get("/v1/runs/run-1")
    assert (detail["ranks"], detail["last_step"], detail["loss"], detail["warnings"]) == (left, 70, 1.0, [])
    assert await losses() == {**dict.fromkeys(range(10, 51, 10), 8.0), 60: 1.0, 70: 1.0}
    clock.now += 60.0
    living = await launched(2, range(left), 30, 50)
    assert await losses() == {**dict.fromkeys((10, 20, 30), 8.0), 40: 2.0, 50: 2.0}
    await say(former[2], former[2].sample(110, since=100, loss=9.0))
    assert (await service.get("/v1/runs/run-1"))["ranks"] == left + 1, "it lives after all"
    assert (await losses())[110] == 9.0
    for fake in (*living, former[2]):
        await say(fake, Finished(step=110, unix_seconds=1.0, status="completed"))
    assert (await service.get("/v1/runs/run-1"))["status"] == "completed"
