import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock.server.testing import FakeRank, LiveService, post


class Ledger:
    """A client that sends without end and writes down what was acknowledged."""

    def __init__(self, url: str, rank: FakeRank) -> None:
        self.rank, self.acknowledged = rank, set[int]()
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with httpx.Client(base_url=self._url, timeout=5.0, trust_env=False) as client:
            step = max(self.acknowledged, default=0)
            while not self._stop.is_set():
                step += 1
                batch = self.rank.batch(self.rank.sample(step, loss=float(step)), sequence=step)
                try:
                    answer = post(client, batch)
                except httpx.HTTPError:
                    return
                if answer.status_code == 200:
                    self.acknowledged.add(answer.json()["acknowledged"])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.mark.full
@pytest.mark.promise("S1")
def test_kill_nine_under_load_loses_nothing_acknowledged_and_doubles_nothing(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    """Each kill is at a random moment, while three ranks send without end."""
    most, until = sizes("service_kills", quick=2, long=500), sizes.until()
    when = random.Random(sizes("seed", quick=7, long=7))
    acknowledged: dict[int, set[int]] = {}
    kills = 0
    while not kills or (kills < most and time.monotonic() < until):
        kills += 1
        with LiveService(tmp_path) as service:
            ledgers = [Ledger(service.url, FakeRank(rank=10 * kills + number)) for number in range(3)]
            while not any(ledger.acknowledged for ledger in ledgers):
                time.sleep(0.005)
            time.sleep(when.uniform(0.0, 0.5))
            service.kill()
            for ledger in ledgers:
                ledger.stop()
                acknowledged[ledger.rank.rank] = ledger.acknowledged
    with LiveService(tmp_path):  # recovers what the last kill left
        pass
    kept = samples_by_batch(tmp_path / "foreshock.db")
    sent = {(rank, sequence) for rank, sequences in acknowledged.items() for sequence in sequences}
    record_property("kill -9", kills)
    record_property("batches acknowledged", len(sent))
    record_property("lost", len(sent - kept.keys()))
    record_property("doubled", sum(count > 1 for count in kept.values()))
    assert sent <= kept.keys()
    assert set(kept.values()) == {1}


def samples_by_batch(database: Path) -> dict[tuple[int, int], int]:
    """How many samples each (rank, sequence) left; the test sends one with each."""
    query = "SELECT rank, sequence, count(*) FROM samples JOIN boots ON boots.id = boot_id GROUP BY boot_id, sequence"
    with closing(sqlite3.connect(database)) as connection:
        return {(rank, sequence): count for rank, sequence, count in connection.execute(query)}
