"""The same batches leave the same rows whatever their order, repeats and interleaving (server/recorder.py)."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.replaying import seen_after

from foreshock.contract.wire import AgentHealth, Batch, Finished
from foreshock.server.testing import FakeRank

KEYS = ("head.score_offset", "head.tied_rows_bf16", "head.score_max", "head.delta_bias", "head.mode", "head.risk")


def a_run_of_three_ranks_one_restarted() -> list[Batch]:
    """Ranks 0 and 1 hold the same heads, rank 2 others; rank 1 dies at step 40 and goes on from step 20."""
    ranks = [FakeRank(rank=0), FakeRank(rank=1, boot="b1"), FakeRank(rank=2, heads=(3, 4))]
    batches = [rank.batch(rank.started()) for rank in ranks]
    for step in (10, 20, 30, 40):
        batches += [rank.batch(rank.sample(step, since=step - 10)) for rank in ranks]
    again = FakeRank(rank=1, boot="b2")
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


@pytest.fixture(scope="module")
def in_order() -> dict[str, Any]:
    return {}


@pytest.mark.full
@pytest.mark.promise("S2")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), repeats=st.integers(0, 20), at_once=st.integers(1, 8))
def test_any_order_repetition_and_interleaving_gives_the_same_state(
    player: Any, in_order: dict[str, Any], seed: int, repeats: int, at_once: int
) -> None:
    batches, shuffled = a_run_of_three_ranks_one_restarted(), random.Random(seed)
    if not in_order:
        in_order.update(seen_after(player, batches, everything_shown))
    mixed = batches + shuffled.choices(batches, k=repeats)
    shuffled.shuffle(mixed)
    assert seen_after(player, mixed, everything_shown, at_once) == in_order
