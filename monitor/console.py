"""What the agent writes to the training's log: a line when an incident opens, grows tenfold, turns worse or ends.

Nobody reads a line for each of 144 heads. The agent logs what its own process sees; the service gathers ranks.
Where nobody has set up logging, Python shows it on the terminal: what is printed as well stands there twice.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreshock.contract import wire
from foreshock.contract.causes import IncidentCause, mates
from foreshock.contract.decision import cause_of
from foreshock.contract.incident import Incident, Warned, incidents
from foreshock.monitor.config import AgentConfig

logger: Final = logging.getLogger("foreshock")


@dataclass
class _Open:
    """An incident as far as lines have reported it."""

    warned: dict[str, Warned] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    critical: bool = False
    reported: tuple[int, bool] = (0, False)
    """How many digits its heads had, and whether it was critical."""
    causes: set[IncidentCause] = field(default_factory=set)
    """Those that were reported of it."""


class ConsoleReporter:
    """Turns verdicts and switches into lines; its cost does not grow with the heads, but for the lines that it logs."""

    def __init__(self, config: AgentConfig, layers: Sequence[wire.Layer]) -> None:
        self._config = config
        parts = config.first_layer or config.layers or any(layer.heads[0] for layer in layers if layer.heads)
        self.first = config.rank == 0 or bool(parts)
        """Whether this process is the first of those that hold the same heads, as far as the settings show."""
        self.prints = not config.quiet and self.first
        self._open: dict[frozenset[IncidentCause], _Open] = {}
        """By the causes that are one incident."""
        self._switched = 0
        self._clip: str | None = None

    def lines_for(
        self,
        verdicts: Sequence[wire.Verdict],
        modes: Callable[[], Mapping[wire.HeadRef, str]],
        clip: str | None = None,
        page: str = "",
    ) -> list[str]:
        """The lines that the log gets for these verdicts. modes: gives the present mode of every head that is switched;
        clip: `Started.qk_clip` as it is now; page: what a warning ends with."""
        self._clip = clip
        for verdict in verdicts:
            if verdict.severity != "info":
                self._take(verdict)
        lines = []
        for causes, own in list(self._open.items()):
            now = (len(str(len(own.active))) if own.active else 0, own.critical)
            if not own.active:
                del self._open[causes]
                if own.warned:  # else all of it turned out to be of another cause
                    lines.append(f"foreshock: {self._of(own, modes).sentence}")
                continue
            causes_now = {cause_of(one.verdict) for one in own.warned.values() if one.verdict.id in own.active}
            if now > own.reported or now[1] > own.reported[1] or not causes_now <= own.causes:
                own.reported, own.causes = max(now, own.reported), own.causes | causes_now
                incident = self._of(own, modes)
                word = "critical" if own.critical else "warning"
                lines.append(f"foreshock: {word}: {incident.sentence} {incident.done} To do: {incident.to_do}{page}")
        return lines

    def switched(self, events: Sequence[wire.Switched]) -> list[str]:
        """A line when the heads that were switched, or proposed to be, have become tenfold."""
        heads = sum(len(event.heads) for event in events)
        before, self._switched = self._switched, self._switched + heads
        if not heads or (before and len(str(self._switched)) == len(str(before))):
            return []
        last = events[-1]
        what = "switched to" if last.outcome == "applied" else "proposed to be switched to"
        return [f"foreshock: step {last.step}: {self._switched} heads are {what} {last.after[-1]}."]

    def report_switched(self, events: Sequence[wire.Switched]) -> None:
        """Log what `switched` gives."""
        self.log_lines(self.switched(events))

    def log_lines(self, lines: Sequence[str]) -> None:
        """Log these lines, where this process prints any."""
        for line in lines if self.prints else ():
            logger.warning("%s", line)

    def _take(self, verdict: wire.Verdict) -> None:
        causes = mates(cause_of(verdict))
        raised = verdict.step
        for other, own in self._open.items():
            if (before := own.warned.get(verdict.id)) is not None:
                raised = before.raised_step
                if other != causes:  # the detectors know better by now
                    del own.warned[verdict.id]
                    own.active.discard(verdict.id)
        if verdict.state == "cleared" and causes not in self._open:
            return
        own = self._open.setdefault(causes, _Open())
        own.warned[verdict.id] = Warned(self._config.rank, raised, verdict)
        (own.active.discard if verdict.state == "cleared" else own.active.add)(verdict.id)
        own.critical |= verdict.severity == "critical" and verdict.state != "cleared"

    def _of(self, own: _Open, modes: Callable[[], Mapping[wire.HeadRef, str]]) -> Incident:
        config = self._config
        return incidents(
            own.warned.values(),
            modes=modes(),
            policy=config.policy,
            mitigation=config.mitigation,
            scope=config.switch_scope,
            clip=self._clip,
        )[0]
