"""What a warning leads to: what machines do about it, what people read about that, and what is theirs to do.

The agent, the webhook, the messages and the page all read this one decision, so that none of them says what another
does not do. A switch changes rounding alone: only growth that looks like rounding calls for one.
"""

from dataclasses import dataclass
from typing import Final, Literal

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
HOLDS: Final = "no machine asks for it again until a warning of these heads is raised anew."
"""How long a person's no holds: it was an answer to the evidence of the warnings that stood then."""
_GROWTH: Final[dict[str | None, tuple[str, str]]] = {
    "never": (
        CAUSES["score growth"].done,
        f'{LOWER}; if it goes on, resume from {{checkpoint}} with qk_clip="always".',
    ),
    "warned": ("QK-Clip starts with the next new warning.", f"{LOWER}."),
    "on": (
        "QK-Clip is on: after each step it scales heads whose largest score passed its threshold.",
        "Watch the loss. If it does not come back, resume from {checkpoint} with a lower learning rate.",
    ),
}
"""What is done about scores that grow, and what is left to people, by the state of QK-Clip (`Started.qk_clip`)."""
_ACTS: Final[dict[Policy, Act]] = {"observe": "none", "approve": "propose", "auto": "switch"}
_WHOSE: Final = {
    "head": "the heads that are warned about",
    "layer": "their layers",
    "model": "every head",
}


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
    checkpoint = "a checkpoint before the first warning" if before_step is None else checkpoint_before(before_step)
    given = f"{_count(switched, heads)} switched"
    if ended and progress != "arrested":
        cured = curable(cause) and progress == "not arrested"
        how = "with a lower learning rate." if cured else CAUSES[cause].resumed
        to_do = f"The run has ended. Resume it from {checkpoint} {how.format(mitigation=mitigation)}"
        done = f"{given}.{_way(order)}" if switched else "Nothing is switched."
        return Decision(act, done, to_do)
    if not curable(cause):
        info = CAUSES[cause]
        own = info.done, (info.to_do_of_warning if warning else "") or info.to_do
        done, to_do = _GROWTH.get(clip, own) if cause == "score growth" else own
        return Decision(act, done, to_do.format(checkpoint=checkpoint))
    if not finite:
        return Decision(
            act,
            _given(act, mitigation, scope, switched, heads),
            f"Stop the run and resume from {checkpoint} with {mitigation} on every head from the start.",
        )
    if progress == "arrested":
        return Decision(act, f"{given}, and the growth has stopped.{_way(order)}", "Nothing.")
    if progress == "not arrested":
        further = stronger(mitigation)
        waits = order is not None and order.state == "proposed"
        on = f"Approve the switch to {order.mode}" if order is not None and waits else f"Switch on to {further}"
        more = f"{on}, or resume" if further or waits else "Resume"
        return Decision(
            act,
            f"{given}, and the growth goes on: rounding is not all of it.{'' if waits else _way(order)}",
            f"{more} from {checkpoint} with a lower learning rate.",
            "approve" if waits else "none",
        )
    if progress == "switched":
        return Decision(
            act,
            f"{given}.{_way(order)}",
            "Wait for the verdict on the switch: by default it comes a thousand steps later.",
        )
    return _unswitched(act, mitigation, scope, switched, heads, order, orders_known, over)


def in_order(drift: Decision, growth: Decision) -> Decision:
    """What is done where rounding drives heads and scores grow too, made of what is done about either alone."""
    if drift.to_do == "Nothing.":
        return Decision(drift.act, f"Rounding: {drift.done} Score growth: {growth.done}", growth.to_do)
    return Decision(drift.act, drift.done, f"{drift.to_do} Scores grow too: {growth.to_do}", drift.ask)


def _unswitched(
    act: Act,
    mitigation: str,
    scope: str | None,
    switched: int,
    heads: int,
    order: Ordered | None,
    orders_known: bool,
    over: bool,
) -> Decision:
    """Rounding drives heads that have no cure: what was ordered counts more than what the policy would do."""
    by_hand = f"Switch every head to {mitigation}."
    if over and (order is None or order.state in ("expired", "refused", "cancelled")):
        return Decision(
            act,
            f"Nothing grows any more, without a switch.{_so_far(switched, heads)}",
            "Look at the loss. If it stays on its track, wait: the warning is cleared when nothing has grown for "
            "a while.",
        )
    later = f"Watch the growth; if it goes on, switch every head to {mitigation}."
    if order is not None and order.state in ("pending", "delivered"):
        far = "it goes out with the agents' next batch" if order.state == "pending" else "not every rank has answered"
        return Decision(act, f"{order.way}; {far}.", "Wait for the agents' answer.")
    if order is not None and order.state == "rejected":
        return Decision(act, f"{order.way}: {HOLDS}", later)
    if order is not None and order.state == "applied":
        return Decision(act, f"{order.way}: these heads are set to {order.mode}. {HOLDS.capitalize()}", later)
    if order is not None and order.state != "proposed":
        return Decision(act, f"Nothing is switched.{_way(order)}", by_hand, "switch")
    if order is not None:
        waits = _given("propose", order.mode, scope, switched, heads)
        return Decision(act, waits, f"Approve the switch to {order.mode}.", "approve")
    if act == "propose" and orders_known:
        return Decision(
            act, f"Nothing is switched, and no proposal waits.{_so_far(switched, heads)}", by_hand, "switch"
        )
    to_do = {
        "switch": "Look whether the growth stops.",
        "propose": f"Approve the switch to {mitigation}.",
        "none": by_hand,
    }[act]
    ask: Ask = "switch" if act == "none" else "none"
    return Decision(act, _given(act, mitigation, scope, switched, heads), to_do, ask)


def _way(order: Ordered | None) -> str:
    return "" if order is None else f" {order.way}."


def _given(act: Act, mitigation: str, scope: str | None, switched: int, heads: int) -> str:
    whose = _WHOSE.get(scope or "head", "every head")
    so_far = _so_far(switched, heads)
    return {
        "switch": f"Policy auto: the agent switches {whose} to {mitigation} at the next step.{so_far}",
        "propose": f"A switch of {whose} to {mitigation} waits for your approval.{so_far}",
        "none": f"Nothing is switched: the run's policy is observe.{so_far}",
    }[act]


def _so_far(switched: int, heads: int) -> str:
    return f" So far {switched} of {heads} are switched." if 0 < switched < heads else ""


def _count(switched: int, heads: int) -> str:
    if heads < 2:
        return "The head is" if heads else "The heads are"
    return f"All {heads} heads are" if switched >= heads else f"{switched} of {heads} heads are"
