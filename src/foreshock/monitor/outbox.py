"""Deliver the agent's events: to subscribers in this thread, then to the mirror, the sender and the log."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from foreshock.contract import wire
from foreshock.contract.causes import IncidentCause
from foreshock.contract.decision import cause_of
from foreshock.contract.incident import page_of
from foreshock.contract.route import through
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard, say
from foreshock.monitor.mirror import Mirror
from foreshock.monitor.sampling import SampleDraft
from foreshock.monitor.transport.sender import Sender

Sink = Callable[[wire.Event], None]
logger: Final = logging.getLogger("foreshock")


class Outbox:
    """Delivers events. The guards "sinks" and "sender" contain errors of subscribers and of the sender."""

    def __init__(self, guards: Mapping[str, Guard], *, console_prints: bool = False) -> None:
        self._guards = guards
        self._console_prints = console_prints
        self._sinks: list[Sink] = []
        self._early: list[wire.Switched | wire.Clipped] | None = []
        """Switches from before the run's start, whose step number may still change; None after the start."""
        self._active: dict[IncidentCause, set[str]] = {}
        """Ids of active warnings, by the cause of their incident."""
        self.started: wire.Started | None = None
        """The last `Started` event that was sent."""
        self.sender: Sender | None = None
        """None without a service."""
        self._mirror: Mirror | None = None
        self.page = ""
        """The run's page in parentheses, for the end of a warning in the log."""

    def subscribe(self, sink: Sink) -> None:
        """Call `sink` with every later event."""
        self._sinks.append(sink)

    def start(self, config: AgentConfig, run: str, boot: str, health: Callable[[], tuple[int, dict[str, int]]]) -> None:
        """Start the sender, if a service is set, and create the mirror, if one is set."""
        if config.mirror is not None and (config.rank == 0 or config.mirror == "otlp"):
            guard = self._guards["tracker"]
            self._mirror = Mirror(config.mirror, guard, run=run, rank=config.rank, world_size=config.world_size)
        if config.url is not None:
            if config.spool_directory is None and "spool_directory" not in config.model_fields_set:
                logger.warning(
                    "foreshock: the user has no home folder, so unsent batches stay in memory; set "
                    "FORESHOCK_SPOOL_DIRECTORY to a folder to store them there"
                )
            page = page_of(config.url, run)
            self.page = f" ({page})"
            self.sender = Sender(config, run=run, boot=boot, health=health)
            self.sender.start()
            if config.shows:
                by = through(config.url)
                say(f"foreshock: live page {page}" + (f"; batches are sent{by}" if by else ""))

    def emit(self, event: wire.Event) -> None:
        """Deliver an event; a switch before the run's start is delivered after it."""
        if self._early is not None and isinstance(event, wire.Switched | wire.Clipped):
            self._early.append(event)
            return
        for sink in self._sinks:
            self._guards["sinks"].run(sink, event)
        if isinstance(event, wire.Verdict):
            self._log(event)
            if self._mirror is not None:
                self._guards["mirror"].run(self._mirror.verdict, event)
        self._send(event)

    def _log(self, verdict: wire.Verdict) -> None:
        """Log a verdict, at level WARNING only for the first head of a cause, if the console does not print incidents.

        An incident may concern hundreds of heads, and nobody reads a line for each.
        """
        active = self._active.setdefault(cause_of(verdict), set())
        for others in self._active.values():
            others.discard(verdict.id)
        if verdict.state == "raised":
            opens = verdict.severity != "info" and not active
            if opens and self._mirror is not None:
                self._guards["mirror"].run(self._mirror.alert, verdict, self.page)
            first = opens and not self._console_prints
            level = logging.WARNING if first else logging.INFO
            logger.log(level, "foreshock, step %d: %s%s", verdict.step, verdict.sentence, self.page if first else "")
        elif verdict.severity == "info":  # a note, which is never active
            logger.info("foreshock, step %d: %s", verdict.step, verdict.sentence)
        if verdict.state != "cleared" and verdict.severity != "info":
            active.add(verdict.id)

    def correct(self, started: wire.Started) -> None:
        """Send `Started` again after the layers' backends changed. Subscribers do not get it, because it is not new."""
        self.started = started
        self._send(started)

    def begin(self, started: wire.Started) -> None:
        """Deliver the run's start, and then the switches from before it."""
        self.started, early, self._early = started, self._early or [], None
        if self._mirror is not None:
            self._mirror.start(started.layers)
        self.emit(started)
        for event in early:
            self.emit(event.model_copy(update={"step": started.step}))

    def emit_sample(self, draft: SampleDraft) -> None:
        """Deliver a sample. The sender's thread builds its event, or this thread if there are subscribers."""
        if self._mirror is not None:
            self._guards["mirror"].run(self._mirror.sampled, draft.counted)
        if self._sinks:
            self.emit(draft.build())
        else:
            self._send(draft)

    def _send(self, event: wire.Event | SampleDraft) -> None:
        if self.sender is not None:
            self._guards["sender"].run(self.sender.put, event)

    def commands(self) -> list[wire.Command]:
        """Return the service's commands since the last call."""
        return [] if self.sender is None else self.sender.commands()

    def close(self, seconds: float) -> None:
        """Send the remaining events, for at most `seconds`."""
        began = time.monotonic()
        if self._mirror is not None:
            self._mirror.end()
        if self.sender is not None:
            self.sender.close(seconds)
        if self._mirror is not None:
            self._mirror.join(seconds - (time.monotonic() - began))
