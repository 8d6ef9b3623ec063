"""The built wheel: all subpackages with their data files, and extras that separate agent and service. Also the names
that `import foreshock` provides, without importing PyTorch."""

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
PACKAGES = ("contract", "kernels", "monitor", "server", "dashboards", "lab", "cli")
CHECKOUT_ONLY = ("benchmarks/", "cli/research/", "lab/scoring/", "server/testing/")
"""Folders for research and tests, which the wheel excludes."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tracked files, with text files instead of symbolic links, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    archive = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, check=True, input=files, capture_output=True
    ).stdout
    subprocess.run(["tar", "--extract"], cwd=tree, check=True, input=archive)
    for part in ROOT.iterdir():
        if part.is_symlink():  # as Windows and some archive tools write a symbolic link
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
    """Tracked files whose path below src/foreshock/ matches; their paths in the wheel, relative to foreshock/."""
    listed = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT / "src/foreshock", check=True, capture_output=True, text=True
    )
    return listed.stdout.split()


def test_wheel_has_every_module_except_checkout_only_folders(wheel: zipfile.ZipFile) -> None:
    names = {name.removeprefix("foreshock/") for name in wheel.namelist()}
    for subpackage in PACKAGES:
        missing = {path for path in tracked(f"{subpackage}/*.py") if not path.startswith(CHECKOUT_ONLY)} - names
        assert not missing
    assert not [name for name in names if name.startswith(CHECKOUT_ONLY)]
    assert all(tracked(f"{folder}*.py") for folder in CHECKOUT_ONLY)


def test_wheel_modules_do_not_import_checkout_only_modules(wheel: zipfile.ZipFile) -> None:
    checkout_modules = tuple(f"foreshock.{folder[:-1].replace('/', '.')}" for folder in CHECKOUT_ONLY)
    wrong = {}
    for name in wheel.namelist():
        if name.endswith(".py"):
            tree = ast.walk(ast.parse(wheel.read(name)))
            modules = [f"{n.module}.{a.name}" for n in tree if isinstance(n, ast.ImportFrom) for a in n.names]
            wrong[name] = [module for module in modules if module.startswith(checkout_modules)]
    assert {name for name, modules in wrong.items() if modules} == {"foreshock/cli/main.py"}  # if it exists


def test_installed_command_lacks_the_lab_and_bench_groups(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    command = [sys.executable, "-P", "-m", "foreshock"]
    environment = {"PATH": "", "PYTHONPATH": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run([*command, "--help"], env=environment, check=True, capture_output=True, text=True)
    assert "diagnose" in done.stdout
    for group in ("lab", "bench"):
        refused = subprocess.run([*command, group], env=environment, check=False, capture_output=True, text=True)
        assert refused.returncode == 2
        assert f"No such command '{group}'" in refused.stderr


def test_wheel_is_small_and_has_only_product_files(built: Path, wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    page = {f"foreshock/{path}" for path in tracked("server/ui/dist/*")}
    boards = {f"foreshock/{path}" for path in tracked("dashboards/generated/*")}
    assert {"foreshock/py.typed", "foreshock/server/ui/dist/index.html"} | page | boards <= names
    assert next(built.glob("foreshock-*.whl")).stat().st_size <= 2 * 2**20
    recorded = {name for name in names if name.endswith(".gz")}
    assert recorded == {f"foreshock/{path}" for path in tracked("lab/shown/*.gz")} != set()
    top_levels = {name.partition("/")[0] for name in names}
    assert {top for top in top_levels if not top.endswith(".dist-info")} == {"foreshock"}


def test_agent_extra_excludes_the_web_server_and_server_extra_excludes_torch(wheel: zipfile.ZipFile) -> None:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requires = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist") or []
    required_by = {
        extra: [r for r in requires if f'extra == "{extra}"' in r.replace("'", '"')]
        for extra in ("agent", "server", "grafana", "demo", "dev")
    }
    required_always = [r for r in requires if "extra ==" not in r]
    assert all(required_by.values())
    heavy = ("torch", "triton", "fastapi", "uvicorn", "sqlalchemy", "prometheus-client", "grafana-api")
    assert not [r for r in required_always if r.lower().startswith(heavy)]
    assert not [r for r in required_by["agent"] if r.lower().startswith(("fastapi", "uvicorn", "sqlalchemy"))]
    assert not [r for r in required_by["server"] if r.lower().startswith(("torch", "triton"))]


def test_package_exports_the_agents_public_names() -> None:
    for name in ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach"):
        assert getattr(foreshock, name) is getattr(monitor, name)


@pytest.mark.parametrize("package", [foreshock, monitor])
def test_unknown_attribute_error_lists_the_available_names(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"'watch'.*attach, detach"):
        getattr(package, "wat" + "ch")
    with pytest.raises(AttributeError, match=r"'KerasCallback'; it has TransformersCallback, LightningCallback"):
        getattr(callbacks, "Keras" + "Callback")


def test_agent_modules_do_not_shadow_exported_names() -> None:
    modules = {module.name for module in iter_modules(monitor.__path__)}
    assert "attaching" in modules
    assert not modules & set(dir(monitor))


def test_import_does_not_load_torch_or_transformers() -> None:
    check = (
        "import sys, foreshock; assert 'foreshock.monitor' not in sys.modules; foreshock.client.Service; "
        "foreshock.callbacks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", check], check=False).returncode == 0


def test_callbacks_export_the_trainer_integrations() -> None:
    from foreshock.monitor.callbacks import accelerate, huggingface, lightning, torchtitan

    assert callbacks.TransformersCallback is huggingface.ForeshockCallback
    assert callbacks.LightningCallback is lightning.ForeshockCallback
    assert callbacks.AccelerateTracker is accelerate.ForeshockTracker
    assert callbacks.watch_torchtitan is torchtitan.watch


def test_dir_lists_lazily_imported_names() -> None:
    """Notebooks complete `foreshock.` from dir()."""
    names = {"Agent", "AgentConfig", "Assessment", "assess", "attach", "detach", "callbacks", "client", "__version__"}
    assert set(dir(foreshock)) == names
    assert dir(callbacks) == ["AccelerateTracker", "LightningCallback", "TransformersCallback", "watch_torchtitan"]


@pytest.mark.parametrize("name", ["foreshock.attach", "foreshock.callbacks.watch_torchtitan"])
def test_missing_pytorch_error_says_what_to_install(name: str) -> None:
    check = f"import sys; sys.modules['torch'] = None; import foreshock; {name}"
    done = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: foreshock's agent needs PyTorch")
    assert "pip install '.[agent]' in foreshock's clone" in done.stderr


def test_agent_settings_type_has_every_config_field() -> None:
    assert AgentSettings.__optional_keys__ == frozenset(AgentConfig.model_fields)


def test_import_on_windows_fails_and_suggests_wsl() -> None:
    program = "import sys; sys.platform = 'win32'; import foreshock"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: foreshock runs on Linux and macOS; on Windows use the Windows Subsystem for Linux"
    )
