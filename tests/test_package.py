"""What is built is what people install: every room and its data files, extras that keep the two sides apart; and what
`import foreshock` gives, and must not bring."""

import ast
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import foreshock
from foreshock import callbacks, monitor
from foreshock.monitor import AgentConfig
from foreshock.monitor.config import AgentSettings

ROOT = Path(__file__).parents[1]
ROOMS = ("contract", "kernels", "monitor", "server", "dashboards", "lab", "cli")
CHECKOUT = ("benchmarks/", "cli/research/", "lab/scoring/", "server/testing/")
"""What research and tests need, and no user of the wheel."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist made from what git tracks, with text files in place of links, and the wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    archive = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, check=True, input=files, capture_output=True
    ).stdout
    subprocess.run(["tar", "--extract"], cwd=tree, check=True, input=archive)
    for part in ROOT.iterdir():
        if part.is_symlink():  # as Windows and some archive tools leave a link
            (tree / part.name).unlink()
            (tree / part.name).write_text(str(part.readlink()))
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        check=True,
        capture_output=True,
    )
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("foreshock-*.whl")))


def tracked(pattern: str) -> list[str]:
    """Files of git whose path below src/foreshock/ matches, as the wheel names them within foreshock/."""
    listed = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT / "src/foreshock", check=True, capture_output=True, text=True
    )
    return listed.stdout.split()


def test_the_wheel_holds_every_module_of_every_room_and_none_of_a_checkout(wheel: zipfile.ZipFile) -> None:
    names = {name.removeprefix("foreshock/") for name in wheel.namelist()}
    for room in ROOMS:
        missing = {path for path in tracked(f"{room}/*.py") if not path.startswith(CHECKOUT)} - names
        assert not missing
    assert not [name for name in names if name.startswith(CHECKOUT)]
    assert all(tracked(f"{folder}*.py") for folder in CHECKOUT)


def test_nothing_in_the_wheel_imports_what_only_a_checkout_has(wheel: zipfile.ZipFile) -> None:
    outside = tuple(f"foreshock.{folder[:-1].replace('/', '.')}" for folder in CHECKOUT)
    wrong = {}
    for name in wheel.namelist():
        if name.endswith(".py"):
            tree = ast.walk(ast.parse(wheel.read(name)))
            modules = [f"{n.module}.{a.name}" for n in tree if isinstance(n, ast.ImportFrom) for a in n.names]
            wrong[name] = [module for module in modules if module.startswith(outside)]
    assert {name for name, modules in wrong.items() if modules} == {"foreshock/cli/main.py"}  # where it is found


def test_the_wheels_own_command_has_neither_the_laboratory_nor_benchmarks(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    command = [sys.executable, "-P", "-m", "foreshock"]
    environment = {"PATH": "", "PYTHONPATH": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run([*command, "--help"], env=environment, check=True, capture_output=True, text=True)
    assert "diagnose" in done.stdout
    for group in ("lab", "bench"):
        refused = subprocess.run([*command, group], env=environment, check=False, capture_output=True, text=True)
        assert refused.returncode == 2
        assert f"No such command '{group}'" in refused.stderr


def test_the_wheel_is_small_and_holds_what_the_product_shows_and_nothing_of_tests_or_studies(
    built: Path, wheel: zipfile.ZipFile
) -> None:
    names = set(wheel.namelist())
    page = {f"foreshock/{path}" for path in tracked("server/ui/dist/*")}
    boards = {f"foreshock/{path}" for path in tracked("dashboards/generated/*")}
    assert {"foreshock/py.typed", "foreshock/server/ui/dist/index.html"} | page | boards <= names
    assert next(built.glob("foreshock-*.whl")).stat().st_size <= 2 * 2**20
    recorded = {name for name in names if name.endswith(".gz")}
    assert recorded == {f"foreshock/{path}" for path in tracked("lab/shown/*.gz")} != set()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"foreshock"}


def test_extras_give_the_trainer_no_web_server_and_the_service_no_torch(wheel: zipfile.ZipFile) -> None:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requires = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist") or []
    of = {
        extra: [r for r in requires if f'extra == "{extra}"' in r.replace("'", '"')]
        for extra in ("agent", "server", "grafana", "demo", "dev")
    }
    base = [r for r in requires if "extra ==" not in r]
    assert all(of.values())
    heavy = ("torch", "triton", "fastapi", "uvicorn", "sqlalchemy", "prometheus-client", "grafana-api")
    assert not [r for r in base if r.lower().startswith(heavy)]
    assert not [r for r in of["agent"] if r.lower().startswith(("fastapi", "uvicorn", "sqlalchemy"))]
    assert not [r for r in of["server"] if r.lower().startswith(("torch", "triton"))]


def test_the_names_that_programs_use_are_those_of_the_agent() -> None:
    for name in ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach"):
        assert getattr(foreshock, name) is getattr(monitor, name)


@pytest.mark.parametrize("package", [foreshock, monitor])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"'watch'.*attach, detach"):
        getattr(package, "wat" + "ch")
    with pytest.raises(AttributeError, match=r"'KerasCallback'; it has TransformersCallback, LightningCallback"):
        getattr(callbacks, "Keras" + "Callback")


def test_no_module_of_the_agent_stands_in_the_place_of_a_name_that_it_hands_on() -> None:
    modules = {module.name for module in iter_modules(monitor.__path__)}
    assert "attaching" in modules
    assert not modules & set(dir(monitor))


def test_the_package_and_its_modules_are_found_without_torch() -> None:
    check = (
        "import sys, foreshock; assert 'foreshock.monitor' not in sys.modules; foreshock.client.Service; "
        "foreshock.callbacks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", check], check=False).returncode == 0


def test_callbacks_are_those_of_the_trainers() -> None:
    from foreshock.monitor.callbacks import accelerate, huggingface, lightning, torchtitan

    assert callbacks.TransformersCallback is huggingface.ForeshockCallback
    assert callbacks.LightningCallback is lightning.ForeshockCallback
    assert callbacks.AccelerateTracker is accelerate.ForeshockTracker
    assert callbacks.watch_torchtitan is torchtitan.watch


def test_names_that_are_looked_up_late_are_listed_all_the_same() -> None:
    """What a notebook completes after `foreshock.` comes from here."""
    names = {"Agent", "AgentConfig", "Assessment", "assess", "attach", "detach", "callbacks", "client", "__version__"}
    assert set(dir(foreshock)) == names
    assert dir(callbacks) == ["AccelerateTracker", "LightningCallback", "TransformersCallback", "watch_torchtitan"]


@pytest.mark.parametrize("name", ["foreshock.attach", "foreshock.callbacks.watch_torchtitan"])
def test_without_pytorch_the_names_of_the_agent_say_what_to_install(name: str) -> None:
    check = f"import sys; sys.modules['torch'] = None; import foreshock; {name}"
    done = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: foreshock's agent needs PyTorch")
    assert "pip install '.[agent]' in foreshock's clone" in done.stderr


def test_the_keywords_that_editors_complete_are_the_settings_of_the_agent() -> None:
    assert AgentSettings.__optional_keys__ == frozenset(AgentConfig.model_fields)


def test_windows_is_refused_with_what_to_use_there() -> None:
    program = "import sys; sys.platform = 'win32'; import foreshock"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: foreshock runs on Linux and macOS; on Windows use the Windows Subsystem for Linux"
    )
