"""POST /v1/batches: reads batches within limits, checks them, and writes them in groups.

`Endpoint` bypasses FastAPI, whose reading of bodies costs as much as all the rest; the route below only documents it.
A batch is acknowledged only after its commit.
"""

import asyncio
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

import structlog
from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from sqlalchemy import Connection
from sqlalchemy.exc import DataError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from foreshock.contract.wire import MAX_EVENTS, MAX_VALUES, Ack, Batch, read_batch
from foreshock.server.auth import ANYONE, Caller, Needs, check_run, check_scope
from foreshock.server.commands import Orders, exchange
from foreshock.server.limits import BATCHES, SPREAD, Buckets, retry_after
from foreshock.server.logs import Counters
from foreshock.server.models import Problem
from foreshock.server.problems import ProblemError, items
from foreshock.server.process_order import Arrival, arrival_of
from foreshock.server.recorder import MisfitError, Recorded, key_of, record
from foreshock.server.runs.broadcast import Broadcaster
from foreshock.server.runs.eventlog import printable
from foreshock.server.runs.incidents import record_incidents
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store, is_away, log_store_error

_SHOWN_SECONDS: Final = 60.0
_HELD_SECONDS: Final = 1.0
"""A write that fails after this time was waiting for the store: another program locked it, or its server is down."""
_EVENTS_AT_ONCE: Final = 1024
_BYTES_AT_ONCE: Final = 16 * 2**20
"""A group of this size takes no further batch, which limits how long a batch waits for the others in its group."""


@dataclass
class _Item:
    batch: Batch
    size: int
    token: str
    arrival: Arrival
    done: asyncio.Future[Ack] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def _try_again() -> ProblemError:
    return ProblemError(503, "The batch could not be stored; try again.", headers=retry_after(2.0))


class Writer:
    """The one task that writes batches. They wait in bounded queues; those that arrive during a commit join the next.

    Each token has its own queue, and the queues take turns, so a token that sends much delays only itself.
    """

    def __init__(self, settings: Settings, store: Store, counters: Counters, broadcaster: Broadcaster) -> None:
        self._settings, self._store, self._counters = settings, store, counters
        self._broadcaster = broadcaster
        self._waiting: dict[str, deque[_Item]] = {}
        """Non-empty queues by token; the token whose turn is next comes first."""
        self._woken = asyncio.Event()
        self._closed = False
        self._switched: dict[int, float] = {}
        """Runs with a recent switch, and the time until which the switch counts as recent."""

    def refuse_when_full(self, token: str) -> None:
        """Raise ProblemError 429 if the token's queue is full."""
        if len(self._waiting.get(token, ())) >= self._settings.ingest_queue_batches:
            self._counters.batches["busy"] += 1
            raise ProblemError(429, "Too many of your batches wait already; try again.", headers=retry_after(1.0))

    async def submit(self, batch: Batch, size: int, token: str, arrival: Arrival) -> Ack:
        """Store a batch that this token sent; return after the commit.

        Raises ProblemError 429 if the queue is full, 503 if the batch could not be stored.
        """
        self.refuse_when_full(token)
        if self._closed:
            raise ProblemError(503, "The service is shutting down; try again.", headers=retry_after(1.0))
        item = _Item(batch, size, token, arrival)
        self._waiting.setdefault(token, deque()).append(item)
        self._woken.set()
        return await item.done  # a client that disconnects cancels the answer, but the batch is still written

    @property
    def depth(self) -> int:
        """The number of waiting batches."""
        return sum(map(len, self._waiting.values()))

    async def run(self) -> None:
        """Write until `close` is called, then write the remaining batches."""
        while self._waiting or not self._closed:
            self._woken.clear()
            if self._waiting:
                await self._commit(self._next_group())
            else:
                await self._woken.wait()

    def _next_group(self) -> list[_Item]:
        """Return the batches to write in one commit: one of each token in turn, up to the limits."""
        group: list[_Item] = []
        events = size = 0
        while (
            self._waiting
            and len(group) < self._settings.commit_batches
            and events < _EVENTS_AT_ONCE
            and size < _BYTES_AT_ONCE
        ):
            token = next(iter(self._waiting))
            own = self._waiting.pop(token)
            group.append(own.popleft())
            events, size = events + len(group[-1].batch.events), size + group[-1].size
            if own:
                self._waiting[token] = own
        return group

    def close(self) -> None:
        """Accept no further batches; `run` ends when the waiting ones are written."""
        self._closed = True
        self._woken.set()

    async def _commit(self, group: list[_Item]) -> None:
        began = time.monotonic()
        try:
            acks = await self._write(group)
        except Exception as error:
            if is_away(error) and time.monotonic() - began >= _HELD_SECONDS:
                # The batches of this group, and those that arrived since, would each wait as long: fail them all.
                group += [item for own in self._waiting.values() for item in own]
                self._waiting.clear()
                log_store_error("batches not stored", error, batches=len(group))
                for item in group:
                    self._answer(item, _try_again())
            elif len(group) > 1:
                for item in group:  # separately, so that one batch that cannot be stored does not block the others
                    await self._commit([item])
            else:
                self._fail(group[0], error)
            return
        self._counters.commit_seconds = time.monotonic() - began
        for item, ack in zip(group, acks, strict=True):
            if not item.done.done():
                item.done.set_result(ack)

    def _fail(self, item: _Item, error: Exception) -> None:
        if isinstance(error, OverflowError | DataError):
            self._counters.batches["refused"] += 1
            answer = ProblemError(422, "The batch contains a number that is too large to be stored.")
        elif isinstance(error, MisfitError):
            self._counters.batches["refused"] += 1
            answer = ProblemError(422, str(error))
        else:
            log_store_error("batch not stored", error, run=item.batch.run)
            answer = _try_again()
        self._answer(item, answer)

    def _answer(self, item: _Item, answer: ProblemError) -> None:
        if not item.done.done():
            item.done.set_exception(answer)
            item.done.exception()  # marks it as retrieved, in case the client has disconnected

    def _mode_comes(self, done: Recorded) -> set[int]:
        """Return runs with new samples that may show a mode of a recent switch, which may change their incidents."""
        now = time.monotonic()
        self._switched = {run_id: until for run_id, until in self._switched.items() if until > now}
        come = done.stepped & self._switched.keys()
        self._switched |= {done.run_ids[batch.run]: now + _SHOWN_SECONDS for batch, _ in done.switched}
        return come

    async def _write(self, items: list[_Item]) -> list[Ack]:
        group = [item.batch for item in items]
        arrivals = {
            key_of(item.batch): item.arrival for item in sorted(items, key=lambda item: not item.arrival.replayed)
        }

        def take_in(connection: Connection) -> tuple[Recorded, Orders]:
            done = record(connection, group, arrivals)
            orders = exchange(connection, done.run_ids, done.switched, group)
            if changed := done.changed | self._mode_comes(done):
                record_incidents(connection, changed, self._settings.verify_steps)
            return done, orders

        done, orders = await self._store.write(take_in)
        self._counters.batches["stored"] += len(done.new)
        self._counters.batches["duplicate"] += len(group) - len(done.new)
        self._broadcaster.committed(done.new)
        return [
            Ack(
                boot=batch.boot,
                acknowledged=batch.sequence,
                commands=orders.get(key_of(batch), ()),
                send_started=key_of(batch) in done.unexplained,
            )
            for batch in group
        ]


log = structlog.get_logger()
RESERVED: Final = ("curves", "matrix", "events", "commands", "switches", "incidents", "resume-plan", "acknowledge")
"""Last parts of paths under /v1/runs/{run}; a run's name must not end in /PART."""
_LARGE_BYTES: Final = 2**16
"""A token's larger bodies are parsed one at a time: each may block the event loop for some tenths of a second."""


class Endpoint:
    """ASGI application that receives batches of callers admitted by AuthMiddleware (`scope["state"]["caller"]`)."""

    def __init__(self, writer: Writer, counters: Counters, buckets: Buckets) -> None:
        self._writer, self._counters = writer, counters
        self._buckets, self._refusals = buckets, Buckets(1 / 60)
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that posts a batch."""
        body = await self._take(scope, receive)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _take(self, scope: Scope, receive: Receive) -> bytes:
        """Store a batch and return its encoded acknowledgement. Raises ProblemError if the batch is refused."""
        caller: Caller = scope["state"]["caller"]
        check_scope(caller, "ingest")
        token = "" if caller is ANYONE else caller.name
        try:  # before the body is read, so that a refusal is cheap
            self._writer.refuse_when_full(token)
        except ProblemError:
            await asyncio.sleep(SPREAD.uniform(0.5, 1.0))  # slows down clients that retry at once
            raise
        body = await Request(scope, receive).body()
        try:
            if len(body) <= _LARGE_BYTES:
                batch = _read(body)
            else:
                async with self._reading[token]:
                    batch = _read(body)
                    await asyncio.sleep(0)
        except ProblemError as error:
            self._counters.batches["refused"] += 1
            if self._refusals.take(caller.name) == 0:  # log the reason once a minute; the counter has every refusal
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
        ack = await self._writer.submit(batch, len(body), token, arrival_of(Headers(scope=scope)))
        return ack.model_dump_json().encode()


router = APIRouter(dependencies=[Depends(Needs("ingest"))])


@router.post(
    BATCHES,
    summary="Store a batch",
    response_model=Ack,
    responses={s: {"model": Problem} for s in (400, 401, 403, 413, 415, 422, 429, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def post_batch() -> None:
    """Store a batch entirely or not at all. Sending it again changes nothing. The response has the open commands."""
    # `Endpoint` receives every POST to exactly this path.
    raise ProblemError(404, "Send batches to /v1/batches; this path has something after it.")


def _read(body: bytes) -> Batch:
    if len(body) > MAX_VALUES:  # before parsing, because a parsed value takes far more memory
        values = sum(map(body.count, (b",", b"[", b"{", b":")))
        if values > MAX_VALUES:
            raise ProblemError(
                422, f"The batch contains up to {values} values, at most {MAX_VALUES} are allowed; it was not stored."
            )
    try:
        batch = read_batch(body)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_EVENTS:  # too many to list: each takes a kilobyte
            raise ProblemError(422, f"The batch is malformed: {count} errors; it was not stored.") from None
        found = error.errors(include_input=False, include_url=False)
        raise ProblemError(
            422, f"The batch is malformed: {len(found)} error(s); it was not stored.", errors=items(found)
        ) from None
    *parts, last = batch.run.split("/")
    if {".", ".."} & {*parts, last}:
        raise ProblemError(
            422,
            "The run's name has a part of one or two dots only, which browsers and proxies take out of an address. "
            "Give the run another name.",
        )
    if parts and last in RESERVED:
        raise ProblemError(
            422, f"A run's name may not end in /{last}, which is an address of the service. Give the run another name."
        )
    return batch
