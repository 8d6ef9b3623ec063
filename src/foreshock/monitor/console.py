"""Write incidents to the training's log: a line when an incident opens, grows tenfold, turns worse or ends.

A line for each of 144 heads would be too much. The agent logs the incidents of its own process; the service combines
ranks. If logging is not configured, Python prints these lines on the terminal, so they are not printed in addition.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foreshock.contract import wire
from foreshock.contract.causes import IncidentCause, mates
from foreshock.contract.decision import cause_of
from foreshock.contract.incident import Incident, RunContext, Warned, incidents
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import logger


@dataclass
class _Open:
    """An incident, and the part of it that lines have reported."""

    warned: dict[str, Warned] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    critical: bool = False
    reported: tuple[int, bool] = (0, False)
    """Digits of the reported number of heads, and whether it was reported as critical."""
    causes: set[IncidentCause] = field(default_factory=set)
    """Reported causes."""


class ConsoleReporter:
    """Turns verdicts and switches into log lines. Its cost grows with the logged lines, not with the heads."""

    def __init__(self, config: AgentConfig, layers: Sequence[wire.Layer]) -> None:
        self._config = config
        parts = config.first_layer or any(layer.heads[0] for layer in layers if layer.heads)
        self.first = config.rank == 0 or bool(parts)
        """Whether this process is the first of those with the same heads, according to the settings."""
        self.prints = not config.quiet and self.first
        self._open: dict[frozenset[IncidentCause], _Open] = {}
        """Open incidents, by their set of related causes."""
        self._switched: defaultdict[str, set[wire.HeadRef]] = defaultdict(set)
        """Heads that warnings switched, or proposed to switch, by outcome."""

    def lines_for(
        self,
        verdicts: Sequence[wire.Verdict],
        modes: Callable[[], Mapping[wire.HeadRef, str]],
        clip: str | None = None,
        page: str = "",
    ) -> list[str]:
        """Return the log lines for these verdicts. modes: returns the mode of every switched head; clip: the present
        `Started.qk_clip`; page: text at the end of a warning."""
        for verdict in verdicts:
            if verdict.severity != "info":
                self._take(verdict)
        lines = []
        for causes, own in list(self._open.items()):
            now = (len(str(len(own.active))) if own.active else 0, own.critical)
            if not own.active:
                del self._open[causes]
                if own.warned:  # otherwise all its warnings got another cause
                    lines.append(f"foreshock: {self._incident(own, modes, clip).sentence}")
                continue
            causes_now = {cause_of(one.verdict) for one in own.warned.values() if one.verdict.id in own.active}
            if now > own.reported or now[1] > own.reported[1] or not causes_now <= own.causes:
                own.reported, own.causes = max(now, own.reported), own.causes | causes_now
                incident = self._incident(own, modes, clip)
                word = "critical" if own.critical else "warning"
                lines.append(f"foreshock: {word}: {incident.sentence} {incident.done} To do: {incident.to_do}{page}")
        return lines

    def switched(self, events: Sequence[wire.Switched]) -> list[str]:
        """Return a line for each switch by a person, and one if the number of heads that warnings switched, or proposed
        to switch, has grown tenfold."""
        lines: list[str] = []
        grown: dict[str, tuple[int, wire.Switched]] = {}
        for event in events:
            heads, known = f"{len(event.heads)} head{'s' * (len(event.heads) != 1)}", self._switched[event.outcome]
            if event.verdict is None and event.outcome == "applied":
                done = f"{heads} switched to {'+'.join(set(event.after))}" if event.heads else "carried out an order"
                lines.append(f"step {event.step:,}: {done}: {event.reason}")
                self._switched["applied"] -= set(event.heads)
            elif event.verdict is None and event.outcome in ("refused", "expired"):
                order = f"the order to switch {heads}" if event.heads else "an order"
                lines.append(f"step {event.step:,}: {order} was {event.outcome}: {event.reason}")
            elif event.outcome in ("applied", "proposed"):
                grown.setdefault(event.outcome, (len(known), event))
                known |= set(event.heads)
        for outcome, (before, event) in grown.items():
            now = len(self._switched[outcome])
            if not before or len(str(now)) > len(str(before)):
                what = "switched to" if outcome == "applied" else "proposed to be switched to"
                lines.append(
                    f"step {event.step:,}: {now} {'head is' if now == 1 else 'heads are'} {what} {event.after[-1]}."
                )
        return [f"foreshock: {line}" for line in lines]

    def report_switched(self, events: Sequence[wire.Switched]) -> None:
        """Log the lines of `switched`; switches by people are logged even with `quiet`."""
        for line in self.switched([event for event in events if event.verdict is None]) if self.first else ():
            logger.warning("%s", line)
        self.log_lines(self.switched([event for event in events if event.verdict is not None]))

    def log_lines(self, lines: Sequence[str]) -> None:
        """Log these lines, if this process prints lines."""
        for line in lines if self.prints else ():
            logger.warning("%s", line)

    def _take(self, verdict: wire.Verdict) -> None:
        causes = mates(cause_of(verdict))
        raised = verdict.step
        for other, own in self._open.items():
            if (before := own.warned.get(verdict.id)) is not None:
                raised = before.raised_step
                if other != causes:  # the detectors have changed the cause
                    del own.warned[verdict.id]
                    own.active.discard(verdict.id)
        if verdict.state == "cleared" and causes not in self._open:
            return
        own = self._open.setdefault(causes, _Open())
        own.warned[verdict.id] = Warned(self._config.rank, raised, verdict)
        (own.active.discard if verdict.state == "cleared" else own.active.add)(verdict.id)
        own.critical |= verdict.severity == "critical" and verdict.state != "cleared"

    def _incident(self, own: _Open, modes: Callable[[], Mapping[wire.HeadRef, str]], clip: str | None) -> Incident:
        config = self._config
        context = RunContext(config.mitigation, modes(), policy=config.policy, scope=config.switch_scope, clip=clip)
        return incidents(own.warned.values(), context)[0]
