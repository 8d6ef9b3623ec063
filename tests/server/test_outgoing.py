"""Messages to webhooks: allowed hosts, TLS, timeouts, retries, and secrets that are never logged."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError
from tests.overrides import settings_with

from foreshock.server.notifier import Notifier
from foreshock.server.outgoing import Outgoing, OutgoingError
from foreshock.server.settings import Settings
from foreshock.server.testing import FakeRank

HOST = "hooks.example.com"
CERTIFICATE = Path(__file__).parent / "loopback_certificate.pem"

pytestmark = pytest.mark.promise("S10")


class ToLoopback(httpx.AsyncHTTPTransport):
    """Connects to loopback for every host, and verifies the certificate against the name of the host."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions |= {"sni_hostname": request.url.host}
        request.url = request.url.copy_with(host="127.0.0.1")
        return await super().handle_async_request(request)


class Hook:
    """A TLS server on loopback with a certificate of hooks.example.com that records requests."""

    def __init__(
        self, response: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", byte_seconds: float = 0.0
    ) -> None:
        self.response, self.byte_seconds, self.requests = response, byte_seconds, list[tuple[str, bytes]]()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
        self.requests.append((head, await reader.readexactly(length)))
        for byte in self.response:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(self.byte_seconds)
        writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Start the server and yield its URL."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(CERTIFICATE)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        try:
            yield f"https://{HOST}:{server.sockets[0].getsockname()[1]}/services/secret-path"
        finally:
            server.close()

    def out(self, total_seconds: float = 5.0) -> Outgoing:
        """A sender that connects to this server."""
        return Outgoing({HOST}, lambda tls: ToLoopback(verify=tls), total_seconds)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://hooks.example.com/", "only https"),
        ("file:///etc/passwd", "only https"),
        ("https://127.0.0.1/", "not allowed"),
        ("https://2130706433/", "not allowed"),
        ("https://[::1]/", "not allowed"),
        ("https://localhost/", "not allowed"),
        ("https://hooks.example.com./", "not allowed"),
        ("https://elsewhere.example.com/", "not allowed"),
        ("https://hooks.example.com.evil.org/", "not allowed"),
        ("https://other-hooks.example.com/", "not allowed"),
        ("https://hooks.example.com@evil.org/", "login"),
        ("https://evil.org:x@hooks.example.com/", "login"),
        ("https://hooks.example.com/a\r\nx-evil:1", "cannot be read"),
    ],
)
def test_disallowed_webhook_url_is_refused_before_sending(url: str, words: str) -> None:
    def transport(tls: ssl.SSLContext) -> httpx.AsyncBaseTransport:
        raise AssertionError("something was sent")

    with pytest.raises(OutgoingError, match=words) as caught:
        asyncio.run(Outgoing({HOST}, transport).post(url, b"{}"))
    assert url not in str(caught.value)


async def test_redirect_is_not_followed() -> None:
    hook = Hook(b"HTTP/1.1 302 Found\r\nlocation: https://169.254.169.254/\r\ncontent-length: 0\r\n\r\n.")

    async with hook.open() as url:
        assert await hook.out().post(url, b"{}") == 302

    assert len(hook.requests) == 1


async def test_slow_response_is_abandoned_after_total_timeout() -> None:
    hook = Hook(byte_seconds=0.1)

    async with hook.open() as url:
        with pytest.raises(OutgoingError, match=f"{HOST} took longer than 0.5 s"):
            await hook.out(0.5).post(url, b"{}")


@pytest.mark.parametrize("certificates", ["untrusted", "another name"])
async def test_server_without_valid_certificate_receives_nothing(
    certificates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, named = Hook(), HOST
    if certificates == "untrusted":
        monkeypatch.delenv("SSL_CERT_FILE")
    else:
        named = "other.example.com"

    async with hook.open() as url:
        out = Outgoing({named}, lambda tls: ToLoopback(verify=tls))
        with pytest.raises(OutgoingError, match="SSLCertVerificationError"):
            await out.post(url.replace(HOST, named), b"{}")

    assert hook.requests == []


@pytest.mark.promise("A27")
async def test_ssl_cert_file_is_read_for_each_message_and_proxy_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, named = Hook(), tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")

    async with hook.open() as url:
        out = hook.out()
        with pytest.raises(OutgoingError, match=f"SSL_CERT_FILE={named} cannot be used"):
            await out.post(url, b"{}")
        named.write_bytes(CERTIFICATE.read_bytes())
        assert await out.post(url, b"{}") == 200

    assert len(hook.requests) == 1


def test_settings_reject_disallowed_url_and_hide_secrets() -> None:
    with pytest.raises(ValidationError, match="not allowed") as caught:
        Settings(notify_slack_url=SecretStr("https://evil.org/services/secret-path"))
    assert "secret-path" not in str(caught.value)
    good = Settings(notify_slack_url=SecretStr("https://hooks.slack.com/services/secret-path"))
    assert "secret-path" not in repr(good)
    assert Notifier.of(object(), Settings()) is None  # type: ignore[arg-type]


async def test_slack_and_webhook_get_same_text_and_only_for_new_incidents(service: Any, caplog: Any) -> None:
    hook = Hook()

    async with hook.open() as url:
        settings_of_hooks: dict[str, Any] = {
            "notify_slack_url": SecretStr(url),
            "notify_webhook_url": SecretStr(url),
            "notify_hosts": (HOST,),
        }
        settings_of_hooks |= {
            "token": SecretStr("a-secret-of-sixteen-or-more"),
            "public_url": "https://foreshock.example.org",
        }
        settings = settings_with(Settings, **settings_of_hooks, notify_gather_seconds=0.0)
        notifier = Notifier(service.app.state.store, settings, hook.out())
        rank = FakeRank()
        await service.store(rank, rank.started(policy="approve"), rank.verdict(3, name="old", cause="other"))
        await notifier.turn()
        assert hook.requests == []
        await service.store(rank, rank.verdict(10, name="new", cause="score growth"))
        for _ in range(2):
            await notifier.turn()
        slack, webhook = (json.loads(request[1]) for request in hook.requests)
        assert "Attention scores grow" in slack["text"]
        assert "&amp;head=0.2" in slack["text"]  # escaped for Slack
        assert slack["text"].replace("&amp;", "&") == webhook["message"]
        [incident] = webhook["incidents"][rank.run]
        assert (incident["cause"], "heads" in incident) == ("score growth", False)

    assert "secret-path" not in caplog.text


async def test_failing_webhook_is_tried_three_times_without_logging_its_url(service: Any, monkeypatch: Any) -> None:
    hook = Hook(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n.")
    logged: list[Any] = []
    monkeypatch.setattr("foreshock.server.notifier.log.error", lambda *args, **kwargs: logged.append((args, kwargs)))

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

    assert "secret-path" not in str(logged)
    assert "answered 500" in str(logged)
