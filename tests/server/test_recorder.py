"""The same batches leave the same rows whatever their order, repeats and interleaving (server/recorder.py)."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.replaying import seen_after

from foreshock.contract.wire import AgentHealth, Batch, Finished
from foreshock.server.testing import FakeRank

KEYS = ("head.score_offset", "head.tied_rows_bf16", "head.score_max", "head.delta_bias", "head.mode", "head.risk")


@dataclass(frozen=True)
class Told:
    """How old the process starts of rank 1 are when the story begins, and which batches came from a spool."""

    names: tuple[str, str] = ("b1", "b2")
    ages: tuple[float, float] | None = None
    replayed: Callable[[Batch], bool] = lambda _: False

    def beside(self, batch: Batch, began: float) -> dict[str, Any]:
        """What is told beside a batch that is sent now."""
        if self.ages is None:
            return {}
        age = self.ages[self.names.index(batch.boot)] if batch.rank == 1 else 600.0
        of_the_dead = batch.rank == 1 and batch.boot == self.names[0]
        return {"age": age + time.monotonic() - began, "replayed": of_the_dead and self.replayed(batch)}


BY_NAME = Told()
BEHIND: Final = ("b2", "b1")
"""The names of a process start and of its successor, on a node whose clock is behind."""


def a_run_of_three_ranks_one_restarted(names: tuple[str, str] = BY_NAME.names) -> list[Batch]:
    """Ranks 0 and 1 hold the same heads, rank 2 others; rank 1 dies at step 40 and goes on from step 20."""
    ranks = [FakeRank(rank=0), FakeRank(rank=1, boot=names[0]), FakeRank(rank=2, heads=(3, 4))]
    batches = [rank.batch(rank.started()) for rank in ranks]
    for step in (10, 20, 30, 40):
        batches += [rank.batch(rank.sample(step, since=step - 10)) for rank in ranks]
    again = FakeRank(rank=1, boot=names[1])
    batches.append(again.batch(again.started(step=20)))
    batches += [again.batch(again.sample(step, since=step - 10)) for step in (30, 40, 50)]
    batches += [ranks[0].batch(ranks[0].sample(50, since=40), ranks[0].verdict(50))]
    batches += [ranks[0].batch(ranks[0].verdict(51, state="updated", forecast_steps=900.0))]
    batches += [ranks[0].batch(AgentHealth(step=51, dropped={"full": 3}))]
    batches += [ranks[0].batch(AgentHealth(step=52, dropped={"full": 4}))]
    batches += [again.batch(again.verdict(50, name="warn-2"), again.verdict(51, name="warn-2", state="cleared"))]
    batches += [again.batch(Finished(step=52, unix_seconds=1.0, status="completed"))]
    return batches


async def everything_shown(service: Any) -> dict[str, Any]:
    """What the API says of the run, without clock times and the order of arrival."""
    shown: dict[str, Any] = {"detail": await service.get("/v1/runs/run-1")}
    for key in ("first_seen_unix_seconds", "last_seen_unix_seconds", "last_step_unix_seconds"):
        shown["detail"].pop(key)
    for key in KEYS:
        shown[key] = await service.get("/v1/runs/run-1/curves", line=key)
        shown[f"{key} at 30"] = await service.get("/v1/runs/run-1/matrix", metric=key, step=30)
    shown["loss"] = await service.get("/v1/runs/run-1/curves", line="run.loss")
    kinds = ["started", "verdict", "switched", "command", "finished"]  # incidents open and close in another order
    events = (await service.get("/v1/runs/run-1/events", kind=kinds))["events"]
    # that two processes of a rank live beside each other is seen, or not, by when their messages come
    events = [event for event in events if "a rank of its own" not in event["sentence"]]
    shown["events"] = sorted((event["rank"], event["step"], event["kind"], event["sentence"]) for event in events)
    return shown


def shown_after(player: Any, batches: list[Batch], at_once: int = 1, told: Told = BY_NAME) -> dict[str, Any]:
    return seen_after(player, batches, everything_shown, at_once, told.beside)


@pytest.fixture(scope="module")
def in_order() -> dict[tuple[str, str], Any]:
    return {}


@pytest.mark.full
@pytest.mark.promise("S2")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    repeats=st.integers(0, 20),
    at_once=st.integers(1, 8),
    replayed_from=st.none() | st.integers(1, 6),
)
def test_any_order_repetition_and_interleaving_gives_the_same_state(
    player: Any, in_order: dict[tuple[str, str], Any], seed: int, repeats: int, at_once: int, replayed_from: int | None
) -> None:
    """replayed_from: the names of the process starts deceive; what the dead process did not send itself comes from its
    spool, from this batch on."""
    told = BY_NAME
    if replayed_from is not None:
        told = Told(BEHIND, (500.0, 60.0), lambda batch: batch.sequence >= replayed_from)
    batches = a_run_of_three_ranks_one_restarted(told.names)
    if told.names not in in_order:
        in_order[told.names] = shown_after(player, batches, told=told)
    shuffled = random.Random(seed)
    mixed = batches + shuffled.choices(batches, k=repeats)
    shuffled.shuffle(mixed)
    assert shown_after(player, mixed, at_once, told) == in_order[told.names]
