"""The condition and severity of a run are the same on the page, in the API and on the command line."""

import math
from typing import Any

import pytest
from tests.cli.typed import foreshock

from foreshock.contract.wire import Finished, Severity
from foreshock.server.models import IncidentChange
from foreshock.server.runs.current import condition_of
from foreshock.server.testing import FakeRank, LiveService

NOW = 10_000.0

pytestmark = pytest.mark.promise("S23")


def run(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "status": "active",
        "last_seen_unix_seconds": NOW - 10,
        "last_step_unix_seconds": NOW - 10,
        "hung_after_seconds": 300.0,
        "loss": 2.5,
        "incidents": [],
    }
    return condition_of({**fields, **changes}, NOW)


def incident(severity: Severity) -> IncidentChange:
    return IncidentChange.model_construct(id="rounding", cause="rounding", state="open", severity=severity)


@pytest.mark.parametrize(
    ("changes", "condition", "severity"),
    [
        ({}, "active", None),
        ({"last_seen_unix_seconds": NOW - 301}, "silent", "warning"),
        ({"last_step_unix_seconds": NOW - 301}, "hung", "warning"),
        ({"incidents": [incident("warning"), incident("critical")]}, "active", "critical"),
        ({"loss": math.nan}, "active", "critical"),
        ({"status": "completed", "last_seen_unix_seconds": 0.0}, "completed", None),
        ({"status": "failed", "incidents": [incident("critical")]}, "failed", "critical"),
        ({"last_step_unix_seconds": None}, "active", None),
    ],
)
def test_condition_and_severity_follow_status_silence_loss_and_incidents(
    changes: dict[str, Any], condition: str, severity: str | None
) -> None:
    found = run(**changes)
    assert (found["condition"], found["severity"]) == (condition, severity)


def test_list_detail_and_cli_agree_on_run_with_nonfinite_loss(
    live_service: LiveService,
) -> None:
    healthy, failing, ended = (FakeRank(run=name) for name in ("healthy", "failing", "ended"))
    for rank, loss in ((failing, math.nan), (healthy, 3.0), (ended, 3.0)):
        live_service.post(rank.batch(rank.started(), rank.sample(1, loss=loss)))
    live_service.post(ended.batch(Finished(step=1, unix_seconds=1.0, status="completed")))
    with live_service.client() as client:
        listed = {one["run"]: one for one in client.get("/v1/runs").json()["runs"]}
        one = client.get("/v1/runs/failing").json()
    assert [listed["failing"][key] for key in ("condition", "severity")] == ["active", "critical"]
    assert {key: one[key] for key in ("condition", "severity", "urgency")} == {
        key: listed["failing"][key] for key in ("condition", "severity", "urgency")
    }
    rows = foreshock("runs", "--url", live_service.url).output.splitlines()
    assert [line.split()[0] for line in rows[1:4]] == ["failing", "healthy", "ended"]
    assert rows[1].split()[1:3] == ["active", "critical"]
