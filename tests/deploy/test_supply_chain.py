"""Images are pinned by what their registry says: here one of the test's own, which asks for a token as others do."""

import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "5e" * 32


class Registry(BaseHTTPRequestHandler):
    """Knows team/app:1.2 and nothing else; a manifest needs the token that /token gives."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        assert self.path == "/token?service=tests&scope=repository%3Ateam%2Fapp%3Apull"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"token": "let-me-in"}')

    def do_HEAD(self) -> None:
        host = f"http://127.0.0.1:{self.server.server_address[1]}"  # type: ignore[index]
        if self.headers.get("Authorization") != "Bearer let-me-in":
            self.send_response(401)
            scope = 'service="tests",scope="repository:team/app:pull"'
            self.send_header("WWW-Authenticate", f'Bearer realm="{host}/token",{scope}')
        elif self.path == "/v2/team/app/manifests/1.2" and "image.index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        else:
            self.send_response(404)
        self.end_headers()


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def pin(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "pin-images"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_image_gets_the_digest_that_its_registry_names_and_keeps_its_tag(registry: str, tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    image = f"{registry}/team/app:1.2"
    file.write_text(f"a:\n  image: {image} # why\nb:\n  image: own:local\nc:\n  - image: {image}@sha256:{'0' * 64}\n")
    done = pin("--plain-http", str(file))
    assert done.returncode == 0, done.stderr
    pinned = f"a:\n  image: {image}@{DIGEST} # why\nb:\n  image: own:local\nc:\n  - image: {image}@sha256:{'0' * 64}\n"
    assert file.read_text() == pinned
    assert pin("--plain-http", str(file)).stdout == ""
    assert pin("--check", str(file)).returncode == 0


def test_what_no_registry_knows_stays_as_it_is_and_is_named(registry: str, tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    text = f"FROM {registry}/team/app:9.9 AS build\nFROM {registry}/team/untagged\n"
    file.write_text(text)
    done = pin("--plain-http", str(file))
    assert done.returncode == 1
    assert "answers 404" in done.stderr
    assert "names no tag" in done.stderr
    assert file.read_text() == text


def test_a_registry_that_sends_for_its_token_to_a_file_is_refused() -> None:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "pin-images"))
    for realm in ("file:///etc/passwd", "", "ftp://host/token"):
        with pytest.raises(ValueError, match="which is no address of the web"):
            script["_token"](f'Bearer realm="{realm}",service="x"')


def test_the_check_names_every_image_of_the_repository() -> None:
    named = set(re.findall(r": (\S+) is not pinned", pin("--check").stdout))
    compose = set(re.findall(r"^\s+image: ([^\s@]+)(?!\S*@)", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE))
    pinned = {image for image in compose if f"{image}@sha256:" in (ROOT / "docker-compose.yml").read_text()}
    assert compose - pinned - {"foreshock-service:local"} <= named
    assert "foreshock-service:local" not in named


def test_the_release_check_is_sound_shell() -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / "release-check"], check=True)


def test_only_the_last_job_of_a_release_may_publish_and_only_what_the_jobs_before_built_and_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    jobs = workflow["jobs"]
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert not any("checkout" in step.get("uses", "") for step in jobs["publish"]["steps"])
    ran = [
        step["run"].split()[0] for job in jobs.values() for step in job["steps"] if "scripts/" in step.get("run", "")
    ]
    assert ran == ["scripts/release-check", "checkout/scripts/try-wheel"]
    assert all((ROOT / path.removeprefix("checkout/")).is_file() for path in ran)
