"""POST /v1/batches at the service's edge: read within limits, admitted, checked, handed to the writer, answered.

A batch takes none of the framework's layers, which cost as much as all of this; admission, and room for everybody,
stand before both. The route below describes it.
"""

import asyncio
from collections import defaultdict
from typing import Final

import structlog
from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreshock.contract.wire import MAX_EVENTS, MAX_VALUES, Ack, Batch, read_batch
from foreshock.server.access.auth import ANYONE, Caller, Needs, check_run, check_scope
from foreshock.server.access.limits import SPREAD, Buckets, length_of, retry_after
from foreshock.server.access.problems import TOO_LARGE, ProblemError, answer_to, items
from foreshock.server.counters import Counters
from foreshock.server.ingest.batches import Writer
from foreshock.server.ingest.process_order import arrival_of
from foreshock.server.models import Problem
from foreshock.server.runs.words import printable

log = structlog.get_logger()
PATH: Final = "/v1/batches"
RESERVED: Final = ("curves", "matrix", "events", "commands", "switches", "incidents", "acknowledge")
"""Last words of an address under /v1/runs/{run}; a run may not end in /word."""
_LARGE_BYTES: Final = 2**16
"""Larger bodies of a token are read one after another: each may hold up the event loop for some tenths of a second."""


def is_batch(scope: Scope) -> bool:
    """Whether a request posts a batch."""
    return bool(scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST")


class Endpoint:
    """Takes batches of callers whom the gate has let in (`scope["state"]["caller"]`), as an ASGI application."""

    def __init__(self, writer: Writer, counters: Counters, buckets: Buckets, max_bytes: int) -> None:
        self._writer, self._counters, self._max_bytes = writer, counters, max_bytes
        self._buckets, self._refusals = buckets, Buckets(1 / 60)
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that `is_batch`."""
        try:
            body = await self.take(scope["state"]["caller"], Headers(scope=scope), receive)
        except ClientDisconnect:
            raise
        except Exception as error:
            await answer_to(error, PATH)(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def take(self, caller: Caller, headers: Headers, receive: Receive) -> bytes:
        """Store a batch: its acknowledgement, as it is sent. Raises ProblemError where it is refused."""
        check_scope(caller, "ingest")
        token = "" if caller is ANYONE else caller.name
        try:  # before the batch is read: a refusal is cheap
            self._writer.refuse_when_full(token)
        except ProblemError:
            await asyncio.sleep(SPREAD.uniform(0.5, 1.0))  # clients that hammer wait here, and cost little
            raise
        body = await self._whole(headers, receive)
        try:
            if len(body) <= _LARGE_BYTES:
                batch = _read(body)
            else:
                async with self._reading[token]:
                    batch = _read(body)
                    await asyncio.sleep(0)
        except ProblemError as error:
            self._counters.batches["refused"] += 1
            if self._refusals.take(caller.name) == 0:  # the log says why once a minute, the counter how often
                why = [f"{item.where}: {item.message}" for item in error.errors[:3]] or [error.detail]
                log.warning("batch refused", token=caller.name, why=printable("; ".join(why)))
            raise
        check_run(caller, batch.run)
        wait = self._buckets.take((caller.name, batch.run))
        if wait > 0:
            self._counters.batches["busy"] += 1
            raise ProblemError(
                429,
                f"Run {batch.run} sends more batches a second than the service allows; send fewer.",
                headers=retry_after(wait),
            )
        ack = await self._writer.submit(batch, len(body), token, arrival_of(headers))
        return ack.model_dump_json().encode()

    async def _whole(self, headers: Headers, receive: Receive) -> bytes:
        """The body of a request."""
        if length_of(headers) > self._max_bytes:
            raise ProblemError(413, TOO_LARGE)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise ProblemError(413, TOO_LARGE)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)


router = APIRouter(dependencies=[Depends(Needs("ingest"))])


@router.post(
    PATH,
    summary="Store a batch",
    response_model=Ack,
    responses={s: {"model": Problem} for s in (400, 401, 403, 413, 415, 422, 429, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def post_batch(request: Request) -> Response:
    """Store a batch whole or not at all. Sending it again changes nothing. The answer carries the open commands."""
    endpoint: Endpoint = request.app.state.endpoint
    answer = await endpoint.take(request.scope["state"]["caller"], request.headers, request.receive)
    return Response(answer, media_type="application/json")


def _read(body: bytes) -> Batch:
    if len(body) > MAX_VALUES:  # before any is read: in memory each is far larger
        values = sum(map(body.count, (b",", b"[", b"{", b":")))
        if values > MAX_VALUES:
            raise ProblemError(
                422, f"The batch holds up to {values} values, {MAX_VALUES} are the most; nothing of it was stored."
            )
    try:
        batch = read_batch(body)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_EVENTS:  # the answer names none: each takes a kilobyte
            raise ProblemError(422, f"The batch is malformed: {count} errors; nothing of it was stored.") from None
        found = error.errors(include_input=False, include_url=False)
        raise ProblemError(
            422, f"The batch is malformed: {len(found)} error(s); nothing of it was stored.", errors=items(found)
        ) from None
    if batch.run in (".", ".."):
        raise ProblemError(422, "A run's name may not be dots alone, which no address can hold. Give it another name.")
    if batch.run.rpartition("/")[2] in RESERVED and "/" in batch.run:
        last = batch.run.rpartition("/")[2]
        raise ProblemError(
            422, f"A run's name may not end in /{last}, which is an address of the service. Give the run another name."
        )
    return batch
