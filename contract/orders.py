"""Orders: what is ordered beside modes, one entry each; which heads a machine gives which mode; how far an order is.

`switches` and `clip_order` are the one place that decides it: the agent, what is passed on to other ranks, and the
webhooks ask it.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foreshock.contract.modes import MODE_PATTERN, Mode, is_mode, mode_name, parse_mode, with_mode
from foreshock.contract.wire import HeadRef, Policy

SwitchScope = Literal["head", "layer", "model"]
CommandState = Literal[
    "proposed", "pending", "delivered", "applied", "refused", "expired", "dry_run", "rejected", "cancelled"
]  # fmt: skip
"""proposed -> pending (approved) or rejected; pending -> delivered -> applied, refused, expired or dry_run.

What is pending or delivered may be cancelled: it goes to no further rank. It is refused when the last rank ends.
"""
Verification = Literal["verified", "not arrested", "unknown"]
OrderSource = Literal["api", "alertmanager", "agent", "rank", "service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderInfo:
    """An order that changes no head's mode and is for every head of a run. Its name stands where a mode's would."""

    action: str
    """`Command.action`: by it the agent finds what carries the order out (`Switchboard.acts`), and an incident which
    remedy it is (`CauseInfo.remedy`). No machine proposes what is no remedy."""
    title: str
    """What it is about, at the start of a sentence."""
    words: str
    """What it does, after `command to`."""
    does: str
    """In one line, for the page."""
    stays: str
    """Why it cannot be undone, after the command's name."""


ClipWhen = Literal["never", "warned", "always"]
CLIP_ORDERS: Final[dict[str, ClipWhen]] = {f"qk_clip_{when}": when for when in get_args(ClipWhen)}
"""When QK-Clip scales weights, from such an order on (docs/score-growth.md)."""


def _clip(when: ClipWhen, does: str) -> OrderInfo:
    stays = "set QK-Clip, which cannot be undone: weights that it scaled stay so, and training has gone on from them. "
    stays += "qk_clip_never ends it; to go back, resume from a checkpoint before it."
    return OrderInfo(action="qk_clip", title="QK-Clip", words=f"set QK-Clip to {when}", does=does, stays=stays)


ORDERS: Final = {
    "qk_clip_never": _clip("never", "QK-Clip ends. Weights that it scaled stay so."),
    "qk_clip_warned": _clip("warned", "It begins with a warning that scores grow, also one that stands now."),
    "qk_clip_always": _clip(
        "always", "From the next step on, heads whose largest score passes the threshold are scaled down to it."
    ),
}
"""Everything that can be ordered but modes."""
OrderName = Annotated[
    str,
    Field(max_length=64, json_schema_extra={"pattern": f"^({'|'.join(ORDERS)}|{MODE_PATTERN})$"}),
    AfterValidator(lambda name: name if name in ORDERS else mode_name(parse_mode(name))),
]
"""What people may order: a mode for heads, or an entry of `ORDERS`."""

_SHARED: Final[Mapping[str, int]] = {"head": 2, "layer": 1, "model": 0}
"""How much of (layer, head) a head has in common with the one that was warned about."""
_VERBS: Final[dict[OrderSource, str]] = {
    "api": "Ordered",
    "alertmanager": "Asked for",
    "agent": "Proposed",
    "rank": "Switched",
    "service": "Proposed",
}
_WAYS: Final[dict[CommandState, tuple[str, ...]]] = {
    "delivered": ("delivered",),
    "applied": ("delivered", "applied"),
    "refused": ("refused",),
    "expired": ("expired without an answer",),
    "cancelled": ("stopped",),
}


def action_of(name: str) -> str:
    """What an order of this name does (`Command.action`): "switch" where it is a mode."""
    return ORDERS[name].action if name in ORDERS else "switch"


def can_be_ordered(name: str) -> bool:
    """Whether a name is known here; an agent newer than its service may report others."""
    return is_mode(name) or name in ORDERS


def switches(
    called_for: Iterable[HeadRef],
    modes: Mapping[HeadRef, int],
    mitigation: str,
    scope: str = "head",
    held: Collection[HeadRef] = (),
) -> dict[Mode, list[HeadRef]]:
    """The heads that get a mitigation, sorted, by the mode that each has then: its own with the mitigation added.

    called_for: the heads whose warnings call for it; modes: the present mode of every head that may change; held: heads
    that a person took a mitigation from, which no machine switches. A scope that is not known is the head alone.
    """
    shared = _SHARED.get(scope, 2)
    asked = {ref[:shared] for ref in called_for if ref in modes and ref not in held}
    added = parse_mode(mitigation)
    found: dict[Mode, list[HeadRef]] = {}
    for ref, now in sorted(modes.items()):
        mode = with_mode(now, added)
        if ref[:shared] in asked and ref not in held and mode != now:
            found.setdefault(mode, []).append(ref)
    return found


def clip_order(state: str | None, policy: Policy | None) -> str | None:
    """The order that machines propose where scores grow: QK-Clip where it is off (`Started.qk_clip`) and can scale.

    None under `observe`. No policy gives it by itself: it changes weights, to which a setting or a person must agree.
    """
    return "qk_clip_always" if state == "never" and policy in ("approve", "auto") else None


class Ordered(BaseModel):
    """An order or a proposal for heads of an incident, and how far it has come."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)
    id: str
    state: CommandState
    mode: str
    source: OrderSource
    who: str = Field(description="who approved or rejected it; else who ordered or proposed it")
    decided: bool = Field(description="whether a person approved or rejected it")
    unix_seconds: float = Field(description="when it was approved or rejected; else when it was ordered or proposed")
    verification: Verification | None

    @property
    def way(self) -> str:
        """Who did what when, and what became of it, as `Approved by Ada at 11:24 UTC, delivered, applied`."""
        verb = ("Rejected" if self.state == "rejected" else "Approved") if self.decided else _VERBS[self.source]
        at = time.strftime("%H:%M", time.gmtime(self.unix_seconds))
        verdict = () if self.verification in (None, "unknown") else (str(self.verification),)
        first = f"{verb} by {self.who} at {at} UTC"
        steps = ("applied",) if self.source == "rank" and self.state == "applied" else _WAYS.get(self.state, ())
        return ", ".join((first, *steps, *verdict))
