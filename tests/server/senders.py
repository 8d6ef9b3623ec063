"""Ranks that send batches continuously, each in its own thread."""

import threading
import time
from collections.abc import Callable

import httpx

from foreshock.contract.wire import Ack
from foreshock.server.testing import FakeRank


class Sender:
    """A rank that sends each batch until it is acknowledged, as the agent does. `url` is called for every attempt."""

    def __init__(self, url: Callable[[], str], rank: FakeRank) -> None:
        self.url, self.rank = url, rank
        self.acknowledged = 0
        """The sequence of the last acknowledged batch."""
        self.refused: list[str] = []
        self.orders: dict[str, int] = {}
        self.delivered_again = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        batch = self.rank.batch(self.rank.started())
        while not self._stop.is_set():
            try:
                body, headers = batch.model_dump_json(), {"content-type": "application/json"}
                response = httpx.post(f"{self.url()}/v1/batches", content=body, headers=headers, timeout=60.0)
            except httpx.HTTPError:
                time.sleep(0.05)
                continue
            if response.status_code != 200:
                self.refused.append(response.text)
                continue
            self.acknowledged = self.rank.sequence
            step = self.rank.sequence
            received = Ack.model_validate_json(response.content).commands
            new = [command for command in received if command.id not in self.orders]
            self.delivered_again += len(received) - len(new)
            self.orders |= {command.id: step for command in new}
            sample = self.rank.sample(step, loss=float(step))
            batch = self.rank.batch(sample, *(self.rank.answer(command, step) for command in new))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(600)
        assert not self._thread.is_alive()
