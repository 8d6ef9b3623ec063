"""Every command that a page names, in a sentence or a block, exists at this commit, unless the sentence names another
commit."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from foreshock.cli.main import app

ROOT: Final = Path(__file__).parents[1]
LAB: Final = ROOT / "src" / "foreshock" / "lab"
PAGES: Final = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(LAB / name for name in ("README.md", "traces/README.md")),
    ROOT / "src" / "foreshock" / "kernels" / "flash_attention" / "README.md",
    ROOT / "src" / "foreshock" / "server" / "ui" / "README.md",
]
SPAN: Final = re.compile(r"`((?:[A-Z_]+=\S* )*(?:foreshock|python -P|python|pytest|make) [^`]+)`([^`]{0,40})")
COMMANDS: Final[Any] = typer.main.get_command(app)


def cited(page: Path) -> Iterator[str]:
    """The commands that a page names and does not say to be another commit's; a line of a block without its comment."""
    text = page.read_text()
    for command, after in SPAN.findall(text):
        if "at commit" not in after.split(".")[0].split(",")[0]:
            yield command
    for language, block in re.findall(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in re.sub(r"\$\([^)]*\)", "VALUE", block.replace("\\\n", " ")).splitlines():
            if re.match(r"(?:[A-Z_]+=\S* )*foreshock ", line):
                yield re.split(r" [#>&|<]", line)[0]


def missing(command: str) -> str | None:
    """What of a command does not exist; None where all of it does."""
    words = [word for word in shlex.split(command.replace("...", "")) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((word for word in words[1:] if word not in targets and "=" not in word), None)
    if words[0] in ("pytest", "python"):
        words = [word for word in words if word != "-P"]
        if words[:3] == ["python", "-m", "foreshock"] or words[:3] == ["python", "-m", "pytest"]:
            words = words[2:]
        elif words[:2] == ["python", "-m"]:
            return None if importlib.util.find_spec(words[2]) else words[2]
    if words[0] != "foreshock":
        paths = [word.partition("::")[0] for word in words[1:] if "/" in word or word.endswith(".py")]
        return next((path for path in paths if not (ROOT / path).exists()), None)
    found = COMMANDS
    rest = words[1:]
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return rest[0]
        found, rest = found.commands[rest[0]], rest[1:]
    known = options(found) | {"--help"}
    return next((word for word in rest if word.startswith("--") and word.partition("=")[0] not in known), None)


def options(command: Any) -> set[str]:
    """Of a command, or of a group and all that is in it."""
    own = {option for given in command.params for option in (*given.opts, *given.secondary_opts)}
    return own.union(*(options(part) for part in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    assert {command: what for command in cited(page) if (what := missing(command)) is not None} == {}


def test_a_command_that_is_gone_is_found() -> None:
    assert missing("foreshock lab no-such-study x.gz") == "no-such-study"
    assert missing("foreshock lab score x.gz --no-such-option") == "--no-such-option"
    assert missing("python -P -m foreshock.lab.no_such_study") == "foreshock.lab.no_such_study"
    assert missing("pytest tests/no_such_test.py") == "tests/no_such_test.py"
    assert missing("make no-such-target") == "no-such-target"
    assert sum(len(list(cited(page))) for page in PAGES) >= 50
