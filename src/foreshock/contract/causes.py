"""The causes of warnings, with everything that depends on a cause except its detection (monitor.detect).

Causes that need more evidence come first. The cause of a warning is corrected when such evidence appears or disappears.
If several causes are active together, the first one names the incident.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Cause = Literal["attention kernel", "rounding", "score growth", "other"]
"""The cause that a verdict names."""
IncidentCause = Literal["attention kernel", "rounding", "score growth", "not finite", "other"]
"""The causes by which warnings are grouped; non-finite values have their own (contract.decision.cause_of)."""


Ask = Literal["approve", "switch", "none"]
"""The requested action: to approve the waiting proposal, to order a switch, or none of these."""


class Text(NamedTuple):
    """The actions so far, the next actions of people, and their button. contract.incident fills in fields in braces."""

    done: str
    to_do: str
    ask: Ask = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseInfo:
    """The properties and texts of one cause."""

    reads: str
    """The beginning of an incident's sentence, before `in` and its heads."""
    shown_by: str
    """Key of the metric that shows it; alerts and messages link to the chart of this metric."""
    curable: bool = False
    """Whether a switch of heads helps."""
    harms: bool = False
    """Whether the weights are already harmed when the warning is raised."""
    advice: str = ""
    """The first advice in the alert."""
    resume_with: str = ""
    """Arguments of `attach` that help when the run is resumed, and a comment."""
    texts: dict[str, Text]
    """Texts by the state of the policy, the order or the switch (`contract.incident._state`); "" is the default."""
    joins: bool = False
    """Whether it forms one incident with other such causes while they are active at the same time."""


_CLIP: Final = ", or with attention='kernels' and qk_clip='always' if it is not on yet"
"""The remedy for growing scores. If the cause is rounding, it would reduce scores that the heads have learnt."""
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
        "Check whether the growth stops.",
    ),
    "propose": Text(
        "A switch of {whose} to {mitigation} waits for your approval.{so_far}", "Approve the switch to {mitigation}."
    ),
    "none": Text("No head was switched: the run's policy is observe.{so_far}", _BY_HAND, "switch"),
}
_ROUNDING: Final[dict[str, Text]] = {
    # the policy's action, before a switch or an order
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
    # the state of an order for heads that are not switched; "applied": a person undid the switch
    "proposed": Text(
        "A switch of {whose} to {mode} waits for your approval.{so_far}", "Approve the switch to {mode}.", "approve"
    ),
    **dict.fromkeys(
        ("pending", "delivered"),
        Text(
            "{by}; not every rank has answered.",
            "Wait for the agents' answer; if none comes, check whether the run still trains.",
        ),
    ),
    "rejected": Text("{by}: foreshock does not propose it again until one of these heads has a new warning.", _LATER),
    "applied": Text(
        "{by}: these heads are set to {mode}. A switch is not proposed again until one of them has a new warning.",
        _LATER,
    ),
    **dict.fromkeys(
        ("expired", "refused", "cancelled", "dry_run"), Text("No head was switched.{way}", _BY_HAND, "switch")
    ),
    # the result of the switch
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
    # by the state of QK-Clip (`Started.qk_clip`); "" if unknown
    "": Text(_NO_REMEDY, f"{_LOWER}; if the growth continues, resume from {{checkpoint}}{_CLIP}."),
    "never": Text(_NO_REMEDY, f'{_LOWER}; if the growth continues, resume from {{checkpoint}} with qk_clip="always".'),
    "warned": Text("QK-Clip starts with the next new warning.", f"{_LOWER}."),
    "on": Text(
        "QK-Clip is on: after each step it scales heads whose largest score passed its threshold.",
        "Watch the loss. If it does not recover, resume from {checkpoint} with a lower learning rate.",
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
        "Change the library version; if only one rank reports it, drain its GPU. The weights may be harmed: if the "
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
    """Return the id of a cause's incident within its run."""
    return cause.replace(" ", "-")


def mates(cause: IncidentCause) -> frozenset[IncidentCause]:
    """Return the causes that form one incident with this one while active at the same time, including itself."""
    return frozenset(one for one in CAUSES if one == cause or (CAUSES[one].joins and CAUSES[cause].joins))


def curable(cause: IncidentCause) -> bool:
    """Whether a switch can help."""
    return CAUSES[cause].curable
