"""/metrics and the page show what a person did at once, of a run that sends nothing more as well."""

from typing import Any

import pytest
from tests.server.orders import local

from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"
WHO = {"who": "ada", "reason": "seen"}


async def shown(service: Any) -> dict[str, str]:
    """The lines about the run's incident, without their values' labels that do not change."""
    lines = (await service.client.get("/metrics")).text.splitlines()
    return {
        name: next((line for line in lines if line.startswith(f"foreshock_{name}{{")), "")
        for name in ("incident_active", "incident_words", "incident_acknowledged")
    }


@pytest.mark.parametrize("ended", [False, True])
async def test_an_acknowledgement_is_on_the_next_scrape(service: Any, ended: bool) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"), rank.sample(1), rank.verdict(1))
    if ended:
        await service.store(rank, Finished(step=1, unix_seconds=2.0, status="completed"))
    assert (await shown(service))["incident_acknowledged"].endswith(" 0.0")
    await service.client.post(f"{RUN}/acknowledge", json=WHO | {"incident": "rounding"})
    assert (await shown(service))["incident_acknowledged"].endswith(" 1.0")


async def test_an_order_its_approval_and_its_rejection_are_on_the_next_scrape(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"), rank.sample(1), rank.verdict(1), local("proposed"))
    waits = (await shown(service))["incident_words"]
    assert "waits for your approval" in waits
    [command] = (await service.get(f"{RUN}/commands"))["commands"]
    await service.client.post(f"/v1/commands/{command['id']}/approve", json=WHO)
    assert "Approved by ada" in (await shown(service))["incident_words"]
    await service.client.post(f"/v1/commands/{command['id']}/cancel", json=WHO)
    assert "stopped" in (await shown(service))["incident_words"]
    order = {**WHO, "heads": [[0, 2]], "mode": "exact_delta"}
    await service.client.post(f"{RUN}/commands", json=order)
    assert "Ordered by ada" in (await shown(service))["incident_words"]


async def test_the_modes_of_a_run_are_those_that_its_incident_speaks_of(service: Any) -> None:
    """The tile said that no head is switched while the card said that the head is switched."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy="observe"), rank.sample(1), rank.verdict(1))
    order = {**WHO, "heads": [[0, 2]], "mode": "exact_delta"}
    await service.client.post(f"{RUN}/commands", json=order)
    [sent] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(sent, 3))
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert incident["state"] == "switched"
    [layer] = [one for one in (await service.get(RUN))["layers"] if one["layer"] == 0]
    assert dict(zip(layer["heads"], layer["modes"], strict=True))[2] == "exact_delta"
