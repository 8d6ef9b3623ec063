"""The documents name only existing files, tests, promises, public names and commands; generated pages are complete, and
docs/models.md lists the models and modes that tests cover."""

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


def test_linked_files_exist() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in documents()
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not target.startswith(("http:", "https:")) and not (page.parent / target).exists()
    ]
    assert len(documents()) > 20
    assert broken == []


def test_test_names_in_documents_exist() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in files}
    known |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {(page, name) for page in documents() for name in re.findall(r"\btest_\w+", page.read_text())}
    assert named
    assert sorted(f"{page.relative_to(ROOT)}: {name}" for page, name in named if name not in known) == []


def test_python_reference_describes_every_public_name() -> None:
    """A class or function is listed under the module that defines it, because Sphinx reads it there."""
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
    own_objects = [value for value in public if value.__module__.startswith("foreshock.")]
    assert len(own_objects) >= 14
    assert {f"{value.__module__}.{value.__qualname__}" for value in own_objects} <= described
    assert {f"foreshock.kernels.flash_attention.spec.{name}" for name in ("Numerics", "CausalAlignment")} <= described
    assert [value for value in own_objects if len((value.__doc__ or "").split()) < 8] == []
    members = set(re.search(r"agent\.Agent\n   :members: (.*)", page)[1].split(", "))  # type: ignore[index]
    assert members == {name for name in vars(foreshock.Agent) if name[0] != "_"}


def test_files_named_in_the_design_document_exist() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    additions, flows = (
        design.split(f"## {title}")[1].split("\n## ")[0]
        for title in ("To add something", "Three ways through the code")
    )
    rows = dict(re.findall(r"^\| (?:a|an) (\w+)[^|]*\|(.*)\|$", additions, re.MULTILINE))
    others = ("cause", "order", "attention", "mode", "callback", "alert", "setting")
    assert tuple(rows) == ("statistic", "metric", "condition", *others)
    named = {what: re.findall(r"`((?:[a-z]+/)+[\w./-]*)`", files) for what, files in rows.items()}
    assert all(named.values())
    in_flows = re.findall(r"(?:[a-z_]+/)+[a-z_]+\.py", flows)
    assert len(set(in_flows)) > 30
    paths = {name for names in (*named.values(), in_flows) for name in names}
    assert [name for name in paths if not ((CODE / name).exists() or (ROOT / name).exists())] == []


def test_every_promise_has_a_test_and_every_promise_mark_is_listed() -> None:
    parts = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    promised = [promise for part in parts.values() for promise in part]
    assert set(DOCS.proofs()) == set(promised)
    for letter, group in groupby(promised, key=lambda promise: promise[0]):
        numbers = [int(promise[1:]) for promise in group]
        assert numbers == sorted(set(numbers)), f"promises {letter} have the numbers {numbers}"


def test_every_setting_is_documented_with_its_environment_variable() -> None:
    page = "\n".join(DOCS.settings())
    for name in AgentConfig.model_fields:
        assert re.search(rf"^\| `{name}[.`].*`FORESHOCK_{name.upper()}`", page, re.MULTILINE), name
    for variable in Settings.variables():
        assert f"`{variable.removesuffix('_FILE')}`" in page  # the page marks variables that may name a file


def test_every_command_and_option_has_a_description() -> None:
    page = "\n".join(DOCS.commands())
    named = re.findall(r"^\* `(.*?)`(?:: (.*))?$", page, re.MULTILINE)
    assert len(named) > 100
    assert [name for name, meaning in named if len(re.findall(r"[a-z]{2,}", meaning)) < 2] == []


def test_every_image_is_used_and_every_used_image_exists() -> None:
    existing = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {name for page in documents() for name in re.findall(r"images/([a-z-]+)\.png", page.read_text())} == existing


LAB: Final = ROOT / "src" / "foreshock" / "lab"
PAGES_WITH_COMMANDS: Final = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(LAB / name for name in ("README.md", "traces/README.md")),
    ROOT / "src" / "foreshock" / "kernels" / "flash_attention" / "README.md",
    ROOT / "src" / "foreshock" / "server" / "ui" / "README.md",
]
SPAN: Final = re.compile(r"`((?:[A-Z_]+=\S* )*(?:foreshock|python -P|python|pytest|make) [^`]+)`([^`]{0,40})")
COMMANDS: Final[Any] = typer.main.get_command(app)


def commands_in(page: Path) -> Iterator[str]:
    """The commands in a page, except those of another commit; lines of code blocks without their comment."""
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


def missing_part(command: str) -> str | None:
    """The part of a command that does not exist; None if all parts exist."""
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
    """Options of a command, or of a group and all its commands."""
    own = {option for given in command.params for option in (*given.opts, *given.secondary_opts)}
    return own.union(*(options_of(part) for part in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_documents_exist(page: Path) -> None:
    assert {command: what for command in commands_in(page) if (what := missing_part(command)) is not None} == {}


def test_missing_commands_and_options_are_detected() -> None:
    assert missing_part("foreshock lab no-such-study x.gz") == "no-such-study"
    assert missing_part("foreshock lab score x.gz --no-such-option") == "--no-such-option"
    assert missing_part("python -P -m foreshock.lab.no_such_study") == "foreshock.lab.no_such_study"
    assert missing_part("pytest tests/no_such_test.py") == "tests/no_such_test.py"
    assert missing_part("make no-such-target") == "no-such-target"
    assert sum(len(list(commands_in(page))) for page in PAGES_WITH_COMMANDS) >= 50


MODELS = (ROOT / "docs" / "models.md").read_text()
COLLECT = """
import json, sys, pytest

class Marks:
    def pytest_collection_finish(self, session):
        marked = set()
        for item in session.items:
            wanted = " ".join(mark.kwargs["reason"] for mark in item.iter_markers("skipif"))
            place = "GPU" if "a CUDA device" in wanted or "a GPU" in wanted else "CPU"
            marked |= {(*mark.args, place) for mark in item.iter_markers("execution")}
        print("MARKED", json.dumps(sorted(marked)))

given = ["--collect-only", "-qq", "--tier", "full", "-m", "execution", "-p", "no:cacheprovider", "tests/monitor"]
sys.exit(pytest.main(given, plugins=[Marks()]))
"""


@pytest.mark.full
def test_mode_table_matches_the_execution_marks_of_the_tests() -> None:
    """In a separate process, because it collects tests."""
    command = [sys.executable, "-P", "-c", COLLECT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    marked = {tuple(each) for each in json.loads(done.stdout.partition("MARKED ")[2].splitlines()[0])}
    all_models = re.search(r"\*Every model\* means ([^.]+)\.", MODELS)[1].replace(" and ", ", ")  # type: ignore[index]
    rows = re.findall(
        r"^\| ([^|]+?) \|([^|]*)\|([^|]*)\|$", MODELS.partition("|---")[2].partition("\n\n")[0], re.MULTILINE
    )
    documented = {
        (model, mode, place)
        for mode, *cells in rows
        for place, cell in zip(("CPU", "GPU"), cells, strict=True)
        for model in cell.replace("every model", all_models).strip().split(", ")
        if model
    }
    assert documented == marked


def test_zoo_counts_in_the_models_document_match_the_results() -> None:
    records = json.loads((ROOT / "src/foreshock/benchmarks" / "results" / "zoo.json").read_text())
    keep, kernels = (
        [status for record in records for status in record["layers"].get(way, {}).values()]
        for way in ("keep", "kernels")
    )
    wrong, refused = (sum(bool(record[what]) for record in records) for what in ("wrong", "refused"))
    counted = f"{keep.count('counted')} of them measured with `keep` and {kernels.count('counted')} with `kernels`"
    modules = max(len(keep), len(kernels))
    assert f"{len(records)} entries, {modules} modules with attention, {counted}; " in MODELS
    assert (
        f"; {wrong} entries wrong, {refused} without supported attention, which `attach` reported in a sentence"
        in MODELS
    )
