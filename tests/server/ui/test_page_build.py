"""The committed page is what its sources build, and it holds what a strict content security policy asks for."""

import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tests.e2e.running import absent

from foreshock.contract.metrics.catalog import METRICS

UI = Path(__file__).parents[3] / "src/foreshock/server" / "ui"
DIST = UI / "dist"
SOURCES = ("src", "index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", ".npmrc")


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.full
def test_the_committed_page_is_what_the_sources_build(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: the committed page is taken as it is")
    for name in SOURCES:
        source = UI / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    if (UI / "node_modules").is_dir():
        shutil.copytree(UI / "node_modules", tmp_path / "node_modules", symlinks=True)
    else:
        installed = subprocess.run(["npm", "ci"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        if installed.returncode:
            absent(f"what builds the page, which npm could not fetch: {installed.stderr[-1000:]},")
    built = subprocess.run(["npm", "run", "build"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    committed, fresh = _files(DIST), _files(tmp_path / "dist")
    assert sorted(committed) == sorted(fresh), "run `npm ci && npm run build` in server/ui and commit dist/"
    assert committed == fresh


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere() -> None:
    page = (DIST / "index.html").read_text()
    for script in re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.DOTALL):
        assert script == ""
    assert "<style" not in page
    assert "style=" not in page
    assert not re.search(r"\bon\w+=", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert address.startswith("./assets/")
        assert (DIST / address).is_file()
    for styles in DIST.glob("assets/*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:|//|data:)", styles.read_text())


def test_every_asset_is_named_by_its_content_and_no_source_map_is_shipped() -> None:
    names = [path.name for path in (DIST / "assets").iterdir() if path.name != "LICENSES.txt"]
    assert names
    for name in names:
        assert re.fullmatch(r"[\w-]+-[\w-]{8}\.(js|css|svg|woff2)", name), name


def test_the_licences_of_what_is_bundled_are_shipped() -> None:
    licences = (DIST / "assets" / "LICENSES.txt").read_text()
    for owner in ("Leon Sorokin", "Jason Miller", "Inter Project Authors"):
        assert owner in licences


def test_the_lock_file_names_no_download_host() -> None:
    assert '"resolved"' not in (UI / "package-lock.json").read_text()


def test_no_source_writes_markup_from_data() -> None:
    for source in (UI / "src").iterdir():
        text = source.read_text()
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "dangerouslySetInnerHTML",
            "document.write",
            "eval(",
        ):
            assert way not in text, f"{source.name} uses {way}"


def test_no_source_imports_itself_over_others_or_keeps_a_list_of_metrics_of_its_own() -> None:
    """Imports of types count too: what needs one another belongs into one file. How a metric is drawn is defined in the
    catalogue; a source may name one metric that it looks up."""
    texts = {source.stem: source.read_text() for source in (UI / "src").glob("*.ts*")}
    graph = {
        name: set(re.findall(r'(?:from|import) "\./([\w-]+)"', said)) & texts.keys() for name, said in texts.items()
    }
    assert graph["main"] >= {"api", "view"}
    TopologicalSorter(graph).prepare()  # names the circle
    keys = {metric.key for metric in METRICS}
    for name, said in texts.items():
        named = {word for word in re.findall(r'"([a-z]+\.[a-z_0-9]+)"', said) if word in keys}
        assert len(named) <= 1, f"{name} names {sorted(named)}"
