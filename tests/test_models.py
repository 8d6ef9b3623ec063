"""docs/models.md says which tests serve a model in a mode, and what the zoo's record holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text()
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
    every = re.search(r"\*Every model\* means ([^.]+)\.", PAGE)[1].replace(" and ", ", ")  # type: ignore[index]
    rows = re.findall(
        r"^\| ([^|]+?) \|([^|]*)\|([^|]*)\|$", PAGE.partition("|---")[2].partition("\n\n")[0], re.MULTILINE
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
    assert f"{len(records)} entries, {modules} modules with attention, {counted}; " in PAGE
    assert f"; {wrong} entries wrong, {refused} refused by attach with a sentence." in PAGE
