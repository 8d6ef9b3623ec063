"""Where the agent's events go: to those who subscribed, in this thread, then to mirror, sender and the log."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from foreshock.contract import wire
from foreshock.contract.decision import IncidentCause, cause_of
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard
from foreshock.monitor.mirror import Mirror
from foreshock.monitor.sampling.sample import Draft, GramsDraft, SampleDraft
from foreshock.monitor.transport.sender import Sender

Sink = Callable[[wire.Event], None]
logger: Final = logging.getLogger("foreshock")


class Outbox:
    """Tells events. A sink's fault and the sender's are contained by the guards "sinks" and "sender"."""

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards
        self._sinks: list[Sink] = []
        self._parts: deque[GramsDraft] = deque()
        self._early: list[wire.Switched] = []
        self._standing: dict[IncidentCause, set[str]] = {}
        """Warnings that stand, by the cause of their incident."""
        self.sender: Sender | None = None
        """None without a service."""
        self._mirror: Mirror | None = None

    def subscribe(self, sink: Sink) -> None:
        """Hand every event from now on to `sink`."""
        self._sinks.append(sink)

    def start(self, config: AgentConfig, run: str, boot: str, health: Callable[[], tuple[int, dict[str, int]]]) -> None:
        """Start the sender, where there is a service, and the mirror, where one was asked for."""
        if config.mirror is not None and config.rank == 0:
            self._mirror = Mirror(config.mirror, self._guards["tracker"])
            self._mirror.start()
        if config.url is not None:
            self.sender = Sender(config, run=run, boot=boot, health=health)
            self.sender.start()

    def tell(self, event: wire.Event) -> None:
        """Hand an event over."""
        for sink in self._sinks:
            self._guards["sinks"].run(sink, event)
        if isinstance(event, wire.Verdict):
            self._log(event)
            if self._mirror is not None:
                self._mirror.warned(event)
        self._send(event)

    def _log(self, verdict: wire.Verdict) -> None:
        """A line of the log for the first head of a cause; nobody reads one for each of 144 that follow it."""
        standing = self._standing.setdefault(cause_of(verdict), set())
        for others in self._standing.values():
            others.discard(verdict.id)
        if verdict.state == "raised":
            first = verdict.severity != "info" and not standing
            logger.log(
                logging.WARNING if first else logging.INFO, "foreshock, step %d: %s", verdict.step, verdict.sentence
            )
        if verdict.state != "cleared" and verdict.severity != "info":
            standing.add(verdict.id)

    def tell_after_start(self, switched: wire.Switched, *, started: bool) -> None:
        """Hand a switch over, or keep it until the run has started: before, its first step may still be set."""
        if started:
            self.tell(switched)
        else:
            self._early.append(switched)

    def tell_early(self, step: int) -> None:
        """The run starts after `step`: hand over what was switched before."""
        for switched in self._early:
            self.tell(switched.model_copy(update={"step": step}))
        self._early = []

    def tell_draft(self, draft: Draft) -> None:
        """Hand over what the sender's thread makes an event of, or this thread, where a sink wants it now."""
        if self._mirror is not None and isinstance(draft, SampleDraft):
            self._guards["mirror"].run(self._mirror.sampled, draft.counted)
        if self._sinks:
            self.tell(draft.build())
        else:
            self._send(draft)

    def _send(self, event: wire.Event | Draft) -> None:
        if self.sender is not None:
            self._guards["sender"].run(self.sender.put, event)

    def tell_parts(self, parts: Iterable[GramsDraft]) -> None:
        """Hand over parts of Gram matrices, as room comes; older ones that still wait go first, room or not."""
        self.send_parts(every=True)  # what finds no room is dropped and counted
        self._parts.extend(parts)
        self.send_parts()

    def send_parts(self, *, every: bool = False) -> None:
        """Hand over as many waiting parts as the queue has room for: together they may be larger than it."""
        while self._parts and (every or self.sender is None or self.sender.has_room()):
            self.tell_draft(self._parts.popleft())

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
