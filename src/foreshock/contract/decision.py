"""What a warning leads to: what machines do about it, what people read about that, and what they are asked for.

The agent, the webhook, the messages and the page all read this one table, so that none of them says what another does
not do. A switch changes rounding alone: only growth that looks like rounding calls for one.
"""

from typing import Final, Literal, NamedTuple

from foreshock.contract.causes import IncidentCause, curable
from foreshock.contract.orders import OPEN
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
WHOSE: Final = {"head": "the heads that are warned about", "layer": "their layers", "model": "every head"}


class Text(NamedTuple):
    """What is done, what is left to people, and its button. contract.incident fills in the fields in braces."""

    done: str
    to_do: str
    ask: Ask = "none"


_CLIP: Final = ", or with attention='kernels' and qk_clip='always' where that is not on yet"
"""What holds scores that grow. It would cut what heads have learnt where rounding is the cause."""
_LOWER: Final = "Lower the learning rate or lengthen its warm-up, and look at the data of these steps"
_NO_REMEDY: Final = "No head was switched: rounding is not known to be the cause, and a switch changes only rounding."
_RESUME: Final = "The run has ended. Resume it from {checkpoint}"
_BY_HAND: Final = "Switch every head to {mitigation}."
_WATCH: Final = "Watch the growth; if it continues,"
_LATER: Final = f"{_WATCH} switch every head to {{mitigation}}."
_GROWS_ON: Final = "{given}, and the growth continues: rounding is not the only cause."
UNDONE: Final = ("expired", "refused", "cancelled", "dry_run")
_BY_POLICY: Final[dict[str, Text]] = {
    "switch": Text(
        "Policy auto: the agent switches {whose} to {mitigation} at the next step.{so_far}",
        "Look whether the growth stops.",
    ),
    "propose": Text(
        "A switch of {whose} to {mitigation} waits for your approval.{so_far}", "Approve the switch to {mitigation}."
    ),
    "none": Text("No head was switched: the run's policy is observe.{so_far}", _BY_HAND, "switch"),
}
_ROUNDING: Final[dict[str, Text]] = {
    # what the policy does, while nothing is switched and no order is known
    **_BY_POLICY,
    "no proposal": Text("No head was switched, and there is no proposal.{so_far}", _BY_HAND, "switch"),
    "slows": Text("No head was switched, because the growth slows down.{so_far}", _LATER),
    "over": Text(
        "The growth has stopped without a switch.{so_far}",
        "Look at the loss. If it stays on its track, wait: the warning is cleared when nothing has grown for a while.",
    ),
    **{
        f"not finite, {act}": Text(
            text.done, "Stop the run and resume from {checkpoint} with {mitigation} on every head from the start."
        )
        for act, text in _BY_POLICY.items()
    },
    # how far an order is, of heads that are not switched; "applied": a person took the switch back
    "proposed": Text(
        "A switch of {whose} to {mode} waits for your approval.{so_far}", "Approve the switch to {mode}.", "approve"
    ),
    **dict.fromkeys(OPEN, Text("{by}; not every rank has answered.", "Wait for the agents' answer.")),
    "rejected": Text("{by}: no machine asks for it again until one of these heads has a new warning.", _LATER),
    "applied": Text(
        "{by}: these heads are set to {mode}. A switch is not proposed again until one of them has a new warning.",
        _LATER,
    ),
    **dict.fromkeys(UNDONE, Text("No head was switched.{way}", _BY_HAND, "switch")),
    # what became of the switch
    "switched": Text(
        "{given}.{way}", "Wait for the verdict on the switch: by default it comes a thousand steps later."
    ),
    "arrested": Text("{given}, and the growth has stopped.{way}", "Nothing."),
    "not arrested": Text(f"{_GROWS_ON}{{way}}", "Resume from {checkpoint} with a lower learning rate."),
    "not arrested, stronger": Text(
        f"{_GROWS_ON}{{way}}", "Switch on to {stronger}, or resume from {checkpoint} with a lower learning rate."
    ),
    "not arrested, proposed": Text(
        _GROWS_ON, "Approve the switch to {mode}, or resume from {checkpoint} with a lower learning rate.", "approve"
    ),
    "ended": Text("{ended}", f"{_RESUME} with {{mitigation}} on every head from the start."),
    "ended, not arrested": Text("{ended}", f"{_RESUME} with a lower learning rate."),
}
_GROWTH: Final[dict[str, Text]] = {
    # by the state of QK-Clip (`Started.qk_clip`); "" where that is not known
    "": Text(_NO_REMEDY, f"{_LOWER}; if the growth continues, resume from {{checkpoint}}{_CLIP}."),
    "never": Text(_NO_REMEDY, f'{_LOWER}; if the growth continues, resume from {{checkpoint}} with qk_clip="always".'),
    "warned": Text("QK-Clip starts with the next new warning.", f"{_LOWER}."),
    "on": Text(
        "QK-Clip is on: after each step it scales heads whose largest score passed its threshold.",
        "Watch the loss. If it does not come back, resume from {checkpoint} with a lower learning rate.",
    ),
    "slows": Text(_NO_REMEDY, f"{_WATCH} lower the learning rate."),
    "ended": Text("{ended}", f"{_RESUME} with a lower learning rate or a longer warm-up{_CLIP}."),
}
_NOT_FINITE: Final[dict[str, Text]] = {
    "": Text(
        "No head was switched: a switch cannot repair non-finite numbers.",
        "Stop the run, look at the place that the warning names, and resume from {checkpoint}; leave out the batches "
        "that led here, or lower the learning rate.",
    ),
    "first step": Text(
        "No head was switched: a switch cannot repair non-finite numbers.",
        "Repair what the warning names, and start the run again. The first step failed, so neither a lower learning "
        "rate nor an earlier checkpoint helps.",
    ),
    "warning": Text(
        "No head was switched: a switch cannot repair non-finite numbers.",
        "Let the run continue and look at the place that the warning names, the mask, the loss scale and the batches "
        "of these steps.",
    ),
    "ended": Text("{ended}", f"{_RESUME} without the batches that led here, or with a lower learning rate."),
}
_OTHER: Final[dict[str, Text]] = {
    "": Text(_NO_REMEDY, f"{_LOWER}; if the growth continues, resume from {{checkpoint}}."),
    "ended": Text("{ended}", f"{_RESUME} with a lower learning rate or a longer warm-up."),
}
_KERNEL: Final[dict[str, Text]] = {
    "": Text(
        "No head was switched: that needs policy auto and replace_wrong_attention.",
        "Set the layer to row_corrected or change the library version; if only one rank reports it, drain its GPU. "
        "Then resume from {checkpoint}.",
    ),
    "moved": Text(
        "Every layer with wrong rows runs on foreshock's kernels now.",
        "Change the library version; if only one rank reports it, drain its GPU. The weights may hold the harm: if the "
        "loss is off its track, resume from {checkpoint}.",
    ),
    "ended": Text("{ended}", f"{_RESUME} with attention='kernels' or another version of the attention library."),
}
TEXTS: Final[dict[IncidentCause, dict[str, Text]]] = {
    "attention kernel": _KERNEL,
    "rounding": _ROUNDING,
    "score growth": _GROWTH,
    "not finite": _NOT_FINITE,
    "other": _OTHER,
}
"""What is done and what to do, by the cause and by what the policy, the order or the switch has come to."""


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
    return _ACTS[policy or "observe"] if curable(cause) else "none"


def checkpoint_before(step: float) -> str:
    """What a run goes back to that broke in `step`: before the first one there is no checkpoint of its own."""
    return f"a checkpoint before step {step:,.0f}" if step > 1 else "where it began"
