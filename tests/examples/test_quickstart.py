"""Runs the commands of docs/quickstart.md unchanged, in order, in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.running import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
TIMEOUT_SECONDS = 600.0
"""For part 2. The page promises ten minutes for everything, and the demos take seven on two cores."""


def blocks() -> list[str]:
    """The shell blocks of the page."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def checkout(folder: Path) -> Path:
    """A copy of the repository after the first part: all files, and a `.venv` with its commands on the path."""
    for part in ROOT.iterdir():
        if part.name not in (".venv", ".git", "foreshock.db"):
            (folder / part.name).symlink_to(part)
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text(f"PATH={commands}:$PATH\n")
    (commands / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (commands / "foreshock").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m foreshock "$@"\n')
    for command in ("python", "foreshock"):
        (commands / command).chmod(0o755)
    return folder


def test_first_two_quickstart_commands_run_the_demos() -> None:
    for block, command in zip(blocks()[:2], ("foreshock demo", "foreshock demo --train"), strict=True):
        make, target = block.split()
        # Under `make test`, a nested make would also print the folders that it enters and leaves.
        dry_run = [make, "--dry-run", "--no-print-directory", target]
        done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith(f"-m {command}")


def test_make_demo_in_a_fresh_clone_installs_only_the_server_extra() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--editable '.[server]'" in done.stdout
    assert ".[demo]" not in done.stdout


@pytest.mark.full
def test_quickstart_commands_switch_a_head_and_undo_the_switch(tmp_path: Path) -> None:
    port = str(free_port())
    commands = [block.replace("8765", port) for block in blocks()[2:]]
    assert len(commands) == 4
    # A user reads a sentence before the next command; the script waits until the run appears.
    wait_for_run = "until foreshock runs 2>/dev/null | grep -q plain-loop; do sleep 0.2; done\n"
    script = "set -euo pipefail\nset -m\n" + wait_for_run.join([commands[0], "".join(commands[1:])])
    # A user also types after the next sample has reported the switched head; the script waits for that sample.
    (listing,) = (line for line in script.splitlines() if "switched heads:" in line)
    script = script.replace(listing, f"until ({listing}\n) | grep -q '2 row_corrected'; do sleep 0.2; done\n{listing}")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "FORESHOCK_PORT": port,
        "FORESHOCK_URL": f"http://127.0.0.1:{port}",
        "FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path}/quickstart.db",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=checkout(tmp_path),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'training.log').read_text()[-2000:]}"
    assert "layer 0 head 2: plain -> row_corrected" in done.stdout
    assert "2 row_corrected" in done.stdout
    assert "layer 0 head 2: row_corrected -> plain" in done.stdout
