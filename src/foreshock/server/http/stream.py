"""GET /v1/stream: events as they happen (server-sent events).

Events of the log have an id, so a client that reconnects with Last-Event-ID first gets the events that it missed. If
that event does not exist, or the client may not see it, the stream starts with new events.
`sample` events contain the newest numbers of a run; they have no id and are not replayed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import StreamingResponse

from foreshock.server.auth import Reader, caller_of
from foreshock.server.runs.broadcast import REPLAYED_AT_ONCE, Broadcaster, Client, StreamEvent, stream_event
from foreshock.server.runs.eventlog import cursor_of, events_after, newest_cursor
from foreshock.server.store.database import BusyError, ClosingError

router = APIRouter()
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _listen(
    request: Request,
    caller: Reader,
    run: Annotated[str | None, Query(max_length=128)] = None,
    last_event_id: Annotated[str, Header()] = "",
) -> AsyncIterator[Client]:
    """Register the client before the response begins, so that it misses no event after its first byte."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    waiting: asyncio.Queue[StreamEvent | None] = asyncio.Queue(broadcaster.settings.stream_queue_events)
    client = Client(run, caller.run_prefix, caller.name, waiting)
    broadcaster.clients.add(client)
    try:
        newest, left = await broadcaster.store.read(
            lambda connection: (newest_cursor(connection), cursor_of(connection, last_event_id, caller.run_prefix))
        )
        client.since, client.resumes = newest if left is None else left, left is not None
        client.joined = newest
        broadcaster.wake()
        yield client
    finally:
        broadcaster.clients.discard(client)


@router.get(
    "/v1/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
    summary="Events as they happen",
)
async def stream(request: Request, client: Annotated[Client, Depends(_listen)]) -> StreamingResponse:
    """Server-sent events, of one run or of all; `started`, `verdict`, `switched`, `command`, `finished`, `sample`."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    events = _send_events(broadcaster, client, partial(_is_let_in, request))
    return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)


async def _is_let_in(request: Request) -> bool:
    """Whether the client's session is still valid; always true without a session."""
    caller, keyring = caller_of(request), request.app.state.keyring
    return caller.csrf_token is None or await keyring.caller(request.headers) == caller


async def _send_events(
    broadcaster: Broadcaster, client: Client, is_let_in: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="listening", retry=2000)
    sent = client.since
    while client.resumes and not client.lost:
        read = partial(events_after, cursor=sent, limit=REPLAYED_AT_ONCE, run=client.run)
        try:
            async with broadcaster.store.large.turn(client.token):
                missed = await broadcaster.store.read(read)
        except (BusyError, ClosingError):
            return  # the client reconnects
        for sent, event in missed:
            if client.wants(event.run):
                yield stream_event(sent, event).written
        if len(missed) < REPLAYED_AT_ONCE:
            break
    ping, looked = broadcaster.settings.stream_ping_seconds, time.monotonic()
    while not broadcaster.closed:
        try:
            if time.monotonic() - looked >= ping:
                if not await is_let_in():
                    return
                looked = time.monotonic()
        except (SQLAlchemyError, ClosingError):
            return  # the client reconnects
        try:
            async with asyncio.timeout(ping):
                item = await client.waiting.get()
        except TimeoutError:
            yield KEEPALIVE_COMMENT
            continue
        if item is None:
            break
        if item.cursor is None or item.cursor > sent:
            yield item.written
