"""Tokens are replaced while the service runs: its files are written anew, old and new secrets overlap."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.test_auth import bearer

from foreshock.server.access.rotation import Rotation
from foreshock.server.settings import Settings
from foreshock.server.testing import FakeRank, LiveService

OLD, NEW, OTHER = "the-old-secret-000001", "the-new-secret-000001", "another-secret-000001"


def entry(name: str, secret: str, after: str | None = None, **more: Any) -> dict[str, Any]:
    made = {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), "scopes": ["ingest", "read"], **more}
    if after is not None:
        made["next_sha256"] = hashlib.sha256(after.encode()).hexdigest()
    return made


def write(path: Path, text: str) -> None:
    """Replace the file in one step, as kubelets and careful people do."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `token` and `tokens` the service reads."""
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        monkeypatch.delenv(name)
    write(tmp_path / "token", f"{OTHER}\n")
    write(tmp_path / "tokens", json.dumps([entry("cluster", OLD)]))
    monkeypatch.setenv("FORESHOCK_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("FORESHOCK_TOKENS_FILE", str(tmp_path / "tokens"))
    monkeypatch.setattr("foreshock.server.access.rotation.LOOK_SECONDS", 3600.0)  # the tests look
    return tmp_path


def rotation_of(service: Any) -> Rotation:
    rotation: Rotation = service.app.state.rotation
    return rotation


async def statuses(service: Any, *secrets: str) -> list[int]:
    return [(await service.client.get("/v1/runs", headers=bearer(secret))).status_code for secret in secrets]


def test_old_and_new_are_taken_while_both_stand_in_the_file_and_the_new_alone_after(play: Any, files: Path) -> None:
    async def story(service: Any) -> None:
        rotation = rotation_of(service)
        assert await statuses(service, OLD, NEW) == [200, 401]
        write(files / "tokens", json.dumps([entry("cluster", OLD, after=NEW)]))
        await rotation.look()
        assert await statuses(service, OLD, NEW) == [200, 200]
        write(files / "tokens", json.dumps([entry("cluster", NEW)]))
        await rotation.look()
        assert await statuses(service, OLD, NEW) == [401, 200]
        rows = (await service.client.get("/v1/audit", headers=bearer(OTHER))).json()["rows"]
        assert [row["action"] for row in rows] == ["tokens changed"] * 2
        assert rows[0]["details"] == {"added": [], "removed": [], "changed": ["cluster"]}

    play(story)


def test_the_one_secret_is_replaced_by_a_second_line_of_its_file(play: Any, files: Path) -> None:
    async def story(service: Any) -> None:
        rotation = rotation_of(service)
        for held, taken in ((f"{OTHER}\n{NEW}\n", [200, 200]), (NEW, [401, 200])):
            write(files / "token", held)
            await rotation.look()
            assert await statuses(service, OTHER, NEW) == taken

    play(story)


def test_a_session_ends_with_the_secret_that_it_was_begun_with(play: Any, files: Path) -> None:
    write(files / "tokens", json.dumps([entry("cluster", OLD, after=NEW)]))

    async def story(service: Any) -> None:
        cookies = []
        for secret in (OLD, NEW):
            answer = await service.client.post("/v1/login", json={"token": secret})
            cookies.append({"cookie": f"foreshock_session={answer.cookies['foreshock_session']}"})
            service.client.cookies.clear()
        write(files / "tokens", json.dumps([entry("cluster", NEW)]))
        await rotation_of(service).look()
        seen = [(await service.client.get("/v1/runs", headers=cookie)).status_code for cookie in cookies]
        assert seen == [401, 200]

    play(story)


@pytest.mark.promise("S7")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: write(folder / "tokens", "[{"),
        lambda folder: write(folder / "tokens", '{"name": "cluster"}'),
        lambda folder: write(folder / "tokens", json.dumps([entry("cluster", NEW)] * 2)),
        lambda folder: write(folder / "tokens", json.dumps([entry("token", NEW)])),
        lambda folder: write(folder / "token", "short"),
        lambda folder: write(folder / "token", ""),
        lambda folder: write(folder / "token", "\n".join([OLD, NEW, OTHER])),
        lambda folder: (folder / "tokens").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "tokens").unlink(),
        lambda folder: (folder / "token").unlink(),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_never_opens_the_service(
    play: Any, files: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def story(service: Any) -> None:
        rotation = rotation_of(service)
        spoil(files)
        await rotation.look()
        await rotation.look()
        assert await statuses(service, OLD, OTHER, NEW, "") == [200, 200, 401, 401]
        assert (await service.client.get("/v1/runs")).status_code == 401

    play(story)
    said = [line for line in capsys.readouterr().out.splitlines() if "tokens stay as they were" in line]
    assert len(said) == 1, "one line, however often it is looked at"
    assert not [secret for secret in (OLD, NEW, OTHER) if secret in said[0]]


def test_files_that_hold_no_token_at_all_do_not_open_the_service(
    play: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORESHOCK_TOKEN_FILE")

    async def story(service: Any) -> None:
        write(files / "tokens", "[]")
        await rotation_of(service).look()
        assert await statuses(service, OLD, "") == [200, 401]

    play(story)


def test_a_variable_wins_over_its_file_later_too(play: Any, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_TOKENS", json.dumps([entry("cluster", NEW)]))
    assert [token.name for token in Settings().tokens] == ["cluster"]

    async def story(service: Any) -> None:
        write(files / "tokens", json.dumps([entry("cluster", OLD), entry("second", OLD)]))
        await rotation_of(service).look()
        assert await statuses(service, OLD, NEW) == [401, 200]

    play(story)


@pytest.mark.full
def test_a_running_service_follows_its_file_without_a_restart_and_loses_no_batch(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    write(tokens, json.dumps([entry("cluster", OLD)]))
    rank = FakeRank()
    with LiveService(tmp_path, {"FORESHOCK_TOKENS_FILE": str(tokens)}) as service, service.client() as client:

        def sent(secret: str) -> int:
            body = rank.batch(rank.started(), sequence=rank.sequence + 1).model_dump_json()
            headers = {"content-type": "application/json", **bearer(secret)}
            return client.post("/v1/batches", content=body, headers=headers).status_code

        def until(secret: str, status: int) -> None:
            deadline = time.monotonic() + 60
            while sent(secret) != status:
                assert time.monotonic() < deadline, f"{secret} is not answered {status}"
                time.sleep(0.1)

        assert (sent(OLD), sent(NEW)) == (200, 401)
        write(tokens, json.dumps([entry("cluster", OLD, after=NEW)]))
        until(NEW, 200)
        assert sent(OLD) == 200
        write(tokens, json.dumps([entry("cluster", NEW)]))
        until(OLD, 401)
        assert sent(NEW) == 200
