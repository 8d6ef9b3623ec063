"""GET /v1/stream: what happens, as it happens (server-sent events).

Events of the log carry their id; a client that comes back with Last-Event-ID gets what it missed from the store.
`sample` events only say that a run moved, with its newest numbers; they have no id and are not replayed.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from sqlalchemy import func, select
from starlette.responses import StreamingResponse

from foreshock.server.access.auth import Reader
from foreshock.server.runs.broadcast import REPLAYED_AT_ONCE, Broadcaster, Client, Told, told
from foreshock.server.runs.eventlog import read_events
from foreshock.server.store.schema import events

router = APIRouter()
_PING_SECONDS: Final = 15.0
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _listen(
    request: Request,
    caller: Reader,
    run: Annotated[str | None, Query(max_length=128)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> AsyncIterator[Client]:
    """Join before the answer begins: what happens after the client sees the first byte is not missed."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    waiting: asyncio.Queue[Told | None] = asyncio.Queue(broadcaster.settings.stream_queue_events)
    address = request.client.host if request.client else ""
    client = Client(run, caller.run_prefix, (caller.name, address), waiting)
    broadcaster.join(client)
    try:
        async with broadcaster.store.read() as connection:
            newest = (await connection.execute(select(func.max(events.c.id)))).scalar() or 0
        client.since = newest if last_event_id is None else min(last_event_id, newest)
        client.resumes = last_event_id is not None
        client.joined = newest
        broadcaster.wake()
        yield client
    finally:
        broadcaster.leave(client)


@router.get(
    "/v1/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
    summary="What happens, as it happens",
)
async def stream(request: Request, client: Annotated[Client, Depends(_listen)]) -> StreamingResponse:
    """Server-sent events, of one run or of all; `started`, `verdict`, `switched`, `command`, `finished`, `sample`."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    return StreamingResponse(_tell(broadcaster, client), media_type="text/event-stream", headers=_HEADERS)


async def _tell(broadcaster: Broadcaster, client: Client) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="listening", retry=2000)
    sent = client.since
    while client.resumes and not client.lost:
        async with broadcaster.store.read() as connection:
            missed = await read_events(connection, run=client.run, after=sent, limit=REPLAYED_AT_ONCE)
        for event in missed:
            sent = event.id
            if client.wants(event.run):
                yield told(event).written
        if len(missed) < REPLAYED_AT_ONCE:
            break
    while not broadcaster.closed:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                item = await client.waiting.get()
        except TimeoutError:
            yield KEEPALIVE_COMMENT
            continue
        if item is None:
            break
        if item.id is None or item.id > sent:
            yield item.written
