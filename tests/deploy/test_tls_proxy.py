"""A real nginx with deploy/nginx terminates TLS for a real service: agent, login, stream and a batch of full size."""

import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.e2e.running import absent, free_port
from tests.faults.sending import eventually, send, started_sender

from foreshock.contract.wire import Array
from foreshock.server.testing import FakeRank, LiveService

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "foreshock.conf"
SECRET = "the-secret-behind-the-proxy"
JSON = {"content-type": "application/json"}


@dataclass
class Site:
    """A service behind nginx: its public address, and the certificate to trust."""

    service: LiveService
    url: str
    certificate: Path

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        trust = ssl.create_default_context(cafile=self.certificate)
        return httpx.Client(base_url=self.url, headers=headers, verify=trust, timeout=60.0, trust_env=False)


def nginx() -> str:
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        absent("nginx")
    return found


@contextmanager
def behind_nginx(folder: Path, service: LiveService) -> Iterator[Site]:
    """nginx with deploy/nginx/foreshock.conf; only the host name, ports and file paths are replaced."""
    program, port = nginx(), free_port()
    certificate, key = folder / "foreshock.pem", folder / "foreshock.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    site = CONFIG.read_text()
    for shipped, replacement in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("foreshock.example.org", "localhost"),
        ("/etc/nginx/foreshock.pem", str(certificate)),
        ("/etc/nginx/foreshock.key", str(key)),
        ("http://127.0.0.1:8765", service.url),
    ):
        assert shipped in site
        site = site.replace(shipped, replacement)
    temporary = ("proxy", "client_body", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{name}_temp_path {folder}/nginx-{name};\n" for name in temporary)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\npid {folder}/nginx.pid;\nerror_log {folder}/nginx.log;\nworker_processes 1;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + f"events {{}}\nhttp {{\naccess_log off;\n{places}{site}}}\n"
    )
    with (folder / "nginx.out").open("w") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=log, stderr=log)
    try:
        running_site = Site(service, f"https://localhost:{port}", certificate)
        deadline = time.monotonic() + 60
        while True:
            with running_site.client() as client:
                try:
                    if client.get("/healthz").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
            assert process.poll() is None, (folder / "nginx.out").read_text()
            assert time.monotonic() < deadline, (folder / "nginx.log").read_text()
            time.sleep(0.1)
        yield running_site
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tls")
    settings = {
        "FORESHOCK_TOKEN": SECRET,
        "FORESHOCK_TRUSTED_PROXIES": '["127.0.0.1"]',
        "FORESHOCK_ALLOWED_HOSTS": '["localhost"]',
    }
    with LiveService(folder, settings) as service, behind_nginx(folder, service) as running_site:
        yield running_site


@pytest.mark.servers
def test_agent_sends_through_the_proxy_only_with_a_trusted_certificate(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    distrusting = started_sender(site.url, token=SECRET, request_seconds=30.0)
    send(distrusting, 1, 2)
    eventually("the agent rejects an untrusted certificate", lambda: distrusting._failures > 0, seconds=60)
    distrusting.close(0.1)
    monkeypatch.setenv("SSL_CERT_FILE", str(site.certificate))
    agent = started_sender(site.url, token=SECRET, request_seconds=30.0)
    send(agent, *range(1, 8))
    with site.client(SECRET) as client:
        eventually("the run appears", lambda: client.get("/v1/runs/a-run").is_success, seconds=60)
        eventually("the last step arrives", lambda: client.get("/v1/runs/a-run").json()["last_step"] == 7, seconds=60)
    agent.close(30.0)
    assert (agent._failures, dict(agent.dropped)) == (0, {})


@pytest.mark.servers
def test_login_through_the_proxy_sets_a_secure_cookie(site: Site) -> None:
    with site.client() as client:
        page = client.get("/")
        assert page.headers["strict-transport-security"].startswith("max-age=")
        assert client.get("/v1/runs").status_code == 401
        login = client.post("/v1/login", json={"token": SECRET})
        assert login.status_code == 200
        assert "Secure" in login.headers["set-cookie"]
        assert "HttpOnly" in login.headers["set-cookie"]
        assert client.get("/v1/runs").status_code == 200
    with httpx.Client(base_url=site.service.url, headers={"host": "localhost"}, trust_env=False) as direct:
        assert "Secure" not in direct.post("/v1/login", json={"token": SECRET}).headers["set-cookie"]


@pytest.mark.servers
def test_forged_forwarded_address_does_not_bypass_the_login_limit(site: Site) -> None:
    codes = []
    with site.client() as client:
        for number in range(14):  # one address may guess ten times; the proxy's address counts, not the client's header
            headers = {"x-forwarded-for": f"203.0.113.{number}"}
            codes.append(client.post("/v1/login", json={"token": "wrong"}, headers=headers).status_code)
    assert 429 in codes


@pytest.mark.servers
def test_proxy_streams_events_without_buffering(site: Site) -> None:
    rank = FakeRank(run="streamed")
    received: list[str] = []
    connected = threading.Event()

    def listen() -> None:
        with site.client(SECRET) as client, client.stream("GET", "/v1/stream", params={"run": "streamed"}) as answer:
            for line in answer.iter_lines():
                connected.set()
                received.append(line)
                if line.startswith("event: started"):
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert connected.wait(60)
    with site.client(SECRET) as client:
        body = rank.batch(rank.started()).model_dump_json()
        assert client.post("/v1/batches", content=body, headers=JSON).status_code == 200
    listener.join(60)
    assert not listener.is_alive(), received


@pytest.mark.servers
def test_proxy_passes_a_batch_of_51200_heads_and_rejects_larger_bodies(site: Site) -> None:
    rank = FakeRank(run="large", layers=400, heads=range(128))
    norms = Array.of(np.random.default_rng(7).random((rank.count,), dtype=np.float32))
    update = {"query_norm": norms, "key_norm": norms, "query_key_norm": norms}
    body = rank.batch(rank.sample(1).model_copy(update=update)).model_dump_json()
    for page in (CONFIG, CONFIG.parents[1] / "kubernetes" / "common.yaml"):
        assert f"takes {len(body) / 1e6:.1f} MB" in page.read_text(), page
    with site.client(SECRET) as client:
        assert client.post("/v1/batches", content=body, headers=JSON).status_code == 200
        assert client.post("/v1/batches", content=b" " * (34 * 2**20), headers=JSON).status_code == 413
