"""Ranks that send without end, each in a thread of its own."""

import threading
import time
from collections.abc import Callable

import httpx

from foreshock.contract.wire import Ack
from foreshock.server.testing import FakeRank


class Sender:
    """A rank that sends each batch until it is acknowledged, as the agent does. `url` says where to, at every try."""

    def __init__(self, url: Callable[[], str], rank: FakeRank) -> None:
        self.url, self.rank = url, rank
        self.acknowledged = 0
        """Of its batches those up to this sequence."""
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
                answer = httpx.post(f"{self.url()}/v1/batches", content=body, headers=headers, timeout=60.0)
            except httpx.HTTPError:
                time.sleep(0.05)
                continue
            if answer.status_code != 200:
                self.refused.append(answer.text)
                continue
            self.acknowledged = self.rank.sequence
            step = self.rank.sequence
            given = Ack.model_validate_json(answer.content).commands
            new = [command for command in given if command.id not in self.orders]
            self.delivered_again += len(given) - len(new)
            self.orders |= {command.id: step for command in new}
            sample = self.rank.sample(step, loss=float(step))
            batch = self.rank.batch(sample, *(self.rank.answer(command, step) for command in new))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(600)
        assert not self._thread.is_alive()
