"""Who has heads switched: verdicts under the user's policy, and the service's orders, a few at each step boundary."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.decision import Act, act_on, calls_for_switch, cause_of
from foreshock.contract.modes import Mode
from foreshock.contract.orders import SwitchScope, switches
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.switch import Switchboard

AT_ONCE: Final = 4
"""Orders carried out at one boundary: a switch of many heads takes milliseconds, and a step may take as many."""
MAX_WAITING: Final = 1024
"""Those beyond are left out: the service sends an order again until it is answered."""
_OUTCOMES: Final[dict[Act, wire.Outcome | None]] = {"switch": "applied", "propose": "proposed", "none": None}


class Decision(NamedTuple):
    """A switch that a verdict calls for."""

    verdict: wire.Verdict
    heads: tuple[wire.HeadRef, ...]
    mode: Mode


class Switching:
    """Acts on verdicts and orders; hands every event to `emit`, and what became of a switch to `report`."""

    def __init__(
        self,
        config: AgentConfig,
        switchboard: Switchboard,
        emit: Callable[[wire.Event], None],
        report: Callable[[Sequence[wire.Switched]], None],
    ) -> None:
        self._config: Final = config
        self._switchboard: Final = switchboard
        self._emit: Final = emit
        self._report: Final = report
        self._waiting: dict[str, wire.Command] = {}

    def settle(self, since_step: int, step: int) -> None:
        """The switches that waited, as the step since `since_step` shows what became of them."""
        done = self._switchboard.settle(since_step, step, time.time())
        for switched in done:
            self._emit(switched)
        self._report(done)

    def obey(self, arrived: Iterable[wire.Command], step: int) -> None:
        """Carry out the oldest orders; the rest waits for the boundaries that follow."""
        for command in self.due(arrived):
            done = self._switchboard.obey(command, step=step, unix_seconds=time.time())
            if done is not None:
                self._emit(done)
                self._report([done])

    def due(self, arrived: Iterable[wire.Command]) -> list[wire.Command]:
        """What to carry out now, in the order of arrival, each once."""
        for command in arrived:
            if len(self._waiting) < MAX_WAITING and not self._switchboard.answered(command.id):
                self._waiting.setdefault(command.id, command)
        return [self._waiting.pop(name) for name in list(islice(self._waiting, AT_ONCE))]

    def act(self, verdicts: Sequence[wire.Verdict], step: int) -> None:
        """Make or propose the switches that verdicts call for, or say which heads refuse them. A new warning ends every
        hold that a person has put on its head."""
        board, config = self._switchboard, self._config
        board.held -= {(v.layer, v.head) for v in verdicts if v.state == "raised"}
        modes = {head: mode for head, mode in board.wanted().items() if head not in board.held}
        done: list[wire.Switched] = []
        for verdict, heads, mode in decide(verdicts, config.mitigation, modes, config.switch_scope):
            if (outcome := _OUTCOMES[act_on(cause_of(verdict), config.policy)]) is not None:
                named = f"policy {config.policy}"
                done += board.follow(heads, mode, verdict, step=step, outcome=outcome, policy=named)
        for switched in done:
            self._emit(switched)
        self._report(done)


def decide(
    verdicts: Iterable[wire.Verdict], mitigation: str, modes: dict[wire.HeadRef, int], scope: SwitchScope
) -> Iterator[Decision]:
    """The switches that `verdicts` call for; `modes` holds the present mode of every (layer, head) that may change.

    Only what contract.decision says calls for one (a mitigation changes rounding alone), and only on heads that do not
    have it yet: the one that was warned about, those of its layer, or all.
    """
    modes = dict(modes)
    for verdict in verdicts:
        if calls_for_switch(verdict) and verdict.layer is not None and verdict.head is not None:
            for mode, heads in switches([(verdict.layer, verdict.head)], modes, mitigation, scope).items():
                modes.update(dict.fromkeys(heads, int(mode)))
                yield Decision(verdict, tuple(heads), mode)
