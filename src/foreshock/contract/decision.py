"""What machines do about a warning. The agent and the webhook read it, and people read what follows from it.

A switch changes rounding alone: only growth that looks like rounding calls for one. What people read: contract.causes.
"""

from typing import Final, Literal

from foreshock.contract.causes import IncidentCause, curable
from foreshock.contract.wire import Policy, Verdict

Act = Literal["switch", "propose", "none"]
"""What a machine does: switch by itself, propose a switch to people, or nothing."""
Progress = Literal["unswitched", "switched", "arrested", "not arrested"]
"""Where a cure stands: not given, given, given and found to have stopped the growth, or found not to."""

STEPS_BEFORE: Final = 1000
"""A chart that alerts and messages open begins so long before its incident, or twice as long as that has lasted."""
ACTS: Final[dict[Policy, Act]] = {"observe": "none", "approve": "propose", "auto": "switch"}
UNDONE: Final = ("expired", "refused", "cancelled", "dry_run")
"""States of an order that changed nothing."""
WHOSE: Final = {"head": "the heads that are warned about", "layer": "their layers", "model": "every head"}


def cause_of(verdict: Verdict) -> IncidentCause:
    """The cause under which a verdict is gathered: what is not finite is a matter of its own."""
    return "not finite" if verdict.signal == "nonfinite" and verdict.cause != "rounding" else verdict.cause


def is_active(verdict: Verdict) -> bool:
    """Whether a verdict is a warning that is not over."""
    return verdict.state != "cleared" and verdict.severity != "info"


def because_of(verdict: Verdict, policy: str) -> str:
    """Why heads are switched or proposed: it names the warning, whose sentence people read in the warning itself."""
    return (
        f"{policy}: {verdict.cause} in layer {verdict.layer} head {verdict.head}, warned about at step {verdict.step:,}"
    )


def calls_for_switch(verdict: Verdict) -> bool:
    """Whether an active warning asks for a switch of the head that it names."""
    named = verdict.layer is not None and verdict.head is not None
    return named and is_active(verdict) and curable(cause_of(verdict))


def act_on(cause: IncidentCause, policy: Policy | None) -> Act:
    """What a machine may do about a cause; a run whose policy is unknown is only observed."""
    return ACTS[policy or "observe"] if curable(cause) else "none"


def checkpoint_before(step: float) -> str:
    """What a run goes back to that broke in `step`: before the first one there is no checkpoint of its own."""
    return f"a checkpoint before step {step:,.0f}" if step > 1 else "where it began"
