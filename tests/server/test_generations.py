"""A run that resumes with other ranks: later steps of its former ranks no longer count."""

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
class Launch:
    """One launch: the heads of each rank, and the first and last step."""

    shares: tuple[tuple[int, ...], ...]
    begins: int
    ends: int


REPLICAS = {world: (tuple(range(HEADS)),) * world for world in (1, 2, 4)}
SPLIT = {world: tuple(tuple(range(rank, HEADS, world)) for rank in range(world)) for world in (1, 2, 4)}
RUNS = {
    "fewer ranks": [Launch(REPLICAS[4], 0, 100), Launch(REPLICAS[2], 50, 80)],
    "fewer ranks with other heads": [Launch(SPLIT[4], 0, 100), Launch(SPLIT[2], 50, 80)],
    "equally many ranks with other heads": [Launch(SPLIT[2], 0, 100), Launch(SPLIT[2][::-1], 50, 80)],
    "fewer ranks, then as many as before": [
        Launch(SPLIT[4], 0, 100),
        Launch(REPLICAS[2], 50, 80),
        Launch(SPLIT[4], 40, 70),
    ],
    "more ranks": [Launch(REPLICAS[2], 0, 100), Launch(REPLICAS[4], 60, 90)],
    "a single rank at the end": [
        Launch(REPLICAS[4], 0, 100),
        Launch(REPLICAS[2], 80, 120),
        Launch(REPLICAS[1], 30, 90),
    ],
}


def batches_of(launch: Launch, number: int, *, last: bool, finished: bool) -> list[list[Batch]]:
    """The batches of each rank. The boot ids do not reveal the order of the launches."""
    made = []
    for rank, heads in enumerate(launch.shares):
        boot = f"{1_800_000_000_000 + (7 * number + 5 * rank) % 11}-{rank}-{number}"
        fake = FakeRank(rank=rank, boot=boot, heads=heads)
        steps = range(launch.begins + 10, launch.ends + 1, 10)
        taken: list[Event] = [fake.sample(step, since=step - 10, loss=float(number)) for step in steps]
        begun = fake.started(step=launch.begins, world_size=len(launch.shares), policy="approve")
        warned = fake.verdict(launch.ends, 1, heads[0], f"l1h{heads[0]}-{launch.ends}", severity="critical")
        end: list[Event] = [] if last and rank else [warned]
        if finished or (not last and rank % 2):
            end.append(Finished(step=launch.ends, unix_seconds=1.0, status="completed" if last else "failed"))
        first: list[Event] = [begun, taken[0]]
        if last:  # the newest report counts in any order of arrival
            raised = fake.verdict(launch.begins + 10, 0, heads[-1], f"l0h{heads[-1]}")
            first += [raised, AgentHealth(step=launch.begins + 10, dropped={"queue_full": 3})]
            end += [raised.model_copy(update={"state": "cleared"}), AgentHealth(step=launch.ends, dropped={"other": 4})]
        made.append([fake.batch(*first), fake.batch(*taken[1:], *end)])
    return made


async def state_of_run(
    service: Any, since: int, finished: bool, ranks: list[FakeRank], headers: list[Headers]
) -> dict[str, Any]:
    """All responses about the run, for steps after `since` if they depend on steps, and the result of an order."""
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


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        # shared ranks are detected by the times of batches, and here all batches arrive at once
        return {key: without_times(one) for key, one in value.items() if "unix" not in key and key != "shared_ranks"}
    return [without_times(one) for one in value if "_seconds{" not in str(one)] if isinstance(value, list) else value


def history(launches: list[Launch]) -> dict[int, float]:
    """The loss of the steps before the last launch: the mean of all samples that count."""
    found: dict[int, list[float]] = {}
    for n, launch in enumerate(launches[:-1]):
        for step in range(
            launch.begins + 10, min([launch.ends, *(later.begins for later in launches[n + 1 :])]) + 1, 10
        ):
            found.setdefault(step, []).extend([float(n)] * len(launch.shares))
    last = launches[-1].begins
    return {step: sum(losses) / len(losses) for step, losses in sorted(found.items()) if step <= last}


def state_after(
    run_scenario_at: Any,
    batches: list[Batch],
    look: Callable[[Any], Awaitable[dict[str, Any]]],
    at_once: int,
    headers_of: Callable[[Batch, float], Headers],
) -> dict[str, Any]:
    """Send the batches to a service on a new store, `at_once` at a time, and return the result of `look`.

    headers_of: the headers of a batch; its second argument is the monotonic time at the start.
    """
    state_of_run: dict[str, Any] = {}

    async def scenario(service: Any) -> None:
        began = time.monotonic()
        for i in range(0, len(batches), at_once):
            sent = (service.post(batch, **headers_of(batch, began)) for batch in batches[i : i + at_once])
            responses = await asyncio.gather(*sent)
            assert {response.status_code for response in responses} == {200}
        state_of_run.update(await look(service))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_scenario_at(f"sqlite:///{Path(folder) / 'foreshock.db'}", scenario))
    return state_of_run


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.full] * ((n + seed) % 2))
        for n, name in enumerate(RUNS)
        for seed in range(2)
    ],
)
def test_resumed_run_matches_its_last_launch_for_any_order_of_batches(
    run_scenario_at: Any, name: str, seed: int
) -> None:
    launches, draw = RUNS[name], random.Random(f"{name} {seed}")
    finished = bool(seed % 2)
    made = [batches_of(launch, n, last=n == len(launches) - 1, finished=finished) for n, launch in enumerate(launches)]
    ages: dict[tuple[int, str], float] = {}
    for n, of_launch in enumerate(made):
        for own in of_launch:
            ages[own[0].rank, own[0].boot] = 1000.0 * (len(launches) - n) - draw.uniform(0, 400)
    dead = {batch.boot for of_launch in made[:-1] for own in of_launch for batch in own}
    spooled = {boot for boot in sorted(dead) if draw.random() < 0.3}

    def headers_of(batch: Batch, began: float) -> Headers:
        age = ages[batch.rank, batch.boot] + time.monotonic() - began
        return {"age": age, "replayed": batch.boot in spooled and batch.sequence > 1}

    since = launches[-1].begins
    only_last = [batch for own in made[-1] for batch in own]
    everything = [batch for of_launch in made for own in of_launch for batch in own]
    everything += draw.choices(everything, k=draw.randrange(20))
    draw.shuffle(everything)

    async def look(service: Any) -> dict[str, Any]:
        ranks = [
            FakeRank(rank=own[0].rank, boot=own[0].boot, heads=launches[-1].shares[own[0].rank]) for own in made[-1]
        ]
        for fake in ranks:
            fake.sequence = 10
        headers = [headers_of(own[0], time.monotonic()) for own in made[-1]]
        return await state_of_run(service, since, finished, ranks, headers)

    control = state_after(run_scenario_at, only_last, look, 1, headers_of)
    assert control["detail"]["status"] == ("completed" if finished else "active")
    assert control["detail"]["agent_dropped"] == {"other": 4 * len(made[-1])}
    found = state_after(run_scenario_at, everything, look, draw.randint(1, 4), headers_of)
    assert found.pop("history") == history(launches)
    for key in found:
        assert without_times(found[key]) == without_times(control[key]), key


@pytest.mark.parametrize("left", [1, 2])
async def test_rank_missing_after_restart_is_excluded_until_it_reports(
    service: Any, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The world size stays the same, so only silence shows that a rank is gone."""
    since = time.time()

    class Clock:
        now = 0.0

        def time(self) -> float:
            return since + self.now

    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    began: dict[str, float] = {}

    async def send(fake: FakeRank, *taken: Event) -> Any:
        return await service.store(fake, *taken, age=clock.now - began.setdefault(fake.boot, clock.now))

    async def losses() -> dict[int, float]:
        [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
        return dict(zip(line["steps"], line["last"], strict=True))

    async def launched(number: int, ranks: range, first: int, last: int) -> list[FakeRank]:
        fakes = [FakeRank(rank=rank, boot=f"{number}-{rank}", layers=1, heads=(0, 1)) for rank in ranks]
        for fake in fakes:
            await send(fake, fake.started(step=first, world_size=3))
        for step in range(first + 10, last + 1, 10):
            clock.now += 10.0
            for fake in fakes:
                await send(fake, fake.sample(step, since=step - 10, loss=float(number)))
        return fakes

    await launched(8, range(3), 0, 100)
    former = await launched(9, range(3), 80, 100)
    await send(former[2], former[2].verdict(100, 0, 0, "l0h0-100", severity="critical"))
    clock.now += 60.0
    living = await launched(1, range(left), 50, 70)
    assert (await service.get("/v1/runs/run-1"))["ranks"] == 3, "the third rank may only be late"
    for _ in range(5):
        clock.now += 60.0
        for fake in living:
            await send(fake, AgentHealth(step=70))
    detail = await service.get("/v1/runs/run-1")
    assert (detail["ranks"], detail["last_step"], detail["loss"], detail["warnings"]) == (left, 70, 1.0, [])
    assert await losses() == {**dict.fromkeys(range(10, 51, 10), 8.0), 60: 1.0, 70: 1.0}
    clock.now += 60.0
    living = await launched(2, range(left), 30, 50)
    assert await losses() == {**dict.fromkeys((10, 20, 30), 8.0), 40: 2.0, 50: 2.0}
    await send(former[2], former[2].sample(110, since=100, loss=9.0))
    assert (await service.get("/v1/runs/run-1"))["ranks"] == left + 1, "the rank has reported again"
    assert (await losses())[110] == 9.0
    for fake in (*living, former[2]):
        await send(fake, Finished(step=110, unix_seconds=1.0, status="completed"))
    assert (await service.get("/v1/runs/run-1"))["status"] == "completed"
