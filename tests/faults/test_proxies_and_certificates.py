"""Proxy, NO_PROXY and certificate variables, valid or not: no batch is lost."""

import logging
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import certifi
import pytest
from tests.faults.hostile_server import acknowledge, closed_port, hostile_server
from tests.faults.sending import CERTIFICATE, IN_ORDER_SECONDS, eventually, send, started_sender, steps_at, tls_of_hooks

from foreshock.contract.route import RouteError, is_loopback, route_to

pytestmark = pytest.mark.promise("A27")

REMOTE = "http://service.example:8765"
"""A service that is reachable only through a proxy."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.lower, PROXIES), *CERTIFICATES):
        monkeypatch.delenv(name, raising=False)


def resolve_hooks_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """hooks.example.com resolves to this machine, but its name is not a loopback address."""
    getaddrinfo = socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **options: Any) -> Any:
        return getaddrinfo("127.0.0.1" if "hooks.example.com" in str(host) else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "environment",
    [
        {"NO_PROXY": "localhost,127.0.0.1,[::1],.corp"},
        {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "[::1]:bad,[,]"},
        {"ALL_PROXY": "socks5://127.0.0.1:9"},
        {"all_proxy": "socks5h://127.0.0.1:9"},
        {"HTTP_PROXY": "127.0.0.1:bad"},
        {"http_proxy": "ftp://nowhere"},
        {"SSL_CERT_FILE": "/nope/ca.pem", "SSL_CERT_DIR": "/nope", "REQUESTS_CA_BUNDLE": "/nope/ca.pem"},
    ],
)
def test_local_service_is_reached_despite_proxy_and_certificate_variables(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with hostile_server(acknowledge) as server:
        sender = started_sender(server.url, request_seconds=10.0)
        send(sender, 1, 2, 3)
        sender.close(IN_ORDER_SECONDS)
        assert steps_at(server) == [1, 2, 3]
    assert (dict(sender.dropped), dict(sender.faults), warnings(caplog)) == ({}, {}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("HTTP_PROXY", "127.0.0.1:bad"),
        ("http_proxy", "http://user:se:cret@"),
        ("HTTP_PROXY", "ftp://127.0.0.1"),
    ],
)
def test_unusable_proxy_is_reported_and_batches_are_spooled_until_it_works(
    name: str,
    value: str,
    tmp_path: Path,
    quick_retries: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("foreshock.contract.route.find_spec", lambda _name: None)
    monkeypatch.setenv(name, value)
    with hostile_server(acknowledge) as proxy:
        sender = started_sender(REMOTE, tmp_path)
        send(sender, 1)
        eventually("the batch is spooled and tried", lambda: len(sender._own) and sender._failures >= 3)
        assert [name in line and REMOTE in line for line in warnings(caplog)] == [True]
        assert "se:cret" not in caplog.text
        monkeypatch.setenv(name, proxy.url)
        send(sender, 2)
        eventually("both steps arrive through the proxy", lambda: steps_at(proxy) == [1, 2] and not len(sender._own))
        sender.close(IN_ORDER_SECONDS)
    assert (dict(sender.dropped), dict(sender.faults)) == ({}, {})
    assert proxy.headers[0].startswith(f"POST {REMOTE}/v1/batches HTTP/1.1")


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
@pytest.mark.parametrize("problem", ["missing", "malformed", "a pipe", "other CAs"])
def test_unusable_certificates_are_reported_and_reread_until_they_work(
    name: str,
    problem: str,
    tmp_path: Path,
    quick_retries: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolve_hooks_to_loopback(monkeypatch)
    trusted = tmp_path / "trusted"
    if problem == "malformed":
        trusted.write_text("no certificate\n")
    elif problem == "a pipe":
        os.mkfifo(trusted)
    elif problem == "other CAs":
        shutil.copy(certifi.where(), trusted) if name == "SSL_CERT_FILE" else trusted.mkdir()
    monkeypatch.setenv(name, str(trusted))
    with hostile_server(acknowledge, tls_of_hooks()) as server:
        url = f"https://hooks.example.com:{server.url.rpartition(':')[2]}"
        sender = started_sender(url, tmp_path / "spool", request_seconds=10.0)
        send(sender, 1)
        eventually("the batch is spooled and tried", lambda: len(sender._own) and sender._failures >= 3)
        assert [name in line and url in line for line in warnings(caplog)] == [True]
        if trusted.is_dir():
            trusted.rmdir()
        trusted.unlink(missing_ok=True)
        if name == "SSL_CERT_FILE":
            shutil.copy(CERTIFICATE, trusted)
        else:
            trusted.mkdir()
            shutil.copy(CERTIFICATE, trusted / f"{subject_hash(CERTIFICATE)}.0")
        send(sender, 2)
        eventually("both steps arrive", lambda: steps_at(server) == [1, 2] and not len(sender._own))
        sender.close(IN_ORDER_SECONDS)
    assert (dict(sender.dropped), dict(sender.faults)) == ({}, {})


def subject_hash(certificate: Path) -> str:
    """The file name under which OpenSSL looks for the certificate in a folder."""
    command = ["openssl", "x509", "-noout", "-hash", "-in", str(certificate)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("host", ["localhost", "a..b"])
def test_log_names_the_proxy_without_credentials(
    host: str, quick_retries: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = closed_port().rpartition(":")[2]
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setenv("HTTP_PROXY", f"http://ann:secret-word@{host}:{port}")
    sender = started_sender(REMOTE)
    send(sender, 1)
    eventually("the failure is logged", lambda: warnings(caplog))
    sender.close(IN_ORDER_SECONDS)
    route = f"{REMOTE}/v1/batches through the proxy http://{host}:{port} (HTTP_PROXY)"
    assert any(f"batches are sent to {route}" in record.getMessage() for record in caplog.records)
    assert f"through the proxy http://{host}:{port} (HTTP_PROXY)" in warnings(caplog)[0]
    assert "secret-word" not in caplog.text
    assert "certificates" not in caplog.text


@pytest.mark.parametrize(
    ("host", "no_proxy", "direct"),
    [
        ("[fd00::7]", "[fd00::7]", True),
        ("[fd00::7]", "fd00::/8", True),
        ("[fd00::7]:8765", "[fd00::7]:8765", True),
        ("[fd00::7]:8765", "[fd00::7]:1", False),
        ("[fd00::7]", "[fd00::8],[", False),
        ("10.1.2.3", "10.1.0.1/8", True),
        ("10.1.2.3", "11.0.0.0/8 10.1.2.3", True),
        ("service.corp", ".corp", True),
        ("service.corp", "CORP", True),
        ("service.corp", "*.corp", True),
        ("servicecorp", "corp", False),
        ("service.corp:80", "service.corp:80", True),
        ("service.corp", "other,*", True),
        ("service.corp", "", False),
    ],
)
def test_no_proxy_matches_hosts_domains_networks_and_ports(
    host: str, no_proxy: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    assert (str(route_to(f"http://{host}")) == "") is direct


def test_loopback_address_is_recognised_in_every_notation() -> None:
    names = ("localhost", "LOCALHOST.", "a.localhost", "::1", "[::1]", "::ffff:127.0.0.1")
    for host in (*names, "127.0.0.1", "127.8.8.8", "127.1", "2130706433", "0.0.0.0"):
        assert is_loopback(host), host
    assert not is_loopback("service.example")
    assert not is_loopback("10.0.0.1")


def test_scheme_variable_takes_precedence_over_all_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"ALL_PROXY": "http://all:1"}, "http", "http://all:1 (ALL_PROXY)"),
        ({"HTTPS_PROXY": "http://tls:2"}, "http", "http://all:1 (ALL_PROXY)"),
        ({"HTTPS_PROXY": "http://tls:2"}, "https", "http://tls:2 (HTTPS_PROXY)"),
        ({"https_proxy": "lower:3"}, "https", "http://lower:3 (https_proxy)"),
        ({"https_proxy": "", "ALL_PROXY": ""}, "https", ""),
    ]
    for environment, scheme, proxy in cases:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert str(route_to(f"{scheme}://service.example")).removeprefix(" through the proxy ") == proxy
    monkeypatch.setenv("https_proxy", "https://")
    with pytest.raises(RouteError, match="https_proxy is not the address of a proxy"):
        route_to("https://service.example")


@pytest.mark.parametrize("service", ["http", "https"])
@pytest.mark.parametrize("proxy", ["http", "https"])
def test_http_and_https_services_are_reached_through_http_and_https_proxies(
    service: str, proxy: str, quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS to the proxy is verified with the certificates that the environment names."""
    resolve_hooks_to_loopback(monkeypatch)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with hostile_server(acknowledge, tls_of_hooks() if proxy == "https" else None) as server:
        monkeypatch.setenv("ALL_PROXY", f"{proxy}://hooks.example.com:{server.url.rpartition(':')[2]}")
        sender = started_sender(f"{service}://service.example", request_seconds=10.0)
        send(sender, 1)
        eventually("a request to the proxy", lambda: server.headers)
        sender.close(0.1)
    verb = "CONNECT service.example:443" if service == "https" else "POST http://service.example"
    assert server.headers[0].startswith(verb)
    assert dict(sender.faults) == {}
