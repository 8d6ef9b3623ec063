"""One rank of distributed training is killed, the others fail, and all restart as new boots of the same run."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.running import eventually

from foreshock.server.testing import LiveService

ROOT = Path(__file__).parents[2]
RESUMED_AT, LAST = 20, 60


def start_ranks(service: LiveService, folder: Path, ranks: int, first: int, last: int) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    command = [sys.executable, "-P", "-m", "tests.faults.rank", service.url, str(folder / "spool")]
    rest = [str(ranks), str(folder / f"meeting-{first}"), str(first), str(last)]
    return [subprocess.Popen([*command, str(rank), *rest], env=environment) for rank in range(ranks)]


def boots(database: Path) -> list[tuple[int, str, int | None, str | None]]:
    """(rank, boot, until_step, finished_status) by rank, in order of start."""
    query = "SELECT rank, boot, until_step, finished_status FROM boots ORDER BY rank, boot"
    with closing(sqlite3.connect(database)) as connection:
        return [(row[0], row[1], row[2], row[3]) for row in connection.execute(query)]


@pytest.mark.full
@pytest.mark.promise("A13")
def test_restarted_ranks_are_new_boots_and_no_step_is_counted_twice(tmp_path: Path, sizes: Any) -> None:
    ranks = sizes("ranks", quick=2, long=4)
    with LiveService(tmp_path) as service, service.client() as client, ExitStack() as ending:
        first = start_ranks(service, tmp_path, ranks, 0, 100_000)
        for process in first:
            ending.callback(process.wait)
            ending.callback(process.kill)  # if this test fails earlier
        eventually(
            "the ranks train", lambda: (client.get("/v1/runs/ranks").json().get("last_step") or 0) > RESUMED_AT + 4, 400
        )
        first[-1].send_signal(signal.SIGKILL)
        codes = [process.wait(300) for process in first]
        assert codes[-1] == -signal.SIGKILL
        assert set(codes[:-1]) == {1}, "the collective's exception must end the other ranks, as without foreshock"
        again = start_ranks(service, tmp_path, ranks, RESUMED_AT, LAST)
        assert [process.wait(300) for process in again] == [0] * ranks
        [line] = client.get("/v1/runs/ranks/curves?line=run.loss&max_points=10000").json()["lines"]
        assert client.get("/v1/runs/ranks").json()["status"] == "completed"
        verdicts = client.get("/v1/runs/ranks/events?kind=verdict").json()["events"]
    stored_boots = boots(tmp_path / "foreshock.db")
    assert Counter(rank for rank, *_ in stored_boots) == dict.fromkeys(range(ranks), 2)
    assert len({boot for _, boot, *_ in stored_boots}) == 2 * ranks
    for rank in range(ranks):
        old, new = (row for row in stored_boots if row[0] == rank)
        assert (old[2], new[2]) == (RESUMED_AT, None), "the first boot must count up to the start of the second"
        assert (old[3], new[3]) == (None if rank == ranks - 1 else "failed", "completed")
    assert line["steps"] == [*range(1, LAST + 1)]
    assert line["last"] == [float(step) for step in line["steps"]]
    assert verdicts == []
