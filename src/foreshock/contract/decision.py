"""The automatic reaction to a warning, used by the agent and by the webhook. contract.causes has the texts for people.

A switch changes only rounding, so only growth that looks like rounding calls for a switch.
"""

from typing import Final, Literal

from foreshock.contract.causes import IncidentCause, curable
from foreshock.contract.wire import Policy, Verdict

Act = Literal["switch", "propose", "none"]
"""The automatic action: switch, propose a switch to people, or do nothing."""
Progress = Literal["unswitched", "switched", "arrested", "not arrested"]
"""State of a mitigation: not switched, switched, switched and growth stopped, switched but growth continued."""

STEPS_BEFORE: Final = 1000
"""Alerts and messages link to charts that begin this long before the incident, or twice its duration if longer."""
ACTS: Final[dict[Policy, Act]] = {"observe": "none", "approve": "propose", "auto": "switch"}
UNDONE: Final = ("expired", "refused", "cancelled", "dry_run")
"""States of an order that changed nothing."""
WHOSE: Final = {"head": "the heads that are warned about", "layer": "their layers", "model": "every head"}


def cause_of(verdict: Verdict) -> IncidentCause:
    """Return the cause of the incident that a verdict belongs to; non-finite values have their own."""
    return "not finite" if verdict.signal == "nonfinite" and verdict.cause != "rounding" else verdict.cause


def is_active(verdict: Verdict) -> bool:
    """Whether a verdict is an active warning."""
    return verdict.state != "cleared" and verdict.severity != "info"


def because_of(verdict: Verdict, policy: str) -> str:
    """Return the reason for a switch or a proposal; it names the warning but does not repeat its sentence."""
    return (
        f"{policy}: {verdict.cause} in layer {verdict.layer} head {verdict.head}, warned about at step {verdict.step:,}"
    )


def calls_for_switch(verdict: Verdict) -> bool:
    """Whether an active warning asks for a switch of the head that it names."""
    named = verdict.layer is not None and verdict.head is not None
    return named and is_active(verdict) and curable(cause_of(verdict))


def act_on(cause: IncidentCause, policy: Policy | None) -> Act:
    """Return the automatic action for a cause; a run with an unknown policy is only observed."""
    return ACTS[policy or "observe"] if curable(cause) else "none"


def checkpoint_before(step: float) -> str:
    """Return words for the checkpoint to resume from if a run broke at `step`; before step 2 it has none."""
    return f"a checkpoint before step {step:,.0f}" if step > 1 else "where it began"
