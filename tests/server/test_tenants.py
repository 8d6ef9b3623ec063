"""A token with a run prefix neither reads nor changes other runs, at any route."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.test_webhooks import delivery

from foreshock.contract.wire import Event, Finished
from foreshock.server.http.exposition import Exposer
from foreshock.server.settings import ALL_SCOPES, Token
from foreshock.server.store.schema import runs
from foreshock.server.testing import FakeRank, LiveService

EVE, ALL = "eves-secret-of-sixteen-or-more", "the-secret-that-reaches-all-runs"
TOKENS = (Token.of("eve", EVE, ALL_SCOPES, run_prefix="team-e/"), Token.of("all", ALL, ALL_SCOPES))
ORDER = {"who": "ann", "mode": "plain", "reason": "it drifts"}
OWN, OTHER = "team-e/run", "team-o/team-e/run"
BODIES: dict[str, Any] = {
    "/v1/runs/{run}/acknowledge": {"who": "eve", "incident": "rounding-1", "reason": "mine now"},
    "/v1/runs/{run}/commands": {"who": "eve", "mode": "plain", "reason": "because"},
    "/v1/runs/{run}": {"notes": "seen"},
}


async def ask(service: Any, secret: str, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {secret}", **more.pop("headers", {})}
    response: httpx.Response = await service.client.request(method, path, headers=headers, **more)
    return response


async def two_tenants(service: Any) -> str:
    """Create a warned run of each tenant and an open order in the other run; return the id of the order."""
    for name in (OWN, OTHER):
        rank = FakeRank(run=name)
        warned = [rank.verdict(1, head=head, name=f"warn-{head}") for head in rank.layers[0].heads]
        sent = await service.post(rank.batch(rank.started(), rank.sample(1), *warned), secret=ALL)
        assert sent.status_code == 200
    order = await ask(service, ALL, "POST", f"/v1/runs/{OTHER}/commands", json=ORDER)
    assert order.status_code == 201, order.text
    return str(order.json()["id"])


async def responses_about(service: Any, run: str) -> list[Any]:
    """All responses about a run."""
    paths = ("", "/events", "/commands", "/incidents")
    return [(await ask(service, ALL, "GET", f"/v1/runs/{run}{path}")).json() for path in paths]


@pytest.mark.promise("S7")
@pytest.mark.promise("S21")
@pytest.mark.settings(tokens=TOKENS)
async def test_tenant_cannot_access_runs_and_orders_of_others_at_any_route(service: Any) -> None:
    order = await two_tenants(service)
    before = await responses_about(service, OTHER)
    checked = 0
    for path, methods in service.app.openapi()["paths"].items():
        for method in methods:
            if re.search(r"\{run\}|\{command\}", path):
                there = path.replace("{run}", OTHER).replace("{command}", order).replace("{how}", "reject")
                body = BODIES.get(path, {"who": "eve", "reason": "because"}) if method in ("post", "patch") else None
                response = await ask(service, EVE, method.upper(), there, json=body)
                expected = 404 if "{command}" in path else 403
                assert response.status_code == expected, (method, path, response.status_code, response.text)
                if expected == 404:  # the response must not even reveal that the order exists
                    unknown = await ask(service, EVE, method.upper(), there.replace(order, "none"), json=body)
                    assert (unknown.status_code, unknown.text) == (404, response.text.replace(order, "none"))
                checked += 1
    assert checked >= 15
    assert await responses_about(service, OTHER) == before


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS, metrics_seconds=600.0)
async def test_cached_metrics_of_another_caller_are_not_shown_to_tenant(
    service: Any,
) -> None:
    await two_tenants(service)
    exposer: Exposer = service.app.state.exposer
    whole = (await exposer.expose("", ""))[0].decode()
    assert f'run="{OTHER}"' in whole
    for _ in range(2):
        shown = (await ask(service, EVE, "GET", "/metrics")).text
        assert f'run="{OWN}"' in shown
        assert "team-o" not in shown
    assert f'run="{OTHER}"' in (await ask(service, ALL, "GET", "/metrics")).text


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS)
async def test_idempotency_key_of_another_caller_reveals_nothing_to_tenant(service: Any) -> None:
    await two_tenants(service)
    key = {"idempotency-key": "switch-it-now"}
    other = await ask(service, ALL, "POST", f"/v1/runs/{OTHER}/commands", json=ORDER, headers=key)
    own = await ask(service, EVE, "POST", f"/v1/runs/{OWN}/commands", json=ORDER, headers=key)
    assert other.status_code == 201
    assert OTHER not in own.text
    assert other.json()["id"] not in own.text


@pytest.mark.promise("S21")
def test_responses_to_tenant_do_not_depend_on_events_of_other_tenants(run_scenario: Any) -> None:
    async def scenario(service: Any, between: int) -> list[Any]:
        own, other = FakeRank(run=OWN), FakeRank(run=OTHER)

        async def send(rank: FakeRank, *events: Event) -> None:
            assert (await service.post(rank.batch(*events), secret=ALL)).status_code == 200

        await send(own, own.started())
        for first in range(0, between, 250):
            await send(other, *(other.verdict(n + 1, name=f"warn-{n}") for n in range(first, first + 250)))
        await send(own, own.verdict(1))
        command = await ask(service, EVE, "POST", f"/v1/runs/{OWN}/commands", json=ORDER)
        page = await ask(service, EVE, "GET", f"/v1/runs/{OWN}/events", params={"limit": 2})
        older = {"limit": 2, "cursor": page.json()["next_cursor"]}
        rest = await ask(service, EVE, "GET", f"/v1/runs/{OWN}/events", params=older)
        ids = [event["id"] for event in [*page.json()["events"], *rest.json()["events"]]]
        assert ids == [4, 3, 2, 1]
        of_run = ("", "/commands", "/incidents", "/matrix?metric=head.score_max", "/curves?line=run.loss")
        paths = (*(f"/v1/runs/{OWN}{path}" for path in of_run), "/v1/runs", "/metrics")
        responses = [command, page, rest, *[await ask(service, EVE, "GET", path) for path in paths]]
        times = re.compile(r'("\w*unix_seconds":|"next_cursor":"0x|_seconds\{[^}]*\} )[0-9a-f.xp+-]+')
        return [times.sub(r"\1T", response.text.replace(command.json()["id"], "ID")) for response in responses]

    responses_by_count: dict[int, list[Any]] = {}
    for others in (0, 1000):

        async def record(service: Any, others: int = others) -> None:
            responses_by_count[others] = await scenario(service, others)

        run_scenario(record, f"others-{others}", tokens=TOKENS)
    assert responses_by_count[1000] == responses_by_count[0]


@pytest.mark.full
@pytest.mark.promise("S7")
@pytest.mark.parametrize(
    ("headers", "replayed"),
    [({}, False), ({"last-event-id": f"1 {OWN}"}, True), ({"last-event-id": f"1 {OTHER}"}, False)],
    ids=["live", "reconnected", "guessed id"],
)
def test_stream_sends_tenant_only_its_own_runs(headers: dict[str, str], replayed: bool, tmp_path: Path) -> None:
    tokens = [token.model_dump(mode="json") for token in TOKENS]
    with LiveService(tmp_path, {"FORESHOCK_TOKENS": json.dumps(tokens)}) as service:

        def send(rank: FakeRank, *events: Event) -> None:
            service.post(rank.batch(*events), ALL)

        own, other = FakeRank(run=OWN), FakeRank(run=OTHER)
        for rank in (other, own):
            send(rank, rank.started(), rank.verdict(1))
        with service.client(EVE, timeout=60.0) as eve, eve.stream("GET", "/v1/stream", headers=headers) as stream:
            lines = stream.iter_lines()
            received = [next(lines)]  # the stream is open
            for rank in (other, own):
                send(rank, rank.verdict(2, name="warn-later"), rank.sample(2))
                send(rank, Finished(step=3, unix_seconds=1.0, status="completed"))
            while not received[-1].startswith("event: finished"):
                received.append(next(lines))
            received.append(next(lines))
        assert (OWN in "".join(received), OTHER in "".join(received)) == (True, False)
        assert ('"id":"warn-1"' in "".join(received)) == replayed
        ids = [line for line in received if line.startswith("id: ")]
        assert ids == [f"id: {number} {OWN}" for number, _ in enumerate(ids, 2 if replayed else 4)]


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS)
async def test_alerts_of_tenant_affect_only_its_runs_and_not_the_global_watchdog(
    service: Any,
) -> None:
    await two_tenants(service)
    before = await responses_about(service, OTHER)
    for body, result in (
        (delivery(run=OTHER), "refused: there is no run with this name"),
        (
            delivery(alertname="ForeshockWatchdog"),
            "ignored: the watchdog needs a token with access to every run",
        ),
    ):
        response = await ask(service, EVE, "POST", "/v1/webhooks/alertmanager", json=body)
        assert (response.status_code, response.json()["results"]) == (200, [result])
    assert await responses_about(service, OTHER) == before
    series = "foreshock_service_watchdog_timestamp_seconds "
    assert series not in (await ask(service, ALL, "GET", "/metrics")).text
    delivered = await ask(
        service, ALL, "POST", "/v1/webhooks/alertmanager", json=delivery(alertname="ForeshockWatchdog")
    )
    assert delivered.json()["results"] == ["watchdog"]
    assert series in (await ask(service, ALL, "GET", "/metrics")).text
    switched = await ask(service, EVE, "POST", "/v1/webhooks/alertmanager", json=delivery(run=OWN))
    assert switched.json()["results"][0].split(":")[0] == "ordered"


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS)
async def test_tenant_admin_cannot_read_audit_trail_or_runs_of_others(service: Any) -> None:
    await two_tenants(service)
    for path in ("/v1/audit", "/v1/audit/export"):
        assert (await ask(service, EVE, "GET", path)).status_code == 403
        assert "team-o" in (await ask(service, ALL, "GET", path)).text
    listed = (await ask(service, EVE, "GET", "/v1/runs")).text
    found = (await ask(service, EVE, "GET", "/v1/runs?search=team-o")).json()
    assert OWN in listed
    assert OTHER not in listed
    assert found["runs"] == []


@pytest.mark.promise("S21")
@pytest.mark.settings(tokens=TOKENS)
async def test_run_list_cursors_of_tenant_contain_only_its_own_run_names(service: Any) -> None:
    """All runs have the same time of last contact, and every page of the list has one run."""
    for name in ("team-o/1", "team-e/a", "team-o/2", "team-e/b.b", "team-o/3", "team-e/c"):
        assert (await service.post(FakeRank(run=name).batch(FakeRank().sample(1)), secret=ALL)).status_code == 200
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(runs.update().values(last_seen=1.8e9))
    cursor: str | None = None
    seen: list[str] = []
    cursors: list[str] = []
    while cursor is not None or not seen:
        query: dict[str, Any] = {"limit": 1} if cursor is None else {"limit": 1, "cursor": cursor}
        page = (await ask(service, EVE, "GET", "/v1/runs", params=query)).json()
        seen += [run["run"] for run in page["runs"]]
        cursor = page["next_cursor"]
        cursors += [cursor] if cursor else []
    assert seen == ["team-e/c", "team-e/b.b", "team-e/a"]
    assert cursors == [f"{(1.8e9).hex()}-{name}" for name in seen[:2]]
