"""The causes of warnings, one entry each: all that depends on a cause but for what finds it (monitor.detect).

The order is that of the evidence which a cause takes, the most first. A warning is corrected when its evidence comes or
ends. Of causes that are active together the first gives the incident its name.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Cause = Literal["attention kernel", "rounding", "score growth", "other"]
"""The cause that a verdict names."""
IncidentCause = Literal["attention kernel", "rounding", "score growth", "not finite", "other"]
"""The cause that warnings are gathered by: what is not finite is a matter of its own (contract.decision.cause_of)."""


Ask = Literal["approve", "switch", "none"]
"""What people are asked for: to approve the proposal that waits, to order a switch, or neither."""


class Text(NamedTuple):
    """What is done, what is left to people, and its button. contract.incident fills in the fields in braces."""

    done: str
    to_do: str
    ask: Ask = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseInfo:
    """What is known of one cause."""

    reads: str
    """How an incident of it begins in words, before `in` and its heads."""
    shown_by: str
    """Key of the metric that shows it; what alerts and messages open is its chart."""
    curable: bool = False
    """Whether a switch of heads helps."""
    harms: bool = False
    """Whether it spoils the weights as soon as it is warned about."""
    advice: str = ""
    """What the alert says of it first."""
    resume_with: str = ""
    """Arguments of `attach` that help a run that is resumed, and a comment."""
    texts: dict[str, Text]
    """What is done and what to do, by what the policy, the order or the switch has come to; "" is any other state."""
    joins: bool = False
    """Causes that join are one incident while they are active at the same time."""


_CLIP: Final = ", or with attention='kernels' and qk_clip='always' where that is not on yet"
"""What holds scores that grow. It would cut what heads have learnt where rounding is the cause."""
_LOWER: Final = "Lower the learning rate or lengthen its warm-up, and look at the data of these steps"
_NO_REMEDY: Final = "No head was switched: rounding is not known to be the cause, and a switch changes only rounding."
_RESUME: Final = "The run has ended. Resume it from {checkpoint}"
_BY_HAND: Final = "Switch every head to {mitigation}."
_WATCH: Final = "Watch the growth; if it continues,"
_LATER: Final = f"{_WATCH} switch every head to {{mitigation}}."
_GROWS_ON: Final = "{given}, and the growth continues: rounding is not the only cause."
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
    **dict.fromkeys(
        ("pending", "delivered"), Text("{by}; not every rank has answered.", "Wait for the agents' answer.")
    ),
    "rejected": Text("{by}: no machine asks for it again until one of these heads has a new warning.", _LATER),
    "applied": Text(
        "{by}: these heads are set to {mode}. A switch is not proposed again until one of them has a new warning.",
        _LATER,
    ),
    **dict.fromkeys(
        ("expired", "refused", "cancelled", "dry_run"), Text("No head was switched.{way}", _BY_HAND, "switch")
    ),
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
CAUSES: Final[dict[IncidentCause, CauseInfo]] = {
    "attention kernel": CauseInfo(
        reads="Attention computes wrong rows",
        shown_by="head.wrong_rows",
        harms=True,
        resume_with='attention="kernels")  # or another version of the attention library; another GPU if only one rank '
        "reports it",
        texts=_KERNEL,
    ),
    "rounding": CauseInfo(
        reads="Rounding makes attention scores drift",
        shown_by="head.score_offset",
        curable=True,
        joins=True,
        advice="If the cause is rounding, switch every head first.",
        texts=_ROUNDING,
    ),
    "score growth": CauseInfo(
        reads="Attention scores grow without a sign of rounding",
        shown_by="head.score_max",
        joins=True,
        advice="If scores grow, lower the learning rate.",
        resume_with='qk_clip="always")  # or a lower learning rate',
        texts=_GROWTH,
    ),
    "not finite": CauseInfo(reads="Numbers are not finite", shown_by="run.loss", harms=True, texts=_NOT_FINITE),
    "other": CauseInfo(reads="Something else failed", shown_by="run.loss", texts=_OTHER),
}


def incident_id(cause: IncidentCause) -> str:
    """The name of a cause's incident within its run."""
    return cause.replace(" ", "-")


def mates(cause: IncidentCause) -> frozenset[IncidentCause]:
    """The causes that are one incident with this one where they stand at one time."""
    return frozenset(one for one in CAUSES if one == cause or (CAUSES[one].joins and CAUSES[cause].joins))


def curable(cause: IncidentCause) -> bool:
    """Whether a switch can help."""
    return CAUSES[cause].curable
