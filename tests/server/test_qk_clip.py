"""QK-Clip in the service: shown in events, audit trail and metrics, but never ordered or proposed."""

from typing import Any

import numpy as np
import pytest
from sqlalchemy import update
from tests.server.orders import local, order, start
from tests.server.scrapes import series_of
from tests.server.test_webhooks import delivery

from foreshock.contract.wire import Array, Clipped, Policy, Verdict
from foreshock.server.store.schema import commands
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"
BY_ADA = {"who": "ada", "reason": "seen"}


def growing(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "id": "w-1", "step": 20, "state": "raised", "severity": "critical", "layer": 0, "head": 2,
        "cause": "score growth", "signal": "score", "sentence": "Layer 0 head 2 grows.",
    }  # fmt: skip
    return Verdict(**fields | changes)


@pytest.mark.promise("A26")
@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
async def test_qk_clip_is_never_ordered_by_alert_agent_or_person(service: Any, rank: FakeRank, policy: Policy) -> None:
    proposed = local("proposed").model_copy(update={"before": ("qk_clip_never",), "after": ("qk_clip_always",)})
    await service.store(rank, rank.started(policy=policy, qk_clip="never"), growing(), proposed)
    response = await service.client.post("/v1/webhooks/alertmanager", json=delivery(cause="score growth"))
    assert response.json()["results"] == ["observed: a switch does not help against score growth"]
    assert (await order(service, mode="qk_clip_always", heads=None)).status_code == 422
    assert (await service.get(f"{RUN}/commands"))["commands"] == []
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (incident["act"], incident["ask"], incident["order"]) == ("none", "none", None)
    assert 'resume from a checkpoint before step 20 with qk_clip="always"' in incident["to_do"]


async def test_stored_qk_clip_proposal_cannot_be_approved_or_delivered(service: Any, rank: FakeRank) -> None:
    await start(service, rank, policy="approve")
    await service.store(rank, rank.verdict(20), local("proposed"))
    [proposal] = (await service.get(f"{RUN}/commands"))["commands"]
    older_mode = update(commands).values(mode="qk_clip_always", heads=None)
    await service.app.state.store.write(lambda connection: connection.execute(older_mode))
    refused = await service.client.post(f"/v1/commands/{proposal['id']}/approve", json=BY_ADA)
    assert refused.status_code == 409
    assert "is for qk_clip_always, which this service does not know; reject it." in refused.json()["detail"]
    await service.app.state.store.write(lambda connection: connection.execute(update(commands).values(state="pending")))
    assert not (await service.store(rank, rank.sample(30))).commands


async def test_qk_clip_events_are_logged_and_audited(service: Any, rank: FakeRank) -> None:
    clipped = Clipped(
        id="c-1", step=40, on=True, heads=((0, 1), (0, 2)), factors=(0.9, 0.34), times=(2, 7), reason="two passed"
    )
    await service.store(rank, rank.started(qk_clip="on"), clipped)
    [event] = (await service.get("/v1/runs/run-1/events", kind="clipped"))["events"]
    assert event["clipped"]["factors"] == [0.9, 0.34]
    assert event["sentence"] == (
        "Rank 0: QK-Clip scaled layer 0 head 1 and layer 0 head 2, smallest factor 0.34, at most 7 times each. "
        "two passed"
    )
    [row] = [row for row in (await service.get("/v1/audit"))["rows"] if row["action"] == "qk_clip"]
    assert (row["actor"], row["details"]["heads"]) == ("rank 0", [[0, 1], [0, 2]])
    assert (row["details"]["smallest_factor"], row["details"]["times"]) == (0.34, 9)
    assert (await service.get("/v1/runs/run-1"))["qk_clip"] == "on"


async def test_metrics_show_clipped_heads_factors_and_totals(service: Any) -> None:
    for number in range(2):
        rank = FakeRank(rank=number)
        values = {"clip_factor": np.array([1, 1, 0.25, 0.5, 1, 1]), "clipped_steps": np.array([0, 0, 4, 1, 0, 0])}
        arrays = {name: Array.of(array.astype(np.float32)) for name, array in values.items()}
        sample = rank.sample(10).model_copy(update=arrays)
        # all ranks scale alike, so the newest event of the first rank counts
        events = [
            Clipped(id=f"c-{step}", step=step, on=True, total=0 if number else step, reason="x") for step in (5, 9)
        ]
        await service.store(rank, rank.started(qk_clip="on"), sample, *events)
    shown = series_of((await service.client.get("/metrics")).text)
    assert shown["foreshock_run_clips_total", "run=run-1"] == 9.0
    assert shown["foreshock_run_clipped_heads", "run=run-1"] == 2.0
    assert shown["foreshock_layer_clip_factor_ratio", "layer=0", "run=run-1"] == 0.25
    assert shown["foreshock_head_clipped_steps", "head=2", "layer=0", "run=run-1"] == 4.0


async def test_note_is_logged_but_is_not_a_warning(service: Any, rank: FakeRank) -> None:
    note = growing(id="note-20", severity="info", state="cleared", layer=None, head=None, sentence="Note: 143.")
    await service.store(rank, rank.started(), rank.sample(20), note)
    log = (await service.get("/v1/runs/run-1/events", kind="verdict"))["events"]
    assert [event["sentence"] for event in log] == ["Note: 143."]
    detail = await service.get("/v1/runs/run-1")
    assert (detail["warnings"], detail["active_warnings"], detail["severity"]) == ([], 0, None)
    assert "foreshock_warning_raised_total{" not in (await service.client.get("/metrics")).text
