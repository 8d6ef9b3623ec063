"""What the documents name is there: files, tests, promises, public names, commands; generated pages name what they
must, and docs/models.md the tests that serve a model in a mode."""

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
from tests.loading import module_at

import foreshock
from foreshock import callbacks, client
from foreshock.cli.main import app
from foreshock.kernels import flash_attention
from foreshock.monitor.config import AgentConfig
from foreshock.server.settings import Settings

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src/foreshock"
DOCS = module_at(ROOT / "scripts" / "generate_docs.py")


def documents() -> list[Path]:
    pages = [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "src", "tests") for page in (ROOT / folder).rglob("*.md")),
    ]
    return [page for page in pages if "node_modules" not in page.parts]


def test_every_file_that_a_document_links_to_is_there() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in documents()
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not target.startswith(("http:", "https:")) and not (page.parent / target).exists()
    ]
    assert len(documents()) > 20
    assert lost == []


def test_every_test_that_a_document_names_is_there() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in files}
    known |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {(page, name) for page in documents() for name in re.findall(r"\btest_\w+", page.read_text())}
    assert named
    assert sorted(f"{page.relative_to(ROOT)}: {name}" for page, name in named if name not in known) == []


def test_the_reference_describes_every_public_name_from_its_docstring() -> None:
    """A class or function stands under the name that it has at home, which is what Sphinx reads."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)(?:\(.*\))?$", page, re.MULTILINE))
    public = [
        *(getattr(foreshock, name) for name in ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach")),
        *(getattr(callbacks, name) for name in dir(callbacks) if name[0] != "_"),
        *(value for name, value in vars(client).items() if name[0] != "_" and inspect.isclass(value)),
        *(
            getattr(flash_attention, name)
            for name in flash_attention.__all__
            if name not in ("Numerics", "CausalAlignment")
        ),
    ]
    ours = [value for value in public if value.__module__.startswith("foreshock.")]
    assert len(ours) >= 14
    assert {f"{value.__module__}.{value.__qualname__}" for value in ours} <= described
    assert {f"foreshock.kernels.flash_attention.spec.{name}" for name in ("Numerics", "CausalAlignment")} <= described
    assert [value for value in ours if len((value.__doc__ or "").split()) < 8] == []
    members = set(re.search(r"agent\.Agent\n   :members: (.*)", page)[1].split(", "))  # type: ignore[index]
    assert members == {name for name in vars(foreshock.Agent) if name[0] != "_"}


def test_the_files_that_the_design_names_for_each_addition_and_on_each_way_through_the_code_are_there() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    additions, ways = (
        design.split(f"## {title}")[1].split("\n## ")[0]
        for title in ("To add something", "Three ways through the code")
    )
    rows = dict(re.findall(r"^\| (?:a|an) (\w+)[^|]*\|(.*)\|$", additions, re.MULTILINE))
    others = ("cause", "order", "attention", "mode", "callback", "alert", "setting")
    assert tuple(rows) == ("statistic", "metric", "condition", *others)
    named = {what: re.findall(r"`((?:[a-z]+/)+[\w./-]*)`", files) for what, files in rows.items()}
    assert all(named.values())
    drawn = re.findall(r"(?:[a-z_]+/)+[a-z_]+\.py", ways)
    assert len(set(drawn)) > 30
    every = {name for names in (*named.values(), drawn) for name in names}
    assert [name for name in every if not ((CODE / name).exists() or (ROOT / name).exists())] == []


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    parts = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    promised = [promise for part in parts.values() for promise in part]
    assert set(DOCS.proofs()) == set(promised)
    for letter, group in groupby(promised, key=lambda promise: promise[0]):
        numbers = [int(promise[1:]) for promise in group]
        assert numbers == sorted(set(numbers)), f"promises {letter} have the numbers {numbers}"


def test_every_setting_of_agent_and_service_has_a_row_with_its_variable() -> None:
    page = "\n".join(DOCS.settings())
    for name in AgentConfig.model_fields:
        assert re.search(rf"^\| `{name}[.`].*`FORESHOCK_{name.upper()}`", page, re.MULTILINE), name
    for variable in Settings.variables():
        assert f"`{variable.removesuffix('_FILE')}`" in page  # the page says of which it may be a file


def test_every_command_and_every_option_is_explained() -> None:
    page = "\n".join(DOCS.commands())
    named = re.findall(r"^\* `(.*?)`(?:: (.*))?$", page, re.MULTILINE)
    assert len(named) > 100
    assert [name for name, meaning in named if len(re.findall(r"[a-z]{2,}", meaning)) < 2] == []


def test_every_picture_is_shown() -> None:
    there = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {name for page in documents() for name in re.findall(r"images/([a-z-]+)\.png", page.read_text())} == there


LAB: Final = ROOT / "src" / "foreshock" / "lab"
CITING: Final = [
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
    known = options_of(found) | {"--help"}
    return next((word for word in rest if word.startswith("--") and word.partition("=")[0] not in known), None)


def options_of(command: Any) -> set[str]:
    """Of a command, or of a group and all that is in it."""
    own = {option for given in command.params for option in (*given.opts, *given.secondary_opts)}
    return own.union(*(options_of(part) for part in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", CITING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    assert {command: what for command in cited(page) if (what := missing(command)) is not None} == {}


def test_a_command_that_is_gone_is_found() -> None:
    assert missing("foreshock lab no-such-study x.gz") == "no-such-study"
    assert missing("foreshock lab score x.gz --no-such-option") == "--no-such-option"
    assert missing("python -P -m foreshock.lab.no_such_study") == "foreshock.lab.no_such_study"
    assert missing("pytest tests/no_such_test.py") == "tests/no_such_test.py"
    assert missing("make no-such-target") == "no-such-target"
    assert sum(len(list(cited(page))) for page in CITING) >= 50


MODELS = (ROOT / "docs" / "models.md").read_text()
COLLECT = """
import json, sys, pytest

class Marks:
    def pytest_collection_finish(self, session):
        served = set()
        for item in session.items:
            wanted = " ".join(mark.kwargs["reason"] for mark in item.iter_markers("skipif"))
            place = "GPU" if "a CUDA device" in wanted or "a GPU" in wanted else "CPU"
            served |= {(*mark.args, place) for mark in item.iter_markers("execution")}
        print("SERVED", json.dumps(sorted(served)))

given = ["--collect-only", "-qq", "--tier", "full", "-m", "execution", "-p", "no:cacheprovider", "tests/monitor"]
sys.exit(pytest.main(given, plugins=[Marks()]))
"""


@pytest.mark.full
def test_the_table_of_modes_has_a_place_for_every_mark_of_a_test_and_no_other() -> None:
    """In a process of its own: it collects tests."""
    command = [sys.executable, "-P", "-c", COLLECT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    marked = {tuple(each) for each in json.loads(done.stdout.partition("SERVED ")[2].splitlines()[0])}
    every = re.search(r"\*Every model\* means ([^.]+)\.", MODELS)[1].replace(" and ", ", ")  # type: ignore[index]
    rows = re.findall(
        r"^\| ([^|]+?) \|([^|]*)\|([^|]*)\|$", MODELS.partition("|---")[2].partition("\n\n")[0], re.MULTILINE
    )
    told = {
        (model, mode, place)
        for mode, *cells in rows
        for place, cell in zip(("CPU", "GPU"), cells, strict=True)
        for model in cell.replace("every model", every).strip().split(", ")
        if model
    }
    assert told == marked


def test_the_zoo_is_counted_as_its_record_says() -> None:
    records = json.loads((ROOT / "src/foreshock/benchmarks" / "results" / "zoo.json").read_text())
    keep, kernels = (
        [how for record in records for how in record["layers"].get(way, {}).values()] for way in ("keep", "kernels")
    )
    wrong, refused = (sum(bool(record[what]) for record in records) for what in ("wrong", "refused"))
    counted = f"{keep.count('counted')} of them measured with `keep` and {kernels.count('counted')} with `kernels`"
    modules = max(len(keep), len(kernels))
    assert f"{len(records)} entries, {modules} modules with attention, {counted}; " in MODELS
    assert (
        f"; {wrong} entries wrong, {refused} without supported attention, which `attach` reported in a sentence"
        in MODELS
    )
