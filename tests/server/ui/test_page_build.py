"""The committed build of the page matches its sources and suits a strict content security policy."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.running import absent

UI = Path(__file__).parents[3] / "src/foreshock/server" / "ui"
DIST = UI / "dist"
SOURCES = ("src", "index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", ".npmrc")


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.full
def test_committed_page_matches_build_of_sources(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so the build cannot be compared")
    for name in SOURCES:
        source = UI / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    if (UI / "node_modules").is_dir():
        shutil.copytree(UI / "node_modules", tmp_path / "node_modules", symlinks=True)
    else:
        installed = subprocess.run(["npm", "ci"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        if installed.returncode:
            absent(f"the dependencies of the page, which npm could not install: {installed.stderr[-1000:]},")
    built = subprocess.run(["npm", "run", "build"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    committed, fresh = _files(DIST), _files(tmp_path / "dist")
    assert sorted(committed) == sorted(fresh), "run `npm ci && npm run build` in server/ui and commit dist/"
    assert committed == fresh


def test_asset_names_have_content_hashes_and_no_source_map_is_shipped() -> None:
    names = [path.name for path in (DIST / "assets").iterdir() if path.name != "LICENSES.txt"]
    assert names
    for name in names:
        assert re.fullmatch(r"[\w-]+-[\w-]{8}\.(js|css|svg|woff2)", name), name


def test_licences_of_bundled_libraries_are_shipped() -> None:
    licences = (DIST / "assets" / "LICENSES.txt").read_text()
    for owner in ("Leon Sorokin", "Jason Miller", "Inter Project Authors"):
        assert owner in licences


def test_lock_file_names_no_download_host() -> None:
    assert '"resolved"' not in (UI / "package-lock.json").read_text()


def test_page_sources_never_write_raw_html() -> None:
    for source in (UI / "src").iterdir():
        text = source.read_text()
        for api in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "dangerouslySetInnerHTML",
            "document.write",
            "eval(",
        ):
            assert api not in text, f"{source.name} uses {api}"
