"""Help, version, tokens, and error messages that every command shares."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.cli.typed import ROOT, TRACE, foreshock

from foreshock import __version__
from foreshock.cli import errors
from foreshock.cli.main import app
from foreshock.server.testing import LiveService


def test_help_lists_commands_and_suggests_foreshock_demo() -> None:
    output = foreshock("--help").output
    for command in ("demo", "serve", "doctor", "runs", "switch", "replay", "lab", "bench", "dashboards"):
        assert command in output
    assert "Start with foreshock demo" in output


def test_python_m_foreshock_prints_the_version_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", "--version"], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == foreshock("--version").output == f"foreshock {__version__}\n"


def test_unreachable_service_is_reported_with_the_command_that_starts_one() -> None:
    done = foreshock("runs", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "no service answers at http://127.0.0.1:9" in done.stderr
    assert "foreshock serve" in done.stderr


@pytest.mark.parametrize("arguments", [["runs"], ["replay", str(TRACE)], ["doctor"]])
def test_invalid_service_address_is_reported(arguments: list[str]) -> None:
    for url in ("http://[::1", "127.0.0.1:9"):
        done = foreshock(*arguments, "--url", url)
        assert f"{url} is not the address of a service" in (done.output + done.stderr).replace("\n", " ")
        assert done.exit_code == 1


def test_invalid_run_name_is_reported_on_one_line() -> None:
    done = foreshock("replay", str(TRACE), "--url", "http://127.0.0.1:9", "--run", "two words")
    assert done.exit_code == 1
    assert "'two words' is not an identifier; allowed are" in done.stderr
    assert done.stderr.count("\n") == 1


def test_unwritable_file_is_reported_without_an_error_number(tmp_path: Path) -> None:
    done = foreshock("dashboards", "generate", "--out", str(tmp_path / "file" / "boards"))
    assert done.exit_code == 0, "a missing folder is made"
    (tmp_path / "taken").touch()
    done = foreshock("dashboards", "generate", "--out", str(tmp_path / "taken" / "boards"))
    assert done.exit_code == 1
    assert f"foreshock: {tmp_path / 'taken'}" in done.stderr
    assert "cannot be used: " in done.stderr
    assert "Errno" not in done.stderr


def test_missing_extra_is_reported_with_its_install_command() -> None:
    """A process in which fastapi cannot be imported."""
    program = "import sys; sys.modules['fastapi'] = None; from foreshock.cli.main import app; app(['serve'])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "pip install '.[server]' in foreshock's clone" in done.stderr


WITHOUT_JSON = {"serve", "demo", "lab run", "lab corpus"}
"""Commands that write files or run until stopped, so they have no JSON output."""


def commands(command: Any, *name: str) -> Iterator[tuple[str, set[str]]]:
    """Full name and options of every command."""
    for part, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, *name, part)
    if not hasattr(command, "commands"):
        yield " ".join(name), {option for parameter in command.params for option in parameter.opts}


def test_help_is_not_truncated_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    truncated = [
        name for name, _ in commands(typer.main.get_command(app)) if "…" in foreshock(*name.split(), "--help").output
    ]
    assert not truncated


def test_every_command_has_json_output_listed_in_the_docs() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = " ".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    for name, options in commands(typer.main.get_command(app)):
        if name in WITHOUT_JSON:
            assert f"`{name}`" in page
            continue
        assert options & {"--json", "--report"}, name
        group = name.split()[0]
        assert f"`foreshock {name} " in rows or f"`foreshock {group} ... --json" in rows, name


@pytest.mark.full
def test_missing_and_wrong_tokens_have_different_errors_and_a_file_can_supply_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("the-right-token-of-all\n")
    with LiveService(tmp_path, {"FORESHOCK_TOKEN": "the-right-token-of-all"}) as live:
        assert foreshock("runs", "--url", live.url, "--token-file", str(file)).exit_code == 0
        with monkeypatch.context() as environment:
            environment.setenv("FORESHOCK_TOKEN_FILE", str(file))
            assert foreshock("runs", "--url", live.url).exit_code == 0
        none = foreshock("runs", "--url", live.url)
        wrong = foreshock("runs", "--url", live.url, "--token", "not-the-right-one-at-all")
    assert none.exit_code == wrong.exit_code == 1
    assert "needs a token" in none.stderr
    assert "set a token with --token" in none.stderr
    assert "does not know the token" in wrong.stderr
    assert "needs a token" not in wrong.stderr
    assert "not-the-right-one" not in wrong.stderr


def test_suggested_extra_installs_the_missing_module() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()
    for module, extra in errors._EXTRAS.items():
        names = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
        installed = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in extras[extra]}
        assert names & installed, f"the extra {extra} does not install {module}"
