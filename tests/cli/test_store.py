"""JSON output of `export`, `delete`, `audit export` and the `store` commands."""

import json
from pathlib import Path
from typing import Any

from tests.cli.typed import foreshock
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank, LiveService


def test_export_delete_audit_and_store_commands_report_json(tmp_path: Path) -> None:
    def json_of(*arguments: str) -> dict[str, Any]:
        done = foreshock(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout))

    store = f"sqlite:///{tmp_path}/foreshock.db"
    with LiveService(tmp_path, {"FORESHOCK_DATABASE_URL": store}) as live:
        rank = FakeRank(run="short", layers=2)
        ended = Finished(step=2, unix_seconds=1.0, status="completed")
        live.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=float("nan")), ended))
        worst = json_of("export", "short", "head.score_max", "--layer", "1", "--url", live.url)
        assert {point["worst_head"] in (0, 1, 2) for point in worst["points"]} == {True}
        assert json_of("export", "short", "run.loss", "--url", live.url) == {
            "run": "short",
            "metric": "run.loss",
            "layer": None,
            "head": None,
            "points": [
                {"step": 1, "low": 3.0, "high": 3.0, "last": 3.0},
                {"step": 2, "low": None, "high": None, "last": None},
            ],
        }
        declined = CliRunner().invoke(
            app, ["delete", "short", "--reason", "x", "--json", "--url", live.url], input="n\n"
        )
        assert declined.exit_code == 1
        assert "This cannot be undone" in declined.stderr
        assert "This cannot be undone" not in declined.stdout
        deleted = json_of("delete", "short", "--reason", "a try", "--yes", "--url", live.url)
        assert deleted == {"deleted": "short", "last_step": 2}
        trail = tmp_path / "trail.jsonl"
        first = json_of("audit", "export", str(trail), "--url", live.url)
    assert first["appended"] == first["rows"] == len(trail.read_text().splitlines()) > 0
    copy = tmp_path / "copy.db"
    saved = json_of("store", "backup", str(copy), "--database-url", store)
    assert saved == {"file": str(copy), "bytes": copy.stat().st_size}
    counts = json_of("store", "check", "--database-url", store)
    assert counts == {"runs": 0, "batches": 0, "audit_rows": first["rows"]}
    assert json_of("store", "restore", str(copy), "--database-url", f"sqlite:///{tmp_path}/again.db") == counts


def test_audit_export_reports_a_missing_token_file(tmp_path: Path) -> None:
    command = ["audit", "export", str(tmp_path / "trail.jsonl"), "--token-file", str(tmp_path / "missing")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert f"{tmp_path}/missing" in done.stderr
