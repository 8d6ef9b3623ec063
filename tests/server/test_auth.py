import re
from collections import defaultdict
from typing import Any

import pytest

from foreshock.server import endpoint
from foreshock.server.auth import Needs
from foreshock.server.http import routes, stream, webhooks
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank

SECRET, SENDER, READER = "a-secret-of-sixteen-or-more", "the-sender-secret-0001", "the-reader-secret-0001"
OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/v1/session"),
    ("POST", "/v1/login"),
    ("GET", "/"),
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def paths_of(app: Any) -> list[str]:
    paths = [re.sub(r"\{[^}]+\}", "x", path) for path in app.openapi()["paths"]]
    return [*paths, "/openapi.json", "/", "/v1", "/nothing/here", "/v1/runs/%2e%2e/x", "/v1/../healthz/x"]


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET)
async def test_every_path_is_closed_to_every_method_without_a_token(service: Any) -> None:
    paths = paths_of(service.app)
    assert len(paths) > 15
    for path in paths:
        for method in METHODS:
            answer = await service.client.request(method, path)
            if (method, path) in OPEN or (method, path) in {("HEAD", p) for m, p in OPEN if m == "GET"}:
                assert answer.status_code != 401, (method, path)
            else:
                assert answer.status_code == 401, (method, path, answer.status_code)
                assert answer.headers["content-type"] == "application/problem+json" or method == "HEAD"


@pytest.mark.promise("S7")
def test_every_route_needs_the_scope_of_what_it_does() -> None:
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for module in (endpoint, routes, stream, webhooks):
        for route in module.router.routes:
            parts = route.dependant.dependencies
            calls = [d.call for d in [*parts, *(s for p in parts for s in p.dependencies)]]
            scopes: set[str] = {call.scope for call in calls if isinstance(call, Needs)}
            [scope] = scopes or {"none"}
            found[scope] |= {(method, route.path) for method in route.methods}
    assert found.pop("act") == {
        ("PATCH", "/v1/runs/{run:path}"),
        ("POST", "/v1/runs/{run:path}/acknowledge"),
        ("POST", "/v1/runs/{run:path}/commands"),
        *(("POST", f"/v1/commands/{{command}}/{word}") for word in ("undo", "{how}")),
        ("POST", "/v1/webhooks/alertmanager"),
    }
    assert found.pop("delete") == {("DELETE", "/v1/runs/{run:path}")}
    assert found.pop("ingest") == {("POST", "/v1/batches")}
    assert found.pop("none") == {
        *((method, path) for method in ("GET", "HEAD") for path in ("/healthz", "/readyz")),
        ("GET", "/v1/session"),
        ("POST", "/v1/login"),
        ("POST", "/v1/logout"),
    }
    assert {method for method, _ in found.pop("read")} == {"GET"}
    assert not found


@pytest.mark.promise("S7")
@pytest.mark.settings(
    tokens=(Token.of("sender", SENDER, ("ingest",), run_prefix="team-a/"), Token.of("reader", READER, ("read",)))
)
async def test_a_token_reaches_its_scopes_and_its_runs_and_nothing_else(service: Any) -> None:
    for run, secret, status in (
        ("team-a/1", SENDER, 200),
        ("team-b/1", SENDER, 403),
        ("x/team-a/1", SENDER, 403),
        ("team-a/1", READER, 403),
        ("team-a/1", "the-reader-secret-0002", 401),
    ):
        rank = FakeRank(run=run)
        answer = await service.post(rank.batch(rank.started(), rank.sample(1)), secret=secret)
        assert answer.status_code == status, (run, secret)
    assert (await service.client.get("/v1/runs/team-a/1", headers=bearer(READER))).status_code == 200
    assert (await service.client.get("/v1/runs", headers=bearer(SENDER))).status_code == 403
    order = {"who": "a", "reason": "b", "mode": "plain"}
    refused = await service.client.post("/v1/runs/team-a/1/commands", json=order, headers=bearer(READER))
    assert refused.status_code == 403


@pytest.mark.settings(token=SECRET)
async def test_the_pages_session_reads_and_changes_things_only_with_its_csrf_token(service: Any) -> None:
    client = service.client
    assert (await client.get("/v1/session")).json()["login_needed"]
    assert (await client.post("/v1/login", json={"token": "wrong"})).status_code == 401
    login = await client.post("/v1/login", json={"token": SECRET})
    assert login.status_code == 200
    cookie = login.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert SECRET not in cookie
    assert (await client.get("/v1/runs")).status_code == 200
    order = {"who": "a", "reason": "b", "mode": "plain"}
    assert (await client.post("/v1/runs/x/commands", json=order)).status_code == 403
    csrf = {"x-csrf-token": login.json()["csrf_token"]}
    assert (await client.post("/v1/runs/x/commands", json=order, headers=csrf)).status_code == 404
    cookie = client.cookies["foreshock_session"]
    forged = f"foreshock_session={cookie[:-1]}{'1' if cookie.endswith('0') else '0'}"
    client.cookies.clear()
    for bad in (forged, "foreshock_session=x", "foreshock_session=.", "foreshock_session=e30.00"):
        assert (await client.get("/v1/runs", headers={"cookie": bad})).status_code == 401


@pytest.mark.promise("S7")
@pytest.mark.parametrize(
    ("status", "header", "values"),
    [
        (403, "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil:8765", "[::2]"]),
        (200, "host", ["localhost:1", "127.0.0.1", "[::1]:8765", "LOCALHOST"]),
        (403, "origin", ["https://evil.example", "null", "http://["]),
        (200, "origin", ["http://127.0.0.1:8765", "http://localhost:3000"]),
    ],
)
async def test_without_a_token_only_loopback_names_and_origins_are_answered(
    service: Any, status: int, header: str, values: list[str]
) -> None:
    for value in values:
        answer = await service.client.get("/v1/runs", headers={header: value})
        assert answer.status_code == status, value
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")


@pytest.mark.promise("S18")
@pytest.mark.parametrize("name", ["foreshock.example.org", "Foreshock.Example.org:443"])
def test_probes_of_the_own_machine_are_answered_beside_the_names_of_the_proxy(play: Any, name: str) -> None:
    async def story(service: Any) -> None:
        async def asked(path: str, host: str, **more: str) -> int:
            headers = {"host": host, "authorization": f"Bearer {SECRET}", **more}
            return int((await service.client.get(path, headers=headers)).status_code)

        for path in ("/healthz", "/metrics"):
            for host in ("127.0.0.1:8765", "localhost", "[::1]:8765", "foreshock.example.org"):
                assert await asked(path, host) == 200
            assert await asked(path, "evil.example") == 403
        assert await asked("/metrics", "127.0.0.1", origin="https://foreshock.example.org") == 403
        assert await asked("/metrics", "foreshock.example.org", origin="http://127.0.0.1") == 403

    play(story, token=SECRET, allowed_hosts=(name,))


@pytest.mark.promise("S21")
async def test_no_answer_of_the_api_is_kept_by_a_cache(service: Any) -> None:
    for path in ("/v1/runs", "/v1/session", "/metrics", "/v1/runs/none", "/nowhere"):
        assert (await service.client.get(path)).headers["cache-control"] == "no-store", path


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET)
async def test_one_credential_counts_and_a_wrong_one_is_not_replaced_by_another(service: Any) -> None:
    answer = await service.client.post("/v1/login", json={"token": SECRET})
    cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    service.client.cookies.clear()
    assert (await service.client.get("/v1/runs", headers=cookie)).status_code == 200
    assert (await service.client.get("/v1/runs", headers=cookie | bearer("a-wrong-one"))).status_code == 401
    right, wrong = (("authorization", f"Bearer {secret}") for secret in (SECRET, "a-wrong-one"))
    basic = ("authorization", "Basic x")
    for two in ([right, wrong], [wrong, right], [right, right], [*cookie.items(), basic]):
        assert (await service.client.get("/v1/runs", headers=two)).status_code == 401


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET)
async def test_no_answer_leads_to_a_host_of_the_callers_choice(service: Any) -> None:
    headers = bearer(SECRET) | {"host": "evil.example"}
    for path in paths_of(service.app):
        for method in ("GET", "POST"):
            answer = await service.client.request(method, f"{path.rstrip('/')}/", headers=headers, json={})
            assert "location" not in answer.headers, (method, path)
