"""What a warning leads to: what machines do about it, what people read about that, and what is theirs to do.

The agent, the webhook, the messages and the page all read this one decision, so that none of them says what another
does not do. A switch changes rounding alone: only growth that looks like rounding calls for one.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from foreshock.contract.causes import CAUSES, LOWER, IncidentCause, curable
from foreshock.contract.modes import stronger
from foreshock.contract.orders import Ordered
from foreshock.contract.wire import Policy, Verdict

Act = Literal["switch", "propose", "none"]
"""What a machine does: switch by itself, propose a switch to people, or nothing."""
Ask = Literal["approve", "switch", "none"]
"""What people are asked for: to approve the proposal that waits, to order a switch, or neither."""
Progress = Literal["unswitched", "switched", "arrested", "not arrested"]
"""Where a cure stands: not given, given, given and found to have stopped the growth, or found not to."""

STEPS_BEFORE: Final = 1000
"""A chart that alerts and messages open begins so long before its incident, or twice as long as that has lasted."""
_ACTS: Final[dict[Policy, Act]] = {"observe": "none", "approve": "propose", "auto": "switch"}
_WHOSE: Final = {
    "head": "the heads that are warned about",
    "layer": "their layers",
    "model": "every head",
}


class _Text(NamedTuple):
    """What is done, what is left to people, and the button for it. Fields in braces are filled in by `decision`."""

    done: str
    to_do: str
    ask: Ask = "none"


_RESUME: Final = "The run has ended. Resume it from {checkpoint}"
_GROWTH: Final[dict[str | None, _Text]] = {
    "never": _Text(
        CAUSES["score growth"].done, f'{LOWER}; if it goes on, resume from {{checkpoint}} with qk_clip="always".'
    ),
    "warned": _Text("QK-Clip starts with the next new warning.", f"{LOWER}."),
    "on": _Text(
        "QK-Clip is on: after each step it scales heads whose largest score passed its threshold.",
        "Watch the loss. If it does not come back, resume from {checkpoint} with a lower learning rate.",
    ),
}
"""Scores grow: by the state of QK-Clip (`Started.qk_clip`)."""
_BY_HAND: Final = "Switch every head to {mitigation}."
_LATER: Final = "Watch the growth; if it goes on, switch every head to {mitigation}."
_WAIT: Final = "Wait for the agents' answer."
_GROWS_ON: Final = "{given}, and the growth goes on: rounding is not all of it."
_UNDONE: Final = ("expired", "refused", "cancelled", "dry_run")
_ROUNDING: Final[dict[str, _Text]] = {
    # what the policy does, while nothing is switched and no order is known
    "switch": _Text(
        "Policy auto: the agent switches {whose} to {mitigation} at the next step.{so_far}",
        "Look whether the growth stops.",
    ),
    "propose": _Text(
        "A switch of {whose} to {mitigation} waits for your approval.{so_far}",
        "Approve the switch to {mitigation}.",
    ),
    "none": _Text("Nothing is switched: the run's policy is observe.{so_far}", _BY_HAND, "switch"),
    "no proposal": _Text("Nothing is switched, and no proposal waits.{so_far}", _BY_HAND, "switch"),
    "over": _Text(
        "Nothing grows any more, without a switch.{so_far}",
        "Look at the loss. If it stays on its track, wait: the warning is cleared when nothing has grown for a while.",
    ),
    # how far an order is, of heads that are not switched; "applied": a person took the switch back
    "proposed": _Text(
        "A switch of {whose} to {mode} waits for your approval.{so_far}", "Approve the switch to {mode}.", "approve"
    ),
    "pending": _Text("{by}; it goes out with the agents' next batch.", _WAIT),
    "delivered": _Text("{by}; not every rank has answered.", _WAIT),
    "rejected": _Text("{by}: no machine asks for it again until one of these heads has a new warning.", _LATER),
    "applied": _Text(
        "{by}: these heads are set to {mode}. No machine asks for a switch again until one of them has a new warning.",
        _LATER,
    ),
    **dict.fromkeys(_UNDONE, _Text("Nothing is switched.{way}", _BY_HAND, "switch")),
    # what became of the switch
    "switched": _Text(
        "{given}.{way}", "Wait for the verdict on the switch: by default it comes a thousand steps later."
    ),
    "arrested": _Text("{given}, and the growth has stopped.{way}", "Nothing."),
    "not arrested": _Text(f"{_GROWS_ON}{{way}}", "Resume from {checkpoint} with a lower learning rate."),
    "not arrested, stronger": _Text(
        f"{_GROWS_ON}{{way}}", "Switch on to {stronger}, or resume from {checkpoint} with a lower learning rate."
    ),
    "not arrested, proposed": _Text(
        _GROWS_ON, "Approve the switch to {mode}, or resume from {checkpoint} with a lower learning rate.", "approve"
    ),
}
"""Rounding drives heads: what is done and what to do, by the policy, the order, or what became of the switch."""


def cause_of(verdict: Verdict) -> IncidentCause:
    """The cause under which a verdict is gathered: what is not finite is a matter of its own."""
    return "not finite" if verdict.signal == "nonfinite" and verdict.cause != "rounding" else verdict.cause


def is_active(verdict: Verdict) -> bool:
    """Whether a verdict is a warning that is not over."""
    return verdict.state != "cleared" and verdict.severity != "info"


def calls_for_switch(verdict: Verdict) -> bool:
    """Whether an active warning asks for a switch of the head that it names."""
    named = verdict.layer is not None and verdict.head is not None
    return named and is_active(verdict) and curable(cause_of(verdict))


def act_on(cause: IncidentCause, policy: Policy | None) -> Act:
    """What a machine may do about a cause; a run whose policy is unknown is only observed."""
    return _ACTS[policy or "observe"] if curable(cause) else "none"


@dataclass(frozen=True, slots=True)
class Decision:
    """`act` is the machines' part, `done` and `to_do` say it in words; `ask` is the button that `to_do` means."""

    act: Act
    done: str
    to_do: str
    ask: Ask = "none"


def checkpoint_before(step: float) -> str:
    """What a run goes back to that broke in `step`: before the first one there is no checkpoint of its own."""
    return f"a checkpoint before step {step:,.0f}" if step > 1 else "where it began"


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
    orders_known: bool = False,
    order: Ordered | None = None,
    over: bool = False,
    ended: bool = False,
    clip: str | None = None,
    warning: bool = False,
) -> Decision:
    """What is done about an incident, and what is left to people.

    heads: those that are warned about, 0 where that is not known; switched: how many of them have a cure; before_step:
    where the incident began, where that is known; finite: False where numbers that are not finite were seen;
    orders_known: whether the reader knows what was ordered, as the service does; order: the newest that concerns it;
    over: whether nothing grows any more; ended: whether the run has ended; clip: `Started.qk_clip`; warning: whether no
    warning of the incident is critical.
    """
    act = act_on(cause, policy)
    words = {
        "checkpoint": "a checkpoint before the first warning"
        if before_step is None
        else checkpoint_before(before_step),
        "given": f"{_count(switched, heads)} switched",
        "so_far": f" So far {switched} of {heads} are switched." if 0 < switched < heads else "",
        "whose": _WHOSE.get(scope or "head", "every head"),
        "mitigation": mitigation,
        "stronger": stronger(mitigation) or "",
        "mode": "" if order is None else order.mode,
        "by": "" if order is None else order.way,
        "way": "" if order is None else f" {order.way}.",
    }
    if ended and progress != "arrested":
        cured = curable(cause) and progress == "not arrested"
        how = "with a lower learning rate." if cured else CAUSES[cause].resumed
        text = _Text("{given}.{way}" if switched else "Nothing is switched.", f"{_RESUME} {how}")
    elif not curable(cause):
        info = CAUSES[cause]
        text = _Text(info.done, (info.to_do_of_warning if warning else "") or info.to_do)
        text = _GROWTH.get(clip, text) if cause == "score growth" else text
    elif not finite:
        text = _Text(
            _ROUNDING[act].done,
            "Stop the run and resume from {checkpoint} with {mitigation} on every head from the start.",
        )
    else:
        text = _ROUNDING[_state(act, progress, order, stronger(mitigation), orders_known=orders_known, over=over)]
    return Decision(act, text.done.format(**words), text.to_do.format(**words), text.ask)


def _state(
    act: Act, progress: Progress, order: Ordered | None, further: str | None, *, orders_known: bool, over: bool
) -> str:
    """The line of `_ROUNDING`: what was ordered counts more than what the policy would do."""
    if progress == "not arrested" and order is not None and order.state == "proposed":
        return "not arrested, proposed"
    if progress == "not arrested" and further:
        return "not arrested, stronger"
    if progress != "unswitched":
        return progress
    if over and (order is None or order.state in _UNDONE):
        return "over"
    if order is not None:
        return order.state
    return "no proposal" if act == "propose" and orders_known else act


def in_order(drift: Decision, growth: Decision) -> Decision:
    """What is done where rounding drives heads and scores grow too, made of what is done about either alone."""
    if drift.to_do == "Nothing.":
        return Decision(drift.act, f"Rounding: {drift.done} Score growth: {growth.done}", growth.to_do)
    return Decision(drift.act, drift.done, f"{drift.to_do} Scores grow too: {growth.to_do}", drift.ask)


def _count(switched: int, heads: int) -> str:
    if heads < 2:
        return "The head is" if heads else "The heads are"
    return f"All {heads} heads are" if switched >= heads else f"{switched} of {heads} heads are"
