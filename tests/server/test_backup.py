"""Backup and restore: acknowledged batches and the audit trail are complete in the restored store."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.e2e.running import eventually
from tests.server import golden_store
from tests.server.postgresql import new_database
from tests.server.senders import Sender
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.server.testing import FakeRank, LiveService, post

ORDER = {"who": "ann", "reason": "a test", "mode": "plain"}


def cli(*arguments: str, fails: bool = False) -> str:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code != 0) == fails, result.output
    return result.output


@contextmanager
def ingest(url: str) -> Iterator[list[Sender]]:
    """Ranks that send continuously."""
    senders = [Sender(lambda: url, FakeRank(run=f"run-{n % 3}", rank=n, boot=f"boot-{n}")) for n in range(6)]
    try:
        yield senders
    finally:
        for sender in senders:
            sender.stop()


def wait_for_more(senders: list[Sender], number: int) -> None:
    """Wait until each sender has this many more acknowledged batches."""
    before = [sender.acknowledged for sender in senders]

    def all_have() -> bool:
        return all(sender.acknowledged >= earlier + number for sender, earlier in zip(senders, before, strict=True))

    eventually(f"{number} more batches of each", all_have, 120)


def check_backup_and_restore(folder: Path, url: str, restored: str, environment: dict[str, str]) -> None:
    """Back up the store at `url` during ingest, restore it to `restored`, and check its content."""
    backup, trail = folder / "backup.file", folder / "trail.jsonl"
    with LiveService(folder, {"FORESHOCK_DATABASE_URL": url, **environment}) as service, service.client() as client:
        with ingest(service.url) as senders:
            wait_for_more(senders, 2)
            for _ in range(4):
                assert client.post("/v1/runs/run-0/commands", json=ORDER).status_code == 201
            cli("audit", "export", str(trail), "--url", service.url)
            before, exported = [(one.rank.boot, one.acknowledged) for one in senders], trail.read_bytes().splitlines()
            output = cli("store", "backup", str(backup), "--database-url", url)
            assert f"{backup.stat().st_size} bytes" in output
            wait_for_more(senders, 1)  # ingest continues after the backup
        assert [one.refused for one in senders] == [[]] * 6
    assert len(exported) >= 4
    assert "rows of the audit trail" in cli("store", "restore", str(backup), "--database-url", restored)
    with (
        LiveService(folder, {"FORESHOCK_DATABASE_URL": restored, **environment}) as service,
        service.client() as client,
    ):
        assert {run["run"] for run in client.get("/v1/runs").json()["runs"]} == {"run-0", "run-1", "run-2"}
        assert client.get("/v1/audit/export").content.splitlines()[: len(exported)] == exported
        # Batches acknowledged before the backup are in it: each is a duplicate when sent again.
        by_boot = {f"boot-{n}": FakeRank(run=f"run-{n % 3}", rank=n, boot=f"boot-{n}") for n in range(6)}
        sent = [(by_boot[boot], sequence) for boot, last in before for sequence in range(1, last + 1)]
        for rank, sequence in sent:
            assert post(client, rank.batch(rank.sample(sequence), sequence=sequence)).status_code == 200
        text = client.get("/metrics").text
        assert f'foreshock_service_batches_total{{result="duplicate"}} {len(sent)}\n' in text
        assert 'foreshock_service_batches_total{result="stored"} 0\n' in text
        # The restored store continues the audit trail of the earlier export.
        assert client.post("/v1/runs/run-1/commands", json=ORDER).status_code == 201
        last = cli("audit", "export", str(trail), "--url", service.url).rpartition("ends with row ")[2].strip()
    assert int(last) > len(exported)
    assert [json.loads(line)["sequence"] for line in trail.read_bytes().splitlines()] == [*range(1, int(last) + 1)]


@pytest.mark.full
def test_sqlite_store_is_backed_up_during_ingest_and_restored(tmp_path: Path) -> None:
    url, restored = f"sqlite:///{tmp_path}/foreshock.db", f"sqlite:///{tmp_path}/restored/foreshock.db"
    check_backup_and_restore(tmp_path, url, restored, {})


@pytest.mark.full
@pytest.mark.servers
def test_postgresql_store_is_backed_up_during_ingest_and_restored(
    tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, tools), os.environ["PATH"]]))
    url = asyncio.run(new_database(postgres))
    restored = asyncio.run(new_database(postgres))
    check_backup_and_restore(tmp_path, url, restored, {"FORESHOCK_MIGRATE": "true"})
    again = cli("store", "restore", str(tmp_path / "backup.file"), "--database-url", restored, fails=True)
    assert "has tables" in again


@pytest.mark.full
def test_backup_and_restore_never_overwrite_files(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    with LiveService(tmp_path, {"FORESHOCK_DATABASE_URL": url}):
        pass
    file = tmp_path / "backup.db"
    cli("store", "backup", str(file), "--database-url", url)
    assert "never overwrites a file" in cli("store", "backup", str(file), "--database-url", url, fails=True)
    assert "stop the service and move it away" in cli("store", "restore", str(file), "--database-url", url, fails=True)
    (tmp_path / "foreshock.db").unlink()
    (tmp_path / "foreshock.db-wal").write_bytes(b"of another file")
    assert "foreshock.db-wal exists" in cli("store", "restore", str(file), "--database-url", url, fails=True)
    assert "there is no file" in cli("store", "restore", str(tmp_path / "no"), "--database-url", url, fails=True)
    assert sorted(path.name for path in tmp_path.glob("*.partial*")) == []


def test_backup_of_older_schema_is_restored_and_checked(tmp_path: Path) -> None:
    """The service migrates the older schema when it starts, so restore and check must accept it."""
    golden_store.store_at(tmp_path / "old.backup")
    url = f"sqlite:///{tmp_path}/foreshock.db"
    checked = cli("store", "restore", str(tmp_path / "old.backup"), "--database-url", url)
    assert "rows of the audit trail" in checked
    assert cli("store", "check", "--database-url", url) == checked
    with LiveService(tmp_path):
        pass
    assert cli("store", "check", "--database-url", url) == checked


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nonsense", "is not an address; set it to sqlite:///"),
        ("postgresql://ann:secret@127.0.0.1:port/x", "is not an address; set it to sqlite:///"),
        ("mysql://ann:secret@127.0.0.1/x", "begins with 'mysql'"),
        ("sqlite:///{folder}/text.db", "not a database"),
        ("sqlite:///{folder}/text.db?mode=memory", "options after a ?"),
        ("sqlite:///:memory:", "does not name a file"),
        ("postgresql://ann:secret@127.0.0.1:9/x", "127.0.0.1"),
    ],
)
def test_unusable_store_is_reported_without_traceback_or_password(tmp_path: Path, url: str, sentence: str) -> None:
    (tmp_path / "text.db").write_text("this text is not a database")
    files = {"check": [], "backup": [str(tmp_path / "copy")], "restore": [str(tmp_path / "text.db")]}
    for command, file in files.items():
        result = CliRunner().invoke(app, ["store", command, *file, "--database-url", url.format(folder=tmp_path)])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit), result.exception  # an error message without a traceback
        assert "secret" not in result.output
        assert sentence in result.stderr or command != "check"
        assert [path.name for path in tmp_path.iterdir()] == ["text.db"]


def test_audit_export_continues_only_complete_file_of_same_store(tmp_path: Path) -> None:
    export, rank = tmp_path / "trail.jsonl", FakeRank(run="run-0")

    def ordered(client: httpx.Client, times: int) -> None:
        for _ in range(times):
            assert client.post("/v1/runs/run-0/commands", json=ORDER).status_code == 201

    with LiveService(tmp_path) as service, service.client() as client:
        service.post(rank.batch(rank.started()))
        ordered(client, 6)
        cli("audit", "export", str(export), "--url", service.url)
        assert "0 rows appended" in cli("audit", "export", str(export), "--url", service.url)
    whole = export.read_bytes()
    (other := tmp_path / "other").mkdir()
    with LiveService(other) as service, service.client() as client:
        for orders in (0, 8):
            service.post(rank.batch(rank.started()))
            ordered(client, orders)
            output = cli("audit", "export", str(export), "--url", service.url, fails=True)
            assert "is missing or differs" in output
    assert export.read_bytes() == whole
    export.write_bytes(whole[:-7])
    assert "delete that line and export again" in cli("audit", "export", str(export), fails=True)
    assert export.read_bytes() == whole[:-7]


@pytest.mark.full
@pytest.mark.promise("S21")
def test_database_files_and_backups_are_readable_only_by_owner(tmp_path: Path) -> None:
    def permissions(*names: str) -> set[str]:
        return {oct((tmp_path / name).stat().st_mode & 0o777) for name in names}

    url = f"sqlite:///{tmp_path}/foreshock.db"
    before = os.umask(0)
    try:
        (tmp_path / "foreshock.db").touch(0o666)  # created by an earlier build
        with LiveService(tmp_path) as service:
            service.post(FakeRank().batch(FakeRank().started()))
            assert permissions("foreshock.db", "foreshock.db-wal", "foreshock.db-shm") == {"0o600"}
            cli("store", "backup", str(tmp_path / "copy"), "--database-url", url)
        cli("store", "restore", str(tmp_path / "copy"), "--database-url", f"sqlite:///{tmp_path}/again.db")
        assert permissions("copy", "again.db") == {"0o600"}
        with LiveService(tmp_path, {"FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path}/new.db"}):
            assert permissions("new.db") == {"0o600"}
    finally:
        os.umask(before)
