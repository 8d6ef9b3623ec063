"""docs/quickstart.md, followed by the letter: its commands are run as they stand, in its order, in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.running import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
MOST_SECONDS = 600.0
"""Of part 2; the page promises ten minutes for everything, and the demos take seven on two cores."""


def blocks() -> list[str]:
    """The commands that the page says can be typed as they stand."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def checkout(folder: Path) -> Path:
    """The repository as the first part leaves it: everything in place, and a `.venv` whose commands are on the path."""
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


def test_the_first_blocks_are_the_demos_and_make_knows_them() -> None:
    for block, command in zip(blocks()[:2], ("foreshock demo", "foreshock demo --train"), strict=True):
        make, target = block.split()
        # Under `make test` a make within a make would also say which folder it enters and leaves.
        dry_run = [make, "--dry-run", "--no-print-directory", target]
        done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith(f"-m {command}")


def test_a_bare_clone_gets_its_demo_without_pytorch() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--editable '.[server]'" in done.stdout
    assert ".[demo]" not in done.stdout


@pytest.mark.full
def test_a_newcomer_who_types_what_the_page_says_switches_a_head_and_takes_it_back(tmp_path: Path) -> None:
    port = str(free_port())
    typed = [block.replace("8765", port) for block in blocks()[2:]]
    assert len(typed) == 4
    # A person reads a sentence before typing on; here that takes as long as the run needs to appear.
    seen = "until foreshock runs 2>/dev/null | grep -q plain-loop; do sleep 0.2; done\n"
    script = "set -euo pipefail\nset -m\n" + seen.join([typed[0], "".join(typed[1:])])
    # Nor does a person type within the second in which the next sample tells of the switched head.
    (look,) = (line for line in script.splitlines() if "switched heads:" in line)
    script = script.replace(look, f"until ({look}\n) | grep -q '2 row_corrected'; do sleep 0.2; done\n{look}")
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
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'training.log').read_text()[-2000:]}"
    assert "layer 0 head 2: plain -> row_corrected" in done.stdout
    assert "2 row_corrected" in done.stdout
    assert "layer 0 head 2: row_corrected -> plain" in done.stdout
