"""Tokens, sessions and the login of the page: required scopes and the end of sessions."""

import re
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest
from sqlalchemy import text

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
async def test_every_path_and_method_requires_a_token(service: Any) -> None:
    paths = paths_of(service.app)
    assert len(paths) > 15
    for path in paths:
        for method in METHODS:
            response = await service.client.request(method, path)
            if (method, path) in OPEN or (method, path) in {("HEAD", p) for m, p in OPEN if m == "GET"}:
                assert response.status_code != 401, (method, path)
            else:
                assert response.status_code == 401, (method, path, response.status_code)
                assert response.headers["content-type"] == "application/problem+json" or method == "HEAD"


@pytest.mark.promise("S7")
def test_every_route_requires_the_expected_scope() -> None:
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
async def test_token_is_limited_to_its_scopes_and_run_prefix(service: Any) -> None:
    for run, secret, status in (
        ("team-a/1", SENDER, 200),
        ("team-b/1", SENDER, 403),
        ("x/team-a/1", SENDER, 403),
        ("team-a/1", READER, 403),
        ("team-a/1", "the-reader-secret-0002", 401),
    ):
        rank = FakeRank(run=run)
        response = await service.post(rank.batch(rank.started(), rank.sample(1)), secret=secret)
        assert response.status_code == status, (run, secret)
    assert (await service.client.get("/v1/runs/team-a/1", headers=bearer(READER))).status_code == 200
    assert (await service.client.get("/v1/runs", headers=bearer(SENDER))).status_code == 403
    order = {"who": "a", "reason": "b", "mode": "plain"}
    refused = await service.client.post("/v1/runs/team-a/1/commands", json=order, headers=bearer(READER))
    assert refused.status_code == 403


@pytest.mark.settings(token=SECRET)
async def test_page_session_requires_csrf_token_for_writes(service: Any) -> None:
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
async def test_only_loopback_hosts_and_origins_are_accepted_without_token(
    service: Any, status: int, header: str, values: list[str]
) -> None:
    for value in values:
        response = await service.client.get("/v1/runs", headers={header: value})
        assert response.status_code == status, value
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.headers["content-security-policy"].startswith("default-src 'self'")


@pytest.mark.promise("S18")
@pytest.mark.parametrize("name", ["foreshock.example.org", "Foreshock.Example.org:443"])
def test_loopback_probes_are_accepted_when_allowed_hosts_are_set(run_scenario: Any, name: str) -> None:
    async def scenario(service: Any) -> None:
        async def status_of(path: str, host: str, **others: str) -> int:
            headers = {"host": host, "authorization": f"Bearer {SECRET}", **others}
            return int((await service.client.get(path, headers=headers)).status_code)

        for path in ("/healthz", "/metrics"):
            for host in ("127.0.0.1:8765", "localhost", "[::1]:8765", "foreshock.example.org"):
                assert await status_of(path, host) == 200
            assert await status_of(path, "evil.example") == 403
        assert await status_of("/metrics", "127.0.0.1", origin="https://foreshock.example.org") == 403
        assert await status_of("/metrics", "foreshock.example.org", origin="http://127.0.0.1") == 403

    run_scenario(scenario, token=SECRET, allowed_hosts=(name,))


@pytest.mark.promise("S21")
async def test_api_responses_are_never_cached(service: Any) -> None:
    for path in ("/v1/runs", "/v1/session", "/metrics", "/v1/runs/none", "/nowhere"):
        assert (await service.client.get(path)).headers["cache-control"] == "no-store", path


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET)
async def test_conflicting_or_repeated_credentials_are_rejected(service: Any) -> None:
    response = await service.client.post("/v1/login", json={"token": SECRET})
    cookie = {"cookie": response.headers["set-cookie"].partition(";")[0]}
    service.client.cookies.clear()
    assert (await service.client.get("/v1/runs", headers=cookie)).status_code == 200
    assert (await service.client.get("/v1/runs", headers=cookie | bearer("a-wrong-one"))).status_code == 401
    right, wrong = (("authorization", f"Bearer {secret}") for secret in (SECRET, "a-wrong-one"))
    basic = ("authorization", "Basic x")
    for two in ([right, wrong], [wrong, right], [right, right], [*cookie.items(), basic]):
        assert (await service.client.get("/v1/runs", headers=two)).status_code == 401


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET)
async def test_responses_never_redirect_to_forged_host(service: Any) -> None:
    headers = bearer(SECRET) | {"host": "evil.example"}
    for path in paths_of(service.app):
        for method in ("GET", "POST"):
            response = await service.client.request(method, f"{path.rstrip('/')}/", headers=headers, json={})
            assert "location" not in response.headers, (method, path)


SECRETS = {"ann": "the-secret-of-ann-0001", "bob": "the-secret-of-bob-0001"}
TOKENS = (
    Token.of("ann", SECRETS["ann"], ("admin",)),
    Token.of("bob", SECRETS["bob"], ("read",)),
)


async def logged_in(service: Any, name: str = "ann", **headers: str) -> dict[str, str]:
    """Log in and return headers with the session cookie and its CSRF token."""
    service.client.cookies.clear()
    response = await service.client.post("/v1/login", json={"token": SECRETS[name]}, headers=headers)
    assert response.status_code == 200, response.text
    cookie = response.cookies.get("foreshock_session") or response.headers["set-cookie"].split(";")[0].partition("=")[2]
    service.client.cookies.clear()
    return {"cookie": f"foreshock_session={cookie}", "x-csrf-token": response.json()["csrf_token"]}


async def runs_status(service: Any, session: dict[str, str]) -> int:
    response: httpx.Response = await service.client.get("/v1/runs", headers=session)
    return response.status_code


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS)
async def test_logout_ends_one_or_all_sessions_and_stored_rows_are_not_credentials(
    service: Any,
) -> None:
    one, two, three, other = [await logged_in(service, name) for name in ("ann", "ann", "ann", "bob")]
    with service.app.state.store.reader.engine.begin() as connection:
        rows = connection.execute(text("SELECT * FROM sessions")).all()
    assert len(rows) == 4
    for value in (*(value for row in rows for value in row), *(token.sha256 for token in TOKENS)):
        assert await runs_status(service, {"cookie": f"foreshock_session={value}"}) == 401
    assert (await service.client.post("/v1/logout", headers=one)).status_code == 200
    assert [await runs_status(service, session) for session in (one, two, three, other)] == [401, 200, 200, 200]
    bearer = {"authorization": f"Bearer {SECRETS['ann']}"}
    assert (await service.client.post("/v1/logout?everywhere=true", headers=bearer)).status_code == 200
    assert [await runs_status(service, session) for session in (two, three, other)] == [401, 401, 200]


@pytest.mark.promise("S7")
@pytest.mark.parametrize(
    ("settings", "scheme", "secure"),
    [
        ({}, "https", False),  # any client can send this header
        ({"trusted_proxies": ("10.0.0.0/8",)}, "https", False),
        ({"trusted_proxies": ("127.0.0.0/8",)}, "https", True),
        ({"trusted_proxies": ("127.0.0.1",)}, "http", False),
        ({"public_url": "https://foreshock.example.org"}, "http", True),
    ],
)
def test_session_cookie_is_secure_behind_tls_proxy(
    run_scenario: Any, settings: dict[str, Any], scheme: str, secure: bool
) -> None:
    async def scenario(service: Any) -> None:
        headers = {"x-forwarded-proto": scheme, "x-forwarded-for": "203.0.113.9"}
        response = await service.client.post("/v1/login", json={"token": SECRETS["ann"]}, headers=headers)
        assert ("Secure" in response.headers["set-cookie"]) == secure

    run_scenario(scenario, tokens=TOKENS, **settings)


@pytest.mark.settings(tokens=TOKENS, session_seconds=0.01)
async def test_expired_session_is_rejected_and_deleted(service: Any) -> None:
    for _ in range(3):
        session = await logged_in(service)
        time.sleep(0.02)
        assert await runs_status(service, session) == 401
    with service.app.state.store.reader.engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM sessions")).scalar() == 1


@pytest.mark.promise("S7")
def test_removing_a_token_at_restart_ends_only_its_sessions(run_scenario: Any) -> None:
    old, new = "the-old-secret-000001", "the-new-secret-000001"
    first, second = (Token.of(name, secret, ("read",)) for name, secret in (("one", old), ("two", new)))
    cookies: list[dict[str, str]] = []

    async def statuses(service: Any) -> list[int]:
        secrets = [{"authorization": f"Bearer {secret}"} for secret in (old, new)]
        return [await runs_status(service, headers) for headers in (*secrets, *cookies)]

    async def with_both_tokens(service: Any) -> None:
        for secret in (old, new):
            response = await service.client.post("/v1/login", json={"token": secret})
            cookies.append({"cookie": f"foreshock_session={response.cookies['foreshock_session']}"})
            service.client.cookies.clear()
        assert await statuses(service) == [200, 200, 200, 200]

    async def with_new_token_only(service: Any) -> None:
        assert await statuses(service) == [401, 200, 401, 200]

    run_scenario(with_both_tokens, tokens=(first, second))
    run_scenario(with_new_token_only, tokens=(second,))
