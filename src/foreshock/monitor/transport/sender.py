"""Send events to the service: one daemon thread collects them into batches, spools them and posts them.

The training thread only appends to a queue, without a lock, so that it can be called from anywhere, even from a signal
handler. The daemon thread runs an event loop, whose timeouts are total deadlines on the monotonic clock.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
from pydantic import ValidationError

from foreshock.contract import wire
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard
from foreshock.monitor.sampling import SampleDraft
from foreshock.monitor.transport.outage import Outage
from foreshock.monitor.transport.posting import (
    Answer,
    Bearer,
    Connection,
    ResolvingLoop,
    headers_of,
    is_retryable,
    retry_delay,
    speaks_of_the_batch,
    without_samples,
)
from foreshock.monitor.transport.private_folder import PrivateFolder
from foreshock.monitor.transport.spool import MemoryStore, Spool, Store, leftovers

logger: Final = logging.getLogger("foreshock")

MAX_BATCH_EVENTS: Final = 256
BATCH_BYTES: Final = 4 * 2**20
MAX_COMMANDS: Final = 1024
SLOW_FAILURES: Final = 8
"""If a person has to correct a setting, the back-off starts as after this many failures: one minute."""
MAX_TRIES_TOO_LARGE: Final = 60
"""Attempts for a batch that is too large even without its samples; then it is dropped, so that later ones are sent."""
TOKEN_REFUSED: Final = (401, 403)
"""After one of these, the token file is read every TOKEN_SECONDS, and a new token is tried at once."""
TOKEN_SECONDS: Final = 1.0
EVENT_BYTES: Final = 1024
"""Assumed size of an event without arrays in the queue."""


_DROPPED_FIRST: Final = wire.Sample | SampleDraft
"""Events that are dropped first if space is short: samples, built or not."""


class Sender:
    """Sends the events of one process instance. health: returns (step, contained errors by component)."""

    def __init__(self, config: AgentConfig, *, run: str, boot: str, health: Callable[[], tuple[int, dict[str, int]]]):
        self._config = config
        self._run = run
        self._boot = boot
        self._health = health
        self.dropped: Counter[str] = Counter()
        """Events lost, by reason."""
        self.faults: Counter[str] = Counter()
        self._events: deque[tuple[int, wire.Event | SampleDraft]] = deque()
        self._bytes_in = self._bytes_out = 0  # each has one writer, so they do not need a lock
        self._commands: deque[wire.Command] = deque()
        self._sequence = 0
        self._began_at = time.monotonic()
        self._started: wire.Started | None = None
        self._started_sent_at = self._began_at
        self._send_started = False
        self._folder: PrivateFolder | None = None
        self._stores: list[Store] = []
        self._memory = MemoryStore(boot, config.queue_bytes)
        self._own: Store = self._memory
        """Store for new batches: the spool if there is one, else memory."""
        self._bearer = Bearer(config.token, config.token_file)
        self._connection = Connection(str(config.url), config.request_seconds)
        self._outage = Outage(config.url, warns=config.rank == 0)
        self._failures = 0
        self._retry_after: str | None = None
        self._too_large = 0
        self._logged_status = 0
        self._all_cut = False
        self._last_batch_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._more: asyncio.Event | None = None
        self._close_seconds = config.close_seconds
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="foreshock-sender", daemon=True)
        self._guard = Guard("sender", self.faults)

    # ---- called by the training thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, event: wire.Event | SampleDraft) -> None:
        """Queue an event without waiting. If the queue is full, a sample is dropped and counted."""
        if isinstance(event, wire.Started):
            self._started = event
        size = _size(event)
        waiting = self._bytes_in - self._bytes_out
        is_measured = isinstance(event, _DROPPED_FIRST)
        bound = self._config.queue_bytes if is_measured else self._config.queue_bytes * 3 // 2
        if waiting + size > bound or not self._thread.is_alive():
            self.dropped["queue_full" if self._thread.is_alive() else "sender_off"] += 1
            return
        self._bytes_in += size
        self._events.append((size, event))

    def commands(self) -> list[wire.Command]:
        """Return the commands received since the last call."""
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def close(self, seconds: float) -> None:
        """Send waiting events, for at most `seconds`; the rest stays in the spool."""
        self._close_seconds = seconds
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + seconds
        self._ready.wait(seconds)
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(max(deadline - time.monotonic(), 0))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _thread_main(self) -> None:
        with self._guard, asyncio.Runner(loop_factory=ResolvingLoop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop, self._more = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        with self._guard:
            self._open_stores()
        self._ready.set()
        cutting = asyncio.create_task(self._cut_again_and_again())
        sending = asyncio.create_task(self._send_again_and_again())
        await self._stop.wait()
        cutting.cancel()
        with self._guard:
            self._cut()
        self._all_cut = True
        self._more.set()
        await asyncio.wait({sending}, timeout=self._close_seconds * 0.8)
        sending.cancel()
        await asyncio.gather(cutting, sending, return_exceptions=True)
        await self._connection.close()
        with self._guard:
            self._outage.ended(self._stores, self.dropped)
        for store in self._stores:
            if isinstance(store, Spool):
                with self._guard:
                    store.close()
        if self._folder is not None:
            self._folder.close()

    def _open_stores(self) -> None:
        self._stores = [self._memory]
        if self._config.spool_directory is None:
            return
        try:
            self._folder = PrivateFolder(Path(self._config.spool_directory))
            old, removed = leftovers(self._folder, self._run, self._config.spool_bytes)
            self._own = Spool(self._folder, self._run, self._boot, self._config.spool_bytes)
        except OSError as error:
            self._spool_off(error)
            return
        if removed:
            self.dropped["spool_full"] += removed
        self._stores = [self._own, self._memory, *old]

    def _spool_off(self, error: OSError) -> None:
        self.faults["spool"] += 1
        self._own = self._memory
        logger.warning("foreshock: the spool is off, unsent batches stay in memory: %s", error.strerror)

    # ---- events become batches ------------------------------------------------------------------------------------

    async def _cut_again_and_again(self) -> None:
        while self._guard.on:
            await asyncio.sleep(self._config.send_every_seconds)
            with self._guard:
                self._cut()

    def _cut(self) -> None:
        """Collect waiting events into batches, and store these in the spool or in memory."""
        while events := self._take():
            self._keep(events)
        idle = time.monotonic() - self._last_batch_at >= self._config.heartbeat_seconds
        if idle and not any(len(store) for store in self._stores):
            self._keep([self._health_event()])

    def _take(self) -> list[wire.Event]:
        events: list[wire.Event] = []
        size = 0
        if self._send_started and self._started is not None:
            self._send_started, self._started_sent_at = False, time.monotonic()
            events.append(self._started)
        while self._events and len(events) < MAX_BATCH_EVENTS and size < BATCH_BYTES:
            bytes_, waiting = self._events.popleft()
            self._bytes_out += bytes_
            size += bytes_
            if (event := self._finished(waiting)) is not None:
                events.append(event)
        return events

    def _finished(self, waiting: wire.Event | SampleDraft) -> wire.Event | None:
        """Return the event, built if it is a draft. If a draft cannot be built, only this event is lost."""
        if not isinstance(waiting, SampleDraft):
            return waiting
        try:
            return waiting.build()
        except Exception as fault:
            self.faults["sample"] += 1
            self.dropped["unbuilt"] += 1
            logger.warning("foreshock: a sample could not be built: %s: %s", type(fault).__name__, str(fault)[:300])
            return None

    def _health_event(self) -> wire.AgentHealth:
        step, faults = self._health()
        return wire.AgentHealth(step=step, dropped=dict(self.dropped), faults=dict(Counter(faults) + self.faults))

    def _keep(self, events: list[wire.Event]) -> None:
        if not self._append(events, force=False):
            # store other events even if samples no longer fit
            words = [event for event in events if not isinstance(event, wire.Sample)]
            kept = len(words) if words and self._append(words, force=True) else 0
            self.dropped["queue_full" if self._own is self._memory else "spool_full"] += len(events) - kept
        if self._more is not None:
            self._more.set()

    def _append(self, events: Sequence[wire.Event], *, force: bool) -> bool:
        batch = wire.Batch(
            run=self._run,
            rank=self._config.rank,
            boot=self._boot,
            sequence=self._sequence + 1,
            events=tuple(events),
        )
        payload = batch.model_dump_json().encode()
        try:
            kept = self._own.append(batch.sequence, payload, force=force)
        except OSError as error:
            self._spool_off(error)
            kept = self._own.append(batch.sequence, payload, force=force)
        if kept:
            self._sequence = batch.sequence
            self._last_batch_at = time.monotonic()
        return kept

    # ---- batches become requests ----------------------------------------------------------------------------------

    async def _send_again_and_again(self) -> None:
        assert self._more is not None
        while self._guard.on:
            before = self.faults["sender"]
            with self._guard:
                waiting = self._oldest()
                if waiting is None:
                    if self._all_cut:  # not already at the stop, because the last batch is cut after it
                        return
                    self._more.clear()
                    await self._more.wait()
                elif not await self._deliver(*waiting) and await self._back_off():
                    return
            if self.faults["sender"] > before:
                await asyncio.sleep(1)

    def _oldest(self) -> tuple[Store, int, bytes] | None:
        """Return the oldest batch of this process instance or, if all are sent, of a dead process."""
        for store in self._stores:
            try:
                waiting = store.peek()
            except OSError as error:
                self.dropped["spool_lost"] += len(store)
                self._stores.remove(store)
                if store is self._own:
                    self._spool_off(error)
                return self._oldest()
            if waiting is not None:
                return store, *waiting
        return None

    async def _back_off(self) -> bool:
        """Wait before the next attempt; True if the agent closes meanwhile."""
        assert self._stop is not None
        until = time.monotonic() + retry_delay(self._failures, self._retry_after)
        closing = False
        while not closing and (left := until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, TOKEN_SECONDS)):
                    closing = await self._stop.wait()
            if self._logged_status in TOKEN_REFUSED and self._bearer.renewed():
                return False
        return closing

    async def _deliver(self, store: Store, sequence: int, payload: bytes) -> bool:
        """Post one batch; True if it is finished: stored by the service, or rejected for good."""
        self._retry_after = None
        words_only = False
        headers = headers_of(self._boot, time.monotonic() - self._began_at, store.boot) | self._bearer.header
        try:
            self._connection.open()
            async with asyncio.timeout(self._config.request_seconds):
                answer = await self._connection.post(payload, headers)
                if answer.status == 413 and (smaller := without_samples(payload)) is not None:
                    words_only = True
                    answer = await self._connection.post(smaller, headers) if smaller else Answer(422)
        except (TimeoutError, httpx.HTTPError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                await self._connection.close()  # the next attempt reads the trusted certificates again
            self._outage.failed(error, self._connection.route)
            self._failures += 1
            return False
        status = answer.status
        self._outage.answered(status)
        if 200 <= status < 300 and self._acknowledged(store, sequence, answer.body):
            self._failures = self._too_large = self._logged_status = 0
            if words_only:
                self.dropped["refused_413"] += 1
            store.pop()
            return True
        self._retry_after = answer.retry_after
        renewed = status in TOKEN_REFUSED and self._bearer.renewed()
        if 200 <= status < 300 or is_retryable(status) or renewed:
            self._failures += 1
            return False
        self._too_large += status == 413
        if not speaks_of_the_batch(answer) and self._too_large < MAX_TRIES_TOO_LARGE:
            self._failures = max(self._failures + 1, SLOW_FAILURES)
            self._log_kept(status)
            return False
        self._too_large = 0
        status = 413 if words_only else status
        self.dropped[f"refused_{status}"] += 1
        logger.warning("foreshock: the service refused batch %d for good with status %d", sequence, status)
        store.pop()
        return True

    def _log_kept(self, status: int) -> None:
        if status != self._logged_status:
            self._logged_status = status
            logger.warning(
                "foreshock: the service or a proxy answers %d: check the token (401, 403), the address (3xx, 404), "
                "the header limit (400, 431) and the body limit (413); batches are stored and sent again about once "
                "a minute",
                status,
            )

    def _acknowledged(self, store: Store, sequence: int, body: bytes | None) -> bool:
        """Whether the answer acknowledges this batch; if it does, queue its commands."""
        if body is None:
            return False
        try:
            ack = wire.Ack.model_validate_json(body)
        except (ValidationError, RecursionError):
            return False
        if ack.boot != store.boot or not sequence <= ack.acknowledged <= max(store.highest, sequence):
            return False
        self._commands.extend(ack.commands[: max(MAX_COMMANDS - len(self._commands), 0)])  # the service repeats others
        # every answer requests `Started` until the service has the batch that contains it
        lately = time.monotonic() - self._started_sent_at < self._config.heartbeat_seconds
        self._send_started |= ack.send_started and store.boot == self._boot and not lately
        return True


def _size(event: wire.Event | SampleDraft) -> int:
    if isinstance(event, SampleDraft):
        return EVENT_BYTES + event.nbytes
    if not isinstance(event, wire.Sample):
        return EVENT_BYTES
    arrays = (event.states, *(getattr(event, name) for name in wire.PER_HEAD))
    return EVENT_BYTES + sum(len(array.data) for array in arrays if array is not None)
