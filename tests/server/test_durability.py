import os
import random
import threading
import time
from pathlib import Path

import httpx
import pytest

from foreshock.server.testing import FakeRank, LiveService


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
                headers = {"content-type": "application/json"}
                try:
                    answer = client.post("/v1/batches", content=batch.model_dump_json(), headers=headers)
                except httpx.HTTPError:
                    return
                if answer.status_code == 200:
                    self.acknowledged.add(answer.json()["acknowledged"])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


KILLS = int(os.environ.get("FORESHOCK_KILLS", "3"))


@pytest.mark.promise("S1")
@pytest.mark.timeout(120 + 10 * KILLS)
def test_kill_nine_under_load_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    """FORESHOCK_KILLS sets how often; each is at a random moment, while three ranks send without end."""
    when = random.Random(7)
    acknowledged: dict[int, set[int]] = {}
    for turn in range(KILLS):
        with LiveService(tmp_path) as service:
            ledgers = [Ledger(service.url, FakeRank(rank=10 * turn + number)) for number in range(3)]
            time.sleep(when.uniform(0.0, 0.9))
            service.kill()
            for ledger in ledgers:
                ledger.stop()
                acknowledged[ledger.rank.rank] = ledger.acknowledged
    assert sum(map(len, acknowledged.values())) > 20
    with LiveService(tmp_path) as service, service.client() as client:
        for number, sequences in acknowledged.items():
            rank = FakeRank(rank=number)
            for sequence in sequences:
                batch = rank.batch(rank.sample(sequence, loss=-1.0), sequence=sequence)
                headers = {"content-type": "application/json"}
                again = client.post("/v1/batches", content=batch.model_dump_json(), headers=headers)
                assert again.status_code == 200
        [line] = client.get("/v1/runs/run-1/series?metric=run.loss&max_points=10000").json()["lines"]
        # A lost batch would have been stored now, with its loss of -1; a doubled one would shift the mean over ranks.
        assert line["low"] == [float(step) for step in line["steps"]]
        assert set(line["steps"]) >= set().union(*acknowledged.values())
