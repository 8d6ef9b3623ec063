"""GET /v1/stream: what happens, as it happens (server-sent events).

Events of the log carry their id; a client that comes back with Last-Event-ID gets what it missed from the store.
`sample` events only say that a run moved, with its newest numbers; they have no id and are not replayed.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import func, select

from foreshock.contract.wire import Batch, Sample
from foreshock.server.auth import Reader
from foreshock.server.eventlog import read_events
from foreshock.server.limits import retry_after
from foreshock.server.merging import RUN_SCALARS, merge_scalars
from foreshock.server.models import RunEvent, StreamSample
from foreshock.server.packing import SCALARS
from foreshock.server.problems import ProblemError
from foreshock.server.schema import events
from foreshock.server.settings import Settings
from foreshock.server.store import Store

log = structlog.get_logger()
router = APIRouter()
_POLL_SECONDS: Final = 1.0
_REPLAY: Final = 1000
_SAMPLE_SECONDS: Final = 0.25


@dataclass(eq=False)
class _Client:
    run: str | None
    prefix: str
    waiting: asyncio.Queue[ServerSentEvent | None]
    lost: bool = False
    since: int = 0
    resumes: bool = False
    joined: int | None = None
    """Newest event when the client came; None until that is known."""

    def wants(self, run: str) -> bool:
        return self.run in (None, run) and run.startswith(self.prefix)

    def offer(self, event: ServerSentEvent | None) -> None:
        """Put an event into the client's queue; a client too slow for its queue is cut off and may resume."""
        if self.lost:
            return
        if self.waiting.full():
            self.lost = True
            self.waiting.get_nowait()
            event = None
        self.waiting.put_nowait(event)


@dataclass
class Broadcaster:
    """Reads new events from the store, this replica's and the others', and hands them to the clients."""

    store: Store
    settings: Settings
    clients: set[_Client] = field(default_factory=set)
    closed: bool = False

    def __post_init__(self) -> None:
        self._moved = asyncio.Event()
        self._samples: dict[str, StreamSample] = {}

    def committed(self, batches: Sequence[Batch]) -> None:
        """Called after a commit."""
        if not self.clients:
            return
        for batch in batches:
            newest = max((e for e in batch.events if isinstance(e, Sample)), key=lambda e: e.step, default=None)
            if newest is not None:
                self._samples[batch.run] = _as_stream_sample(batch.run, newest)
        self._moved.set()

    def wake(self) -> None:
        """Called after events were written by a route."""
        self._moved.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        last: int | None = None
        while not self.closed:
            try:
                last = await self._turn(last)
            except Exception:
                log.exception("the stream could not read the store")
                await asyncio.sleep(_POLL_SECONDS)

    async def _turn(self, last: int | None) -> int | None:
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._moved.wait()
            await asyncio.sleep(_SAMPLE_SECONDS / 4)  # what is committed close together is read together
        except TimeoutError:
            pass
        self._moved.clear()
        joined = [client.joined for client in self.clients if client.joined is not None]
        if not joined:
            return None  # nobody listens: nothing to read until somebody does
        after = min(joined) if last is None else last
        async with self.store.read() as connection:
            found = await read_events(connection, after=after, limit=_REPLAY)
        last = after
        waiting, self._samples = self._samples, {}
        if len(found) == _REPLAY:
            self._moved.set()
        for event in found:
            last = event.id
            self._hand_out(event.run, _as_sse(event))
        for run, sample in waiting.items():
            self._hand_out(run, ServerSentEvent(event="sample", data=sample))
        return last

    def _hand_out(self, run: str, event: ServerSentEvent) -> None:
        for client in self.clients:
            if client.wants(run):
                client.offer(event)

    def close(self) -> None:
        """End every stream, so that the service can go down."""
        self.closed = True
        self._moved.set()
        for client in self.clients:
            client.offer(None)


def _as_sse(event: RunEvent) -> ServerSentEvent:
    return ServerSentEvent(event=event.kind, id=str(event.id), data=event)


def _as_stream_sample(run: str, sample: Sample) -> StreamSample:
    scalars = merge_scalars([{name: getattr(sample, name) for name in SCALARS}])
    return StreamSample(run=run, step=sample.step, latest={k: scalars[name] for k, name in RUN_SCALARS.items()})


async def _listen(
    request: Request,
    caller: Reader,
    run: Annotated[str | None, Query(max_length=128)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> AsyncIterator[_Client]:
    """Join before the answer begins: what happens after the client sees the first byte is not missed."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    if len(broadcaster.clients) >= broadcaster.settings.stream_clients:
        raise ProblemError(429, "Too many clients listen already.", headers=retry_after(5.0))
    client = _Client(run, caller.run_prefix, asyncio.Queue(broadcaster.settings.stream_queue_events))
    broadcaster.clients.add(client)
    try:
        async with broadcaster.store.read() as connection:
            newest = (await connection.execute(select(func.max(events.c.id)))).scalar() or 0
        client.since = newest if last_event_id is None else min(last_event_id, newest)
        client.resumes = last_event_id is not None
        client.joined = newest
        broadcaster.wake()
        yield client
    finally:
        broadcaster.clients.discard(client)


@router.get("/v1/stream", response_class=EventSourceResponse, summary="What happens, as it happens")
async def stream(request: Request, client: Annotated[_Client, Depends(_listen)]) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events, of one run or of all; `started`, `verdict`, `switched`, `command`, `finished`, `sample`."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    yield ServerSentEvent(comment="listening", retry=2000)
    sent = client.since
    while client.resumes:
        async with broadcaster.store.read() as connection:
            missed = await read_events(connection, run=client.run, after=sent, limit=_REPLAY)
        for event in missed:
            sent = event.id
            if client.wants(event.run):
                yield _as_sse(event)
        if len(missed) < _REPLAY:
            break
    while not broadcaster.closed and (item := await client.waiting.get()) is not None:
        if item.id is None or int(item.id) > sent:
            yield item
