"""Where the agent's events go: to those who subscribed, in this thread, then to mirror, sender and the log."""

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
from foreshock.monitor.sampling.collector import SampleDraft
from foreshock.monitor.transport.sender import Sender

Sink = Callable[[wire.Event], None]
logger: Final = logging.getLogger("foreshock")


class Outbox:
    """Hands events on. A sink's fault and the sender's are contained by the guards "sinks" and "sender"."""

    def __init__(self, guards: Mapping[str, Guard], *, console_prints: bool = False) -> None:
        self._guards = guards
        self._console_prints = console_prints
        self._sinks: list[Sink] = []
        self._early: list[wire.Switched | wire.Clipped] | None = []
        """What was done before the run started, whose first step may still be set; None since then."""
        self._active: dict[IncidentCause, set[str]] = {}
        """Identities of warnings that are not cleared, by the cause of their incident."""
        self.started: wire.Started | None = None
        """What the run is, as it was sent last."""
        self.sender: Sender | None = None
        """None without a service."""
        self._mirror: Mirror | None = None
        self.page = ""
        """What a warning in the log ends with: where the run is shown."""

    def subscribe(self, sink: Sink) -> None:
        """Hand every event from now on to `sink`."""
        self._sinks.append(sink)

    def start(self, config: AgentConfig, run: str, boot: str, health: Callable[[], tuple[int, dict[str, int]]]) -> None:
        """Start the sender, where there is a service; make the mirror, where one was asked for."""
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
        """Hand an event over; a switch is kept until the run has started."""
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
        """Log a verdict: as a warning for the first head of a cause, where the console has no line for the incident;
        nobody reads one for each of 144 that follow it."""
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
        elif verdict.severity == "info":  # a note, which never stands
            logger.info("foreshock, step %d: %s", verdict.step, verdict.sentence)
        if verdict.state != "cleared" and verdict.severity != "info":
            active.add(verdict.id)

    def correct(self, started: wire.Started) -> None:
        """Send again what the run is, when what computes its layers changed. Sinks do not hear it: nothing happened."""
        self.started = started
        self._send(started)

    def begin(self, started: wire.Started) -> None:
        """The run starts: hand that over, and what was switched before."""
        self.started, early, self._early = started, self._early or [], None
        if self._mirror is not None:
            self._mirror.start(started.layers)
        self.emit(started)
        for event in early:
            self.emit(event.model_copy(update={"step": started.step}))

    def emit_sample(self, draft: SampleDraft) -> None:
        """Hand over what the sender's thread makes an event of, or this thread, where a sink wants it now."""
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
        """What the service has ordered since the last call."""
        return [] if self.sender is None else self.sender.commands()

    def close(self, seconds: float) -> None:
        """Send what is left, for at most `seconds`."""
        began = time.monotonic()
        if self._mirror is not None:
            self._mirror.end()
        if self.sender is not None:
            self.sender.close(seconds)
        if self._mirror is not None:
            self._mirror.join(seconds - (time.monotonic() - began))
