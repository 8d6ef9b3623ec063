"""What is built is what people install: every room, its data files, and extras that keep the two sides apart."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("contract", "kernels", "monitor", "server", "dashboards", "lab", "cli", "benchmarks")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist made from what git tracks, and the wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    archive = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, check=True, input=files, capture_output=True
    ).stdout
    subprocess.run(["tar", "--extract"], cwd=tree, check=True, input=archive)
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
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def test_the_wheel_holds_every_module_of_every_room(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for room in ROOMS:
        missing = {f"foreshock/{path}" for path in tracked(f"{room}/*.py")} - names
        assert not missing


def test_the_wheel_holds_the_page_the_boards_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "foreshock/py.typed" in names
    page = {f"foreshock/{path}" for path in tracked("server/ui/dist/*")}
    assert "foreshock/server/ui/dist/index.html" in page
    assert page <= names
    assert {f"foreshock/{path}" for path in tracked("dashboards/generated/*")} <= names


def test_the_wheel_is_small_since_recorded_runs_stay_in_the_repository(built: Path, wheel: zipfile.ZipFile) -> None:
    assert next(built.glob("foreshock-*.whl")).stat().st_size <= 2 * 2**20
    assert not [name for name in wheel.namelist() if name.endswith(".gz")]


def test_the_wheel_holds_no_test_and_no_foreign_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
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


def test_the_sdist_holds_what_the_wheel_is_made_of(built: Path, wheel: zipfile.ZipFile) -> None:
    with tarfile.open(next(built.glob("foreshock-*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    code = [n for n in wheel.namelist() if n.startswith("foreshock/")]
    assert {f"src/{name}" for name in code} <= inside
