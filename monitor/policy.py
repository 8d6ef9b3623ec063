"""Which verdicts lead to a switch, and to which mode. Observing, proposing or acting is the user's policy."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from foreshock.contract import wire
from foreshock.contract.decision import Act, act_on, calls_for_switch, cause_of
from foreshock.contract.modes import Mode, parse_mode, with_mode

SwitchScope = Literal["head", "layer", "model"]
_SHARED: Final[dict[SwitchScope, int]] = {"head": 2, "layer": 1, "model": 0}
"""How much of (layer, head) a head has in common with the one that was warned about."""


_OUTCOMES: Final[dict[Act, wire.Outcome | None]] = {"switch": "applied", "propose": "proposed", "none": None}


class Decision(NamedTuple):
    """A switch that a verdict calls for."""

    verdict: wire.Verdict
    heads: tuple[tuple[int, int], ...]
    mode: Mode


def decide(
    verdicts: Sequence[wire.Verdict], mitigation: str, modes: dict[tuple[int, int], int], scope: SwitchScope = "head"
) -> list[Decision]:
    """The switches that `verdicts` call for; `modes` holds the present mode of every (layer, head) that may change.

    Only what contract.decision says calls for one (a mitigation changes rounding alone), and only on heads that do not
    have it yet: the one that was warned about, those of its layer, or all.
    """
    modes = dict(modes)
    decisions = []
    for verdict in verdicts:
        if not calls_for_switch(verdict) or verdict.layer is None or verdict.head is None:
            continue
        if (verdict.layer, verdict.head) not in modes:
            continue
        warned = (verdict.layer, verdict.head)[: _SHARED[scope]]
        wanted: dict[Mode, list[tuple[int, int]]] = {}
        for head, now in modes.items():
            mode = with_mode(now, parse_mode(mitigation))
            if head[: len(warned)] == warned and mode != now:
                wanted.setdefault(mode, []).append(head)
        for mode, heads in wanted.items():
            decisions.append(Decision(verdict, tuple(heads), mode))
            modes.update(dict.fromkeys(heads, int(mode)))
    return decisions


def outcome_of(decision: Decision, policy: wire.Policy) -> wire.Outcome | None:
    """What becomes of a decision under a policy; None where a machine does nothing."""
    return _OUTCOMES[act_on(cause_of(decision.verdict), policy)]
