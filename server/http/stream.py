"""GET /v1/stream: what happens, as it happens (server-sent events).

Events of the log carry their id; a client that comes back with Last-Event-ID gets what it missed from the store.
`sample` events only say that a run moved, with its newest numbers; they have no id and are not replayed.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import func, select

from foreshock.server.access.auth import Reader
from foreshock.server.access.limits import retry_after
from foreshock.server.access.problems import ProblemError
from foreshock.server.runs.broadcast import REPLAYED_AT_ONCE, Broadcaster, Client, as_server_sent_event
from foreshock.server.runs.eventlog import read_events
from foreshock.server.store.schema import events

router = APIRouter()


async def _listen(
    request: Request,
    caller: Reader,
    run: Annotated[str | None, Query(max_length=128)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> AsyncIterator[Client]:
    """Join before the answer begins: what happens after the client sees the first byte is not missed."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    if len(broadcaster.clients) >= broadcaster.settings.stream_clients:
        raise ProblemError(429, "Too many clients listen already.", headers=retry_after(5.0))
    client = Client(run, caller.run_prefix, asyncio.Queue(broadcaster.settings.stream_queue_events))
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
async def stream(request: Request, client: Annotated[Client, Depends(_listen)]) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events, of one run or of all; `started`, `verdict`, `switched`, `command`, `finished`, `sample`."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    yield ServerSentEvent(comment="listening", retry=2000)
    sent = client.since
    while client.resumes:
        async with broadcaster.store.read() as connection:
            missed = await read_events(connection, run=client.run, after=sent, limit=REPLAYED_AT_ONCE)
        for event in missed:
            sent = event.id
            if client.wants(event.run):
                yield as_server_sent_event(event)
        if len(missed) < REPLAYED_AT_ONCE:
            break
    while not broadcaster.closed and (item := await client.waiting.get()) is not None:
        if item.id is None or int(item.id) > sent:
            yield item
