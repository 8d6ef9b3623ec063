"""Which verdicts lead to a switch, and to which mode. Observing, proposing or acting is the user's policy."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.slots import MODE_NAMES, Mode

_SOFTMAX_MODES: Final = Mode.STABLE_SOFTMAX | Mode.PAPER_SOFTMAX


class Decision(NamedTuple):
    """A switch that a verdict calls for."""

    verdict: wire.Verdict
    head: tuple[int, int]
    mode: Mode


def decide(verdicts: Sequence[wire.Verdict], mitigation: str, modes: dict[tuple[int, int], int]) -> list[Decision]:
    """The switches that `verdicts` call for; `modes` holds the present mode of every (layer, head).

    A mitigation changes rounding alone, so only a warning whose cause is rounding calls for one, and only on a head
    that does not have it yet.
    """
    decisions = []
    for verdict in verdicts:
        if verdict.state == "cleared" or verdict.severity == "info" or verdict.cause != "rounding":
            continue
        if verdict.layer is None or verdict.head is None:
            continue
        head = (verdict.layer, verdict.head)
        now = modes.get(head)
        if now is None:
            continue
        mode = with_mitigation(now, MODE_NAMES[mitigation])
        if mode != now:
            decisions.append(Decision(verdict, head, mode))
    return decisions


def with_mitigation(mode: int, mitigation: Mode) -> Mode:
    """`mode` with the mitigation's flags added; a softmax rule, of which a head has one, takes the old one's place."""
    kept = Mode(mode) & ~_SOFTMAX_MODES if mitigation & _SOFTMAX_MODES else Mode(mode)
    return kept | mitigation
