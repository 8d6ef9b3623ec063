"""Orders: which heads a machine gives which mode, and how far an order is.

`switches` alone decides it: the agent, what is passed on to other ranks, and the webhooks ask it.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.modes import Mode, parse_mode
from foreshock.contract.wire import HeadRef

SwitchScope = Literal["head", "layer", "model"]
CommandState = Literal[
    "proposed", "pending", "delivered", "applied", "refused", "expired", "dry_run", "rejected", "cancelled"
]  # fmt: skip
"""proposed -> pending (approved) or rejected; pending -> delivered -> applied, refused, expired or dry_run.

What is under way is refused when the last rank ends. An answer that comes late still says what was done.
"""
OPEN: Final = ("pending", "delivered")
"""Under way: it goes out until it is answered."""
Decided = Literal["approve", "reject", "cancel"]
_CANCEL: Final[tuple[CommandState, str]] = ("cancelled", "cancelled")
PEOPLE_MAY: Final[Mapping[CommandState, Mapping[Decided | Literal["undo"], tuple[CommandState, str]]]] = {
    "proposed": {"approve": ("pending", "approved"), "reject": ("rejected", "rejected")},
    "pending": {"cancel": _CANCEL},
    "delivered": {"cancel": _CANCEL},
    "applied": {"undo": ("applied", "undone")},
    "cancelled": {"undo": ("cancelled", "undone")},
}
"""What people may do with an order in each state, the state that it has then, and the word for it. What some ranks did
before an order was cancelled can be undone, by orders of its own."""
Verification = Literal["verified", "not arrested", "unknown"]
OrderSource = Literal["api", "alertmanager", "agent", "rank", "service"]


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
        mode = Mode(now) | added
        if ref[:shared] in asked and ref not in held and mode != now:
            found.setdefault(mode, []).append(ref)
    return found


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
