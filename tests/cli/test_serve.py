"""`foreshock serve` reports why it cannot start, without printing secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.typed import foreshock

from foreshock.server.testing import LiveService


def serve_with(variables: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a real `foreshock serve` that cannot start."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", "serve"],
        env={**os.environ, "FORESHOCK_PORT": "0", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


HASHED = '{"name": "%s", "sha256": "%s", "scopes": ["read"]}'


@pytest.mark.parametrize(
    ("variables", "message", "secret"),
    [
        ({"FORESHOCK_TOKEN": "horse-staple"}, "FORESHOCK_TOKEN", "horse-staple"),
        (
            {"FORESHOCK_TOKENS": f"[{', '.join([HASHED % ('ann', 'beef' * 16)] * 2)}]", "FORESHOCK_TOKEN": "long" * 5},
            "same name",
            "beefbeef",
        ),
        ({"FORESHOCK_TOKENS": f"[{HASHED % ('ann', 'in-clear-by-mistake')}]"}, "FORESHOCK_TOKENS", "in-clear"),
        ({"FORESHOCK_TOKENS": '[{"name": "cut-off'}, "FORESHOCK_TOKENS", "cut-off"),
        (
            {"FORESHOCK_NOTIFY_SLACK_URL": "https://chat.example/services/T01/B02/tail-of-the-address"},
            "chat.example is not allowed",
            "tail-of",
        ),
        ({"FORESHOCK_NOTIFY_WEBHOOK_URL": "https://chat.example:b:c/tail-of-the-address"}, "cannot be read", "tail-of"),
        ({"FORESHOCK_TOKEN": "long-enough-secret", "FORESHOCK_RETENTION_SECOND": "9"}, "did you mean", "long-enough"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_serve_reports_invalid_settings_without_printing_secrets(
    variables: dict[str, str], message: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = foreshock("serve", "--port", "0")
    output = done.output + done.stderr
    assert done.exit_code == 1
    assert message in output
    assert secret not in output
    assert "Traceback" not in output
    assert "pydantic" not in output, "the message names the validation library instead of the problem"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FORESHOCK_TOKENS", "{}", 'FORESHOCK_TOKENS: use a JSON list such as ["a", "b"]'),
        ("FORESHOCK_TOKENS", '["cluster"]', "FORESHOCK_TOKENS (0): use a JSON object"),
        ("FORESHOCK_TOKENS", f"[{HASHED % ('ann', 'BEEF' * 16)}]", "(0.sha256): use 64 characters of 0-9 a-f"),
        ("FORESHOCK_PORT", "tcp://10.0.0.7:80", "FORESHOCK_PORT: Input should be a valid integer"),
    ],
)
def test_serve_describes_the_expected_form_of_an_invalid_setting(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = foreshock("serve")
    assert done.exit_code == 1
    assert message in done.stderr


def test_serve_reports_a_database_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    there = f"{tmp_path}/file/foreshock.db"
    done = foreshock("serve", "--port", "0", "--database-url", f"sqlite:///{there}")
    assert done.exit_code == 1
    assert f"({there}); the service's user must be able to write the file and its folder" in done.stderr
    assert "Errno" not in done.stderr


def test_second_service_on_one_sqlite_file_is_rejected_until_the_first_stops(tmp_path: Path) -> None:
    with LiveService(tmp_path) as first:
        status, output = serve_with({"FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path}/foreshock.db"}, tmp_path)
        assert status == 1
        assert "another service already uses" in output
        assert "Traceback" not in output
        with first.client() as client:
            assert client.get("/readyz").status_code == 200
    with LiveService(tmp_path) as later, later.client() as client:
        assert client.get("/readyz").status_code == 200
