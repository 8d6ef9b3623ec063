import asyncio
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from foreshock.server.notifier import Notifier
from foreshock.server.outgoing import Outgoing, OutgoingError, Target, is_public
from foreshock.server.settings import Settings
from foreshock.server.testing import FakeRank
from foreshock.server.testing.fixed import settings_with

HOST = "hooks.example.com"
CERTIFICATE = Path(__file__).parent / "loopback_certificate.pem"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = pytest.mark.promise("S10")


class Hook:
    """A TLS server on loopback that speaks as hooks.example.com, and what it was sent."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok") -> None:
        self.answer, self.requests, self.port = answer, list[tuple[str, bytes]](), 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
        self.requests.append((head, await reader.readexactly(length)))
        writer.write(self.answer)
        await writer.drain()
        if self.answer.endswith(b"\r\n") or not self.answer:
            await asyncio.sleep(30)
        writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Its URL."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(CERTIFICATE)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"https://{HOST}:{self.port}/services/secret-path"
        finally:
            server.close()

    def out(self, trusted: bool = True, **changes: Any) -> Outgoing:
        """A sender that may reach loopback, for tests alone."""
        tls = ssl.create_default_context(cafile=str(CERTIFICATE) if trusted else None)
        given: dict[str, Any] = {"resolve": self.resolve, "reachable": lambda address: address.is_loopback, "tls": tls}
        return Outgoing({HOST}, **{**given, **changes})

    async def resolve(self, host: str, port: int) -> list[str]:
        assert host == HOST
        return ["127.0.0.1"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fc00::1",
        "fd12::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "2001:db8::1",
    ],
)
def test_an_address_that_is_not_of_the_open_internet_is_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))

    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.215.14", address]  # one bad address among good ones is enough

    with pytest.raises(OutgoingError, match="not public"):
        asyncio.run(Outgoing({HOST}, resolve=resolve).post(f"https://{HOST}/", b"{}"))


def test_addresses_of_the_open_internet_are_taken() -> None:
    assert all(is_public(ipaddress.ip_address(text)) for text in ("93.184.215.14", "1.1.1.1", "2606:4700::1111"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://hooks.example.com/", "only https"),
        ("file:///etc/passwd", "only https"),
        ("gopher://hooks.example.com/", "only https"),
        ("https://127.0.0.1/", "by its full name"),
        ("https://2130706433/", "by its full name"),
        ("https://0x7f000001/", "by its full name"),
        ("https://0177.0.0.1/", "by its full name"),
        ("https://127.1/", "by its full name"),
        ("https://[::1]/", "by its full name"),
        ("https://[::ffff:127.0.0.1]/", "by its full name"),
        ("https://localhost/", "by its full name"),
        ("https://metadata/", "by its full name"),
        ("https://hooks.example.com./", "by its full name"),
        ("https://hooks.example\u3002com/", "by its full name"),
        ("https://elsewhere.example.com/", "not allowed"),
        ("https://hooks.example.com.evil.org/", "not allowed"),
        ("https://hooks.example.com@evil.org/", "login"),
        ("https://evil.org:x@hooks.example.com/", "login"),
        ("https://hooks.example.com:99999/", "cannot be read"),
        ("https://hooks.example.com/a b", "percent-encoded"),
        ("https://hooks.example.com/\u00e4", "percent-encoded"),
    ],
)
def test_a_url_that_could_lead_elsewhere_is_refused_before_anything_is_resolved(url: str, words: str) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise AssertionError("resolved")

    with pytest.raises(OutgoingError, match=words) as caught:
        asyncio.run(Outgoing({HOST}, resolve=resolve).post(url, b"{}"))
    assert url not in str(caught.value)


def test_line_breaks_in_a_url_never_reach_the_wire() -> None:
    assert Target.of("https://hooks.example.com/a\r\nx-evil:1", {HOST}).path == "/ax-evil:1"


def test_a_message_is_delivered_to_the_address_that_was_checked() -> None:
    hook, asked = Hook(), []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]  # a name that is rebound after the check

    async def story() -> None:
        async with hook.open() as url:
            assert await hook.out(resolve=resolve).post(url, b'{"a":1}') == 200

    asyncio.run(story())
    [(head, body)] = hook.requests
    assert head.startswith("POST /services/secret-path HTTP/1.1\r\n")
    assert f"host: {HOST}:{hook.port}" in head
    assert (body, asked) == (b'{"a":1}', [HOST])


def test_a_redirect_is_an_answer_and_not_followed() -> None:
    hook = Hook(b"HTTP/1.1 302 Found\r\nlocation: https://169.254.169.254/\r\ncontent-length: 0\r\n\r\n.")

    async def story() -> None:
        async with hook.open() as url:
            assert await hook.out().post(url, b"{}") == 302

    asyncio.run(story())
    assert len(hook.requests) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK", b"SSH-2.0-x\r\n.", b"x" * 100_000])
def test_silence_and_garbage_end_within_the_time_and_deliver_nothing(answer: bytes) -> None:
    hook = Hook(answer)

    async def story() -> None:
        async with hook.open() as url:
            began = time.monotonic()
            with pytest.raises(OutgoingError) as caught:
                await hook.out(total_seconds=1.0).post(url, b"{}")
            assert time.monotonic() - began < 3
            assert "secret-path" not in str(caught.value)

    asyncio.run(story())


def test_a_body_without_end_is_not_read() -> None:
    hook = Hook(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000_000)

    async def story() -> None:
        async with hook.open() as url:
            assert await hook.out().post(url, b"{}") == 200

    asyncio.run(story())


def test_a_server_without_the_names_certificate_gets_nothing() -> None:
    hook = Hook()

    async def story() -> None:
        async with hook.open() as url:
            with pytest.raises(OutgoingError, match="SSLCertVerificationError"):
                await hook.out(trusted=False).post(url, b"{}")

    asyncio.run(story())
    assert hook.requests == []


@pytest.mark.promise("A27")
def test_certificates_that_the_environment_names_are_read_for_each_message_and_a_proxy_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, named = Hook(), tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")

    async def story() -> None:
        async with hook.open() as url:
            out = hook.out(tls=None)
            with pytest.raises(OutgoingError, match=f"SSL_CERT_FILE={named} cannot be used"):
                await out.post(url, b"{}")
            named.write_bytes(CERTIFICATE.read_bytes())
            assert await out.post(url, b"{}") == 200

    asyncio.run(story())
    assert len(hook.requests) == 1


def test_settings_refuse_a_url_that_may_not_be_used_and_show_none() -> None:
    with pytest.raises(ValidationError, match="not allowed") as caught:
        Settings(notify_slack_url=SecretStr("https://evil.org/services/secret-path"))
    assert "secret-path" not in str(caught.value)
    good = Settings(notify_slack_url=SecretStr("https://hooks.slack.com/services/secret-path"))
    assert "secret-path" not in repr(good)
    assert Notifier.of(object(), Settings()) is None  # type: ignore[arg-type]


def test_a_warning_a_switch_and_a_waiting_command_are_told_in_words(play: Any, caplog: Any) -> None:
    hook = Hook()

    async def story(service: Any) -> None:
        async with hook.open() as url:
            settings = settings_with(
                Settings,
                notify_slack_url=SecretStr(url),
                notify_webhook_url=SecretStr(url),
                notify_hosts=(HOST,),
                token=SecretStr("a-secret-of-sixteen-or-more"),
                public_url="https://foreshock.example.org",
                notify_gather_seconds=0.0,
            )
            notifier = Notifier(service.app.state.store, settings, hook.out())
            first, second = FakeRank(rank=0), FakeRank(rank=1)
            await service.store(first, first.started(policy="approve"), first.verdict(3, name="old", cause="other"))
            await notifier.turn()
            assert hook.requests == []  # what happened before the first start is not told
            new: dict[str, Any] = {"name": "new", "cause": "score growth"}
            await service.store(first, first.verdict(10, **new))
            await service.store(second, second.verdict(10, **new))
            await service.store(first, first.verdict(11, **new, state="updated"))
            await notifier.turn()
            slack, webhook = (request[1].decode() for request in hook.requests)
            for words in (
                "Warning: Run run-1: Attention scores grow",
                " in layer 0 head 2, since step 10",
                "about step 2,110",
            ):
                assert words in slack
                assert words in webhook
            assert "Done: Nothing is switched: rounding could not be shown" in slack
            assert "https://foreshock.example.org/?runs=run-1" in slack
            await notifier.turn()
            assert len(hook.requests) == 2
            order = {"who": "ann", "reason": "drift", "heads": [[0, 2]], "mode": "exact_delta"}
            await service.client.post("/v1/runs/run-1/commands", json=order)
            [command] = (await service.store(first, first.sample(13))).commands
            await service.store(first, first.answer(command, 14))
            await notifier.turn()
            assert "Switch of layer 0 head 2 to exact_delta: applied" in hook.requests[-1][1].decode()
            assert len(hook.requests) == 4

    play(story)
    assert "secret-path" not in caplog.text


def test_a_hook_that_fails_is_tried_three_times_and_its_url_is_not_logged(play: Any, monkeypatch: Any) -> None:
    hook = Hook(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n.")
    logged: list[Any] = []
    monkeypatch.setattr("foreshock.server.notifier.log.error", lambda *args, **kwargs: logged.append((args, kwargs)))

    async def story(service: Any) -> None:
        async with hook.open() as url:
            settings = settings_with(
                Settings, notify_webhook_url=SecretStr(url), notify_hosts=(HOST,), notify_gather_seconds=0.0
            )
            notifier = Notifier(service.app.state.store, settings, hook.out(), retry_seconds=0.01)
            await notifier.turn()
            rank = FakeRank()
            await service.store(rank, rank.started(), rank.verdict(10))
            await notifier.turn()
            assert (len(hook.requests), notifier.failed) == (3, 1)

    play(story)
    assert "secret-path" not in str(logged)
    assert "answered 500" in str(logged)
