"""Orders to a running training: their kinds, their states, and which heads a switch gives which mode.

An order has one id from the wish for it to the last rank's answer. `switches` alone decides what a machine switches:
the agent, what is passed on to other ranks, and the webhooks ask it.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from foreshock.contract.modes import Mode, is_mode, parse_mode
from foreshock.contract.wire import HeadRef

KINDS: Final[dict[str, str]] = {"switch": "switch {heads} to {mode}"}
"""What an order of each kind does, by its `action`. The agent's side: monitor.switching.Switchboard.actions."""
SwitchScope = Literal["head", "layer", "model"]
OrderState = Literal[
    "proposed", "pending", "delivered", "applied", "refused", "expired", "dry_run", "rejected", "cancelled"
]  # fmt: skip
OPEN: Final = ("pending", "delivered")
"""Under way: it goes out until it is answered."""
Decided = Literal["approve", "reject", "cancel"]
Deed = Decided | Literal["undo"]
PEOPLE_MAY: Final[tuple[Deed, ...]] = ("approve", "reject", "cancel", "undo")
"""What people do with an order; the rest of `TRANSITIONS` is of the service and of the answers of ranks."""
_ANSWERED: Final[dict[str, OrderState]] = {
    "applied": "applied", "refused": "refused", "expired": "expired", "dry_run": "dry_run",
}  # fmt: skip
TRANSITIONS: Final[Mapping[OrderState, Mapping[str, OrderState]]] = {
    # a rank's own switch waits for the other ranks that it concerns, and is applied if they end
    "proposed": {"approve": "pending", "reject": "rejected", **_ANSWERED},
    "pending": {"cancel": "cancelled", "deliver": "delivered", **_ANSWERED},
    "delivered": {"cancel": "cancelled", **_ANSWERED},
    # an answer that comes late still says what was done
    "applied": {"undo": "applied", **_ANSWERED},
    "refused": _ANSWERED,
    "expired": _ANSWERED,
    "dry_run": _ANSWERED,
    # what some ranks did before can be undone, by orders of its own
    "cancelled": {"undo": "cancelled"},
    "rejected": _ANSWERED,
}
"""The state that each deed brings an order into, by the state that it has."""
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
_WAYS: Final[dict[OrderState, tuple[str, ...]]] = {
    "delivered": ("delivered",),
    "applied": ("delivered", "applied"),
    "refused": ("refused",),
    "expired": ("expired without an answer",),
    "cancelled": ("stopped",),
}


def can_order(action: str, mode: str) -> bool:
    """Whether this version knows an order of this kind, and the mode of a switch."""
    return is_mode(mode) if action == "switch" else action in KINDS


def _stored_as(column: str) -> AliasChoices:
    """The names of a time: its own, and the one that it has in the store."""
    return AliasChoices(f"{column}_unix_seconds", column)


class Order(BaseModel):
    """An order or a proposal, from the wish for it to its last answer. `wire.Command` is what agents get of it."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)
    id: str = Field(default="", description="given when it is stored")
    action: str = Field(default="switch", description="the kind of order")
    heads: list[HeadRef] | None = Field(default=None, description="null: every head, or an order that names no head")
    mode: str = Field(default="", description="the mode that a switch gives; of another kind of order its action")
    state: OrderState = "pending"
    source: OrderSource = Field(
        description="agent: proposed by the agent under policy approve; rank: a local switch, passed on to other "
        "ranks; service: proposed because a switch did not arrest its head"
    )
    issued_by: str
    reason: str
    expect: str | None = None
    dry_run: bool = False
    created_unix_seconds: float = Field(default=0.0, validation_alias=_stored_as("created"))
    expires_unix_seconds: float | None = Field(default=None, validation_alias=_stored_as("expires"))
    expires_step: int | None = None
    undoes: str | None = Field(default=None, description="the order whose switch this one takes back")
    verification: Verification | None = Field(
        default=None, description="whether the heads' growth stopped; null until enough steps have passed"
    )
    decided_by: str | None = Field(default=None, description="who approved or rejected it")
    decided_unix_seconds: float | None = Field(default=None, validation_alias=_stored_as("decided"))

    def names(self, refs: Collection[object]) -> bool:
        """Whether it is for some of these heads."""
        return self.heads is None or not set(self.heads).isdisjoint(refs)

    @property
    def way(self) -> str:
        """Who did what when, and what became of it, as `Approved by Ada at 11:24 UTC, delivered, applied`."""
        decided = "Rejected" if self.state == "rejected" else "Approved"
        verb, who = (_VERBS[self.source], self.issued_by) if self.decided_by is None else (decided, self.decided_by)
        at = time.strftime("%H:%M", time.gmtime(self.decided_unix_seconds or self.created_unix_seconds))
        verdict = () if self.verification in (None, "unknown") else (str(self.verification),)
        steps = ("applied",) if self.source == "rank" and self.state == "applied" else _WAYS.get(self.state, ())
        return ", ".join((f"{verb} by {who} at {at} UTC", *steps, *verdict))


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
