"""Sends events of the log, and the newest numbers of runs, to all clients of the stream."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fastapi.sse import format_sse_event

from foreshock.contract.wire import Batch, Sample
from foreshock.server.models import RunEvent, StreamSample
from foreshock.server.readings import RUN_SCALARS
from foreshock.server.runs.eventlog import event_id, events_after
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store, log_store_error

REPLAYED_AT_ONCE: Final = 1000
"""Maximum number of events read from the log at once."""
_POLL_SECONDS: Final = 1.0
_SAMPLE_SECONDS: Final = 0.25


class StreamEvent(NamedTuple):
    """An encoded event, the same for all clients. Samples and deletions have no cursor."""

    cursor: int | None
    written: bytes


@dataclass(eq=False)
class Client:
    """One client of the stream."""

    run: str | None
    prefix: str
    token: str
    """The name of the client's token."""
    waiting: asyncio.Queue[StreamEvent | None]
    lost: bool = False
    since: int = 0
    resumes: bool = False
    joined: int | None = None
    """Cursor of the newest event when the client connected; None until it has been read."""

    def wants(self, run: str) -> bool:
        return self.run in (None, run) and run.startswith(self.prefix)

    def offer(self, event: StreamEvent | None) -> None:
        """Put an event into the client's queue. A client whose queue is full is disconnected, and may resume."""
        if self.lost:
            return
        if self.waiting.full():
            self.lost, event = True, None
            while not self.waiting.empty():
                self.waiting.get_nowait()
        self.waiting.put_nowait(event)


@dataclass
class Broadcaster:
    """Reads new events of all replicas from the store, and passes them to the clients."""

    store: Store
    settings: Settings
    clients: set[Client] = field(default_factory=set)
    """Connected clients; their number is limited as concurrent requests (limits.ConcurrencyLimit)."""
    closed: bool = False

    def __post_init__(self) -> None:
        self._moved = asyncio.Event()
        self._samples: dict[str, StreamSample] = {}

    def committed(self, batches: Sequence[Batch]) -> None:
        """Announce the samples and events of committed batches."""
        if not self.clients:
            return
        for batch in batches:
            newest = max((e for e in batch.events if isinstance(e, Sample)), key=lambda e: e.step, default=None)
            if newest is not None:
                latest = {key: getattr(newest, name) for key, name in RUN_SCALARS.items()}
                self._samples[batch.run] = StreamSample(run=batch.run, step=newest.step, latest=latest)
        self._moved.set()

    def deleted(self, run: str) -> None:
        """Announce a deleted run, once and only to this replica's clients, because the run's log was deleted too."""
        self._hand_out(run, StreamEvent(None, format_sse_event(event="deleted", data_str=json.dumps({"run": run}))))

    def wake(self) -> None:
        """Read new events soon. Called after a route has written events."""
        self._moved.set()

    async def run(self) -> None:
        """Pass on events until closed or cancelled."""
        last: int | None = None
        while not self.closed:
            try:
                last = await self._turn(last)
            except Exception as error:
                log_store_error("the stream could not read the store", error)
                await asyncio.sleep(_POLL_SECONDS)

    async def _turn(self, last: int | None) -> int | None:
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._moved.wait()
            await asyncio.sleep(_SAMPLE_SECONDS / 4)  # so that commits shortly after one another are read together
        except TimeoutError:
            pass
        self._moved.clear()
        joined = [client.joined for client in self.clients if client.joined is not None]
        if not joined:
            return None  # without clients the log is not read
        after = min(joined) if last is None else last
        found = await self.store.read(lambda connection: events_after(connection, after, REPLAYED_AT_ONCE))
        last = after
        waiting, self._samples = self._samples, {}
        if len(found) == REPLAYED_AT_ONCE:
            self._moved.set()
        for last, event in found:
            self._hand_out(event.run, stream_event(last, event))
        for run, sample in waiting.items():
            written = format_sse_event(event="sample", data_str=sample.model_dump_json())
            self._hand_out(run, StreamEvent(None, written))
        return last

    def _hand_out(self, run: str, event: StreamEvent) -> None:
        for client in self.clients:
            if client.wants(run):
                client.offer(event)

    def close(self) -> None:
        """End every stream, so that the service can shut down."""
        self.closed = True
        self._moved.set()
        for client in self.clients:
            client.offer(None)


def stream_event(cursor: int, event: RunEvent) -> StreamEvent:
    """Encode an event of the log. Its id is what a client sends as Last-Event-ID to resume."""
    return StreamEvent(cursor, format_sse_event(event=event.kind, id=event_id(event), data_str=event.model_dump_json()))
