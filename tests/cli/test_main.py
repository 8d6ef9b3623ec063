"""What a person types first, and the sentence that comes back, good input or bad."""

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


def test_help_names_every_command_and_the_first_one_to_type() -> None:
    said = foreshock("--help").output
    for command in ("demo", "serve", "doctor", "runs", "switch", "replay", "lab", "bench", "dashboards"):
        assert command in said
    assert "Start with foreshock demo" in said


def test_the_module_is_the_command_and_its_version_the_package_s() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", "--version"], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == foreshock("--version").output == f"foreshock {__version__}\n"


def test_a_service_that_is_down_is_a_sentence() -> None:
    done = foreshock("runs", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "no service answers at http://127.0.0.1:9" in done.stderr
    assert "foreshock serve" in done.stderr


@pytest.mark.parametrize("words", [["runs"], ["replay", str(TRACE)], ["doctor"]])
def test_what_is_no_address_of_a_service_is_a_sentence(words: list[str]) -> None:
    for url in ("http://[::1", "127.0.0.1:9"):
        done = foreshock(*words, "--url", url)
        assert f"{url} is not the address of a service" in (done.output + done.stderr).replace("\n", " ")
        assert done.exit_code == 1


def test_a_name_that_no_run_can_have_is_a_sentence_on_one_line() -> None:
    done = foreshock("replay", str(TRACE), "--url", "http://127.0.0.1:9", "--run", "two words")
    assert done.exit_code == 1
    assert "'two words' is not an identifier; allowed are" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_extra_names_the_install_command() -> None:
    """The service's half is hidden from a real process."""
    hide = "import sys; sys.modules['fastapi'] = None; from foreshock.cli.main import app; app(['serve'])"
    done = subprocess.run([sys.executable, "-P", "-c", hide], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "pip install '.[server]' in foreshock's clone" in done.stderr


WITHOUT_AN_ANSWER = {"serve", "demo", "lab run", "lab corpus"}
"""Their files say it all."""


def leaves(command: Any, *name: str) -> Iterator[tuple[str, set[str]]]:
    """Every command by its whole name, with its options."""
    for part, own in getattr(command, "commands", {}).items():
        yield from leaves(own, *name, part)
    if not hasattr(command, "commands"):
        yield " ".join(name), {option for given in command.params for option in given.opts}


def test_no_help_is_cut_at_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    cut = [name for name, _ in leaves(typer.main.get_command(app)) if "…" in foreshock(*name.split(), "--help").output]
    assert not cut


def test_every_command_answers_in_json_whose_shape_is_documented() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = " ".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    for name, options in leaves(typer.main.get_command(app)):
        if name in WITHOUT_AN_ANSWER:
            assert f"`{name}`" in page
            continue
        assert options & {"--json", "--report"}, name
        group = name.split()[0]
        assert f"`foreshock {name} " in rows or f"`foreshock {group} ... --json" in rows, name


@pytest.mark.full
def test_no_token_and_a_wrong_one_read_differently_and_a_file_may_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("the-right-one-of-all\n")
    with LiveService(tmp_path, {"FORESHOCK_TOKEN": "the-right-one-of-all"}) as live:
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


def test_a_missing_module_names_an_extra_that_brings_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()
    for module, extra in errors._EXTRAS.items():
        names = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
        brought = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in extras[extra]}
        assert names & brought, f"the extra {extra} does not bring {module}"
