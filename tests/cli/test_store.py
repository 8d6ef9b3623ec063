"""The store, its backup and its audit trail, told as JSON."""

import json
from pathlib import Path
from typing import Any

from tests.cli.typed import foreshock
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank, LiveService


def test_what_is_exported_deleted_and_verified_is_told_as_json_too(tmp_path: Path) -> None:
    def told(*words: str) -> dict[str, Any]:
        done = foreshock(*words, "--json")
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout))

    store = f"sqlite:///{tmp_path}/foreshock.db"
    with LiveService(tmp_path, {"FORESHOCK_DATABASE_URL": store}) as live:
        rank = FakeRank(run="short", layers=2)
        ended = Finished(step=2, unix_seconds=1.0, status="completed")
        live.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=float("nan")), ended))
        worst = told("export", "short", "head.score_max", "--layer", "1", "--url", live.url)
        assert {point["worst_head"] in (0, 1, 2) for point in worst["points"]} == {True}
        assert told("export", "short", "run.loss", "--url", live.url) == {
            "run": "short",
            "metric": "run.loss",
            "layer": None,
            "head": None,
            "points": [
                {"step": 1, "low": 3.0, "high": 3.0, "last": 3.0},
                {"step": 2, "low": None, "high": None, "last": None},
            ],
        }
        asked = CliRunner().invoke(app, ["delete", "short", "--reason", "x", "--json", "--url", live.url], input="n\n")
        assert asked.exit_code == 1
        assert "This cannot be undone" in asked.stderr
        assert "This cannot be undone" not in asked.stdout
        gone = told("delete", "short", "--reason", "a try", "--yes", "--url", live.url)
        assert gone == {"deleted": "short", "last_step": 2}
        trail = tmp_path / "trail.jsonl"
        first = told("audit", "export", str(trail), "--url", live.url)
    assert first["appended"] == first["rows"] == len(trail.read_text().splitlines()) > 0
    copy = tmp_path / "copy.db"
    saved = told("store", "backup", str(copy), "--database-url", store)
    assert saved == {"file": str(copy), "bytes": copy.stat().st_size}
    held = told("store", "check", "--database-url", store)
    assert held == {"runs": 0, "batches": 0, "audit_rows": first["rows"]}
    assert told("store", "restore", str(copy), "--database-url", f"sqlite:///{tmp_path}/again.db") == held


def test_the_file_of_a_token_is_read_for_the_audit_trail_too(tmp_path: Path) -> None:
    gone = ["audit", "export", str(tmp_path / "trail.jsonl"), "--token-file", str(tmp_path / "gone")]
    done = CliRunner().invoke(app, gone)
    assert done.exit_code == 1
    assert f"{tmp_path}/gone" in done.stderr
