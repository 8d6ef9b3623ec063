"""What a warning leads to: what machines do about it, what people are told was done, and what is theirs to do.

The agent, the webhook, the messages and the page all read this one decision, so that none of them says what another
does not do. A switch changes rounding alone: only growth that looks like rounding calls for one.
"""

from dataclasses import dataclass
from typing import Final, Literal

from foreshock.contract.modes import stronger
from foreshock.contract.wire import Policy, Verdict

IncidentCause = Literal["rounding", "score growth", "not finite", "other"]
Act = Literal["switch", "propose", "none"]
"""What a machine does: switch by itself, propose a switch to people, or nothing."""
Progress = Literal["unswitched", "switched", "arrested", "not arrested"]
"""Where a cure stands: not given, given, given and found to have stopped the growth, or found not to."""

CAUSES: Final[tuple[IncidentCause, ...]] = ("rounding", "score growth", "not finite", "other")
SHOWN_BY: Final[dict[IncidentCause, str]] = {
    "rounding": "head.score_offset",
    "score growth": "head.score_max",
    "not finite": "run.loss",
    "other": "run.loss",
}
"""Key of the metric that shows a cause; what alerts and messages open is its chart."""
STEPS_BEFORE: Final = 1000
"""A chart that alerts and messages open begins so long before its incident, or twice as long as that has lasted."""
_ACTS: Final[dict[Policy, Act]] = {"observe": "none", "approve": "propose", "auto": "switch"}
UNTOLD_SCOPE: Final = "untold"
"""The scope of a run whose reader is not told it: an alert knows its labels alone."""
_WHOSE: Final = {
    "head": "the heads that are warned about",
    "layer": "their layers",
    "model": "every head",
    UNTOLD_SCOPE: "the heads that the run's switch_scope names (by default every head)",
}


def cause_of(verdict: Verdict) -> IncidentCause:
    """The cause under which a verdict is gathered: what is not finite is a matter of its own."""
    return "not finite" if verdict.signal == "nonfinite" and verdict.cause != "rounding" else verdict.cause


def curable(cause: IncidentCause) -> bool:
    """Whether a switch can help."""
    return cause == "rounding"


def calls_for_switch(verdict: Verdict) -> bool:
    """Whether a standing verdict asks for a switch of the head that it names."""
    named = verdict.layer is not None and verdict.head is not None
    return verdict.state != "cleared" and verdict.severity != "info" and named and curable(cause_of(verdict))


def act_on(cause: IncidentCause, policy: Policy | None) -> Act:
    """What a machine may do about a cause; a run that has not told its policy is only observed."""
    return _ACTS[policy or "observe"] if curable(cause) else "none"


@dataclass(frozen=True, slots=True)
class Decision:
    """`act` is the machines' part, `done` and `to_do` say it in words."""

    act: Act
    done: str
    to_do: str


def decision(
    cause: IncidentCause,
    policy: Policy | None,
    *,
    mitigation: str,
    scope: str | None = None,
    progress: Progress = "unswitched",
    switched: int = 0,
    heads: int = 0,
    before_step: int | None = None,
    finite: bool = True,
) -> Decision:
    """What is done about an incident, and what is left to people.

    heads: those that are warned about, 0 where that is not known; switched: how many of them have a cure; before_step:
    where the incident began, where that is known; finite: False where numbers that are not finite were seen.
    """
    act = act_on(cause, policy)
    checkpoint = "a checkpoint before " + ("the first warning" if before_step is None else f"step {before_step:,}")
    if cause == "not finite":
        return Decision(
            act,
            "Nothing is switched: no switch repairs what is not finite.",
            f"Stop the run and resume from {checkpoint}; leave out the batches that led here, or lower the learning "
            "rate.",
        )
    if not curable(cause):
        return Decision(
            act,
            "Nothing is switched: rounding could not be shown to be the cause, and a switch changes rounding alone.",
            "Lower the learning rate or lengthen its warm-up, and look at the data of these steps; if it goes on, "
            f"resume from {checkpoint}.",
        )
    if not finite:
        return Decision(
            act,
            _given(act, mitigation, scope, switched, heads),
            f"Stop the run and resume from {checkpoint} with {mitigation} on every head from the start.",
        )
    if progress == "arrested":
        return Decision(act, f"{_count(switched, heads)} switched, and the growth has stopped.", "Nothing.")
    if progress == "not arrested":
        further = stronger(mitigation)
        more = f"Switch on to {further}, or resume" if further else "Resume"
        return Decision(
            act,
            f"{_count(switched, heads)} switched, and the growth goes on: rounding is not all of it.",
            f"{more} from {checkpoint} with a lower learning rate.",
        )
    if progress == "switched":
        return Decision(
            act,
            f"{_count(switched, heads)} switched.",
            "Wait for the verdict on the switch: by default it comes a thousand steps later.",
        )
    to_do = {
        "switch": "Look whether the growth stops.",
        "propose": f"Approve the switch to {mitigation}.",
        "none": f"Switch every head to {mitigation}.",
    }[act]
    return Decision(act, _given(act, mitigation, scope, switched, heads), to_do)


def _given(act: Act, mitigation: str, scope: str | None, switched: int, heads: int) -> str:
    whose = _WHOSE.get(scope or "head", "every head")  # agents of 0.1.0 tell no scope: they switch the head alone
    so_far = f" So far {switched} of {heads} are switched." if 0 < switched < heads else ""
    return {
        "switch": f"Policy auto: the agent switches {whose} to {mitigation} at the next step.{so_far}",
        "propose": f"A switch of {whose} to {mitigation} waits for your approval.{so_far}",
        "none": f"Nothing is switched: the run's policy is observe.{so_far}",
    }[act]


def _count(switched: int, heads: int) -> str:
    if heads < 2:
        return "The head is" if heads else "The heads are"
    return f"All {heads} heads are" if switched >= heads else f"{switched} of {heads} heads are"
