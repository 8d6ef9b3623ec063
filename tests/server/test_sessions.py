import time
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from foreshock.server.settings import Token

SECRETS = {"ann": "the-secret-of-ann-0001", "bob": "the-secret-of-bob-0001"}
TOKENS = (
    Token.of("ann", SECRETS["ann"], ("admin",)),
    Token.of("bob", SECRETS["bob"], ("read",)),
)


async def logged_in(service: Any, name: str = "ann", **headers: str) -> dict[str, str]:
    """The cookie and the CSRF token of a new session, as headers."""
    service.client.cookies.clear()
    answer = await service.client.post("/v1/login", json={"token": SECRETS[name]}, headers=headers)
    assert answer.status_code == 200, answer.text
    cookie = answer.cookies.get("foreshock_session") or answer.headers["set-cookie"].split(";")[0].partition("=")[2]
    service.client.cookies.clear()
    return {"cookie": f"foreshock_session={cookie}", "x-csrf-token": answer.json()["csrf_token"]}


async def seen(service: Any, session: dict[str, str]) -> int:
    answer: httpx.Response = await service.client.get("/v1/runs", headers=session)
    return answer.status_code


@pytest.mark.promise("S7")
@pytest.mark.settings(tokens=TOKENS)
async def test_a_session_ends_at_logout_and_with_all_others_of_its_token_and_is_in_no_word_of_the_store(
    service: Any,
) -> None:
    one, two, three, other = [await logged_in(service, name) for name in ("ann", "ann", "ann", "bob")]
    with service.app.state.store.reader.engine.begin() as connection:
        rows = connection.execute(text("SELECT * FROM sessions")).all()
    assert len(rows) == 4
    for value in (*(value for row in rows for value in row), *(token.sha256 for token in TOKENS)):
        assert await seen(service, {"cookie": f"foreshock_session={value}"}) == 401
    assert (await service.client.post("/v1/logout", headers=one)).status_code == 200
    assert [await seen(service, session) for session in (one, two, three, other)] == [401, 200, 200, 200]
    bearer = {"authorization": f"Bearer {SECRETS['ann']}"}
    assert (await service.client.post("/v1/logout?everywhere=true", headers=bearer)).status_code == 200
    assert [await seen(service, session) for session in (two, three, other)] == [401, 401, 200]


@pytest.mark.promise("S7")
@pytest.mark.parametrize(
    ("settings", "scheme", "secure"),
    [
        ({}, "https", False),  # anybody can write this header
        ({"trusted_proxies": ("10.0.0.0/8",)}, "https", False),
        ({"trusted_proxies": ("127.0.0.0/8",)}, "https", True),
        ({"trusted_proxies": ("127.0.0.1",)}, "http", False),
        ({"public_url": "https://foreshock.example.org"}, "http", True),
    ],
)
def test_the_cookie_is_secure_behind_a_proxy_that_speaks_tls(
    play: Any, settings: dict[str, Any], scheme: str, secure: bool
) -> None:
    async def story(service: Any) -> None:
        headers = {"x-forwarded-proto": scheme, "x-forwarded-for": "203.0.113.9"}
        answer = await service.client.post("/v1/login", json={"token": SECRETS["ann"]}, headers=headers)
        assert ("Secure" in answer.headers["set-cookie"]) == secure

    play(story, tokens=TOKENS, **settings)


@pytest.mark.settings(tokens=TOKENS, session_seconds=0.01)
async def test_an_expired_session_is_no_session_and_leaves_the_store(service: Any) -> None:
    for _ in range(3):
        session = await logged_in(service)
        time.sleep(0.02)
        assert await seen(service, session) == 401
    with service.app.state.store.reader.engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM sessions")).scalar() == 1


@pytest.mark.promise("S7")
def test_a_token_is_replaced_at_a_restart_and_its_sessions_end_with_it_and_no_others(play: Any) -> None:
    old, new = "the-old-secret-000001", "the-new-secret-000001"
    first, second = (Token.of(name, secret, ("read",)) for name, secret in (("one", old), ("two", new)))
    cookies: list[dict[str, str]] = []

    async def statuses(service: Any) -> list[int]:
        secrets = [{"authorization": f"Bearer {secret}"} for secret in (old, new)]
        return [await seen(service, headers) for headers in (*secrets, *cookies)]

    async def both(service: Any) -> None:
        for secret in (old, new):
            answer = await service.client.post("/v1/login", json={"token": secret})
            cookies.append({"cookie": f"foreshock_session={answer.cookies['foreshock_session']}"})
            service.client.cookies.clear()
        assert await statuses(service) == [200, 200, 200, 200]

    async def the_new_alone(service: Any) -> None:
        assert await statuses(service) == [401, 200, 401, 200]

    play(both, tokens=(first, second))
    play(the_new_alone, tokens=(second,))
