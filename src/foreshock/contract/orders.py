"""Orders to a running training: their kinds, their states, and the modes that a switch gives to heads.

An order has the same id from its request to the last rank's answer. Every automatic switch, by the agent, passed on to
other ranks, or from a webhook, is determined by `switches`.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from foreshock.contract.modes import Mode, is_mode, parse_mode
from foreshock.contract.wire import HeadRef

KINDS: Final[dict[str, str]] = {"switch": "switch {heads} to {mode}"}
"""The kinds of orders in words, by `action`. monitor.switching.Switchboard.actions implements them in the agent."""
SwitchScope = Literal["head", "layer", "model"]
OrderState = Literal[
    "proposed", "pending", "delivered", "applied", "refused", "expired", "dry_run", "rejected", "cancelled"
]  # fmt: skip
OPEN: Final = ("pending", "delivered")
"""States of an order that is sent to ranks until it is answered."""
Decided = Literal["approve", "reject", "cancel"]
Transition = Decided | Literal["undo"]
PEOPLE_MAY: Final[tuple[Transition, ...]] = ("approve", "reject", "cancel", "undo")
"""The actions of people; all other keys of `TRANSITIONS` are actions of the service and answers of ranks."""
_ANSWERED: Final[dict[str, OrderState]] = {
    "applied": "applied", "refused": "refused", "expired": "expired", "dry_run": "dry_run",
}  # fmt: skip
TRANSITIONS: Final[Mapping[OrderState, Mapping[str, OrderState]]] = {
    # a rank's own switch waits for the other ranks with these heads, and becomes applied if they end
    "proposed": {"approve": "pending", "reject": "rejected", **_ANSWERED},
    "pending": {"cancel": "cancelled", "deliver": "delivered", **_ANSWERED},
    "delivered": {"cancel": "cancelled", **_ANSWERED},
    # a late answer still changes the state
    "applied": {"undo": "applied", **_ANSWERED},
    "refused": _ANSWERED,
    "expired": _ANSWERED,
    "dry_run": _ANSWERED,
    # a switch that some ranks did before the cancellation can be undone
    "cancelled": {"undo": "cancelled"},
    "rejected": _ANSWERED,
}
"""The next state of an order, by its present state and the action."""
Verification = Literal["verified", "not arrested", "unknown"]
OrderSource = Literal["api", "alertmanager", "agent", "rank", "service"]


_SHARED: Final[Mapping[str, int]] = {"head": 2, "layer": 1, "model": 0}
"""The number of leading parts of (layer, head) that a head must share with the warned head, by scope."""
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
    """Whether this version knows the kind of an order, and the mode if it is a switch."""
    return is_mode(mode) if action == "switch" else action in KINDS


def _stored_as(column: str) -> AliasChoices:
    """Return the names of a time field: its own, and that of its column in the store."""
    return AliasChoices(f"{column}_unix_seconds", column)


class Order(BaseModel):
    """An order or a proposal, from its request to its last answer. Agents receive it as a `wire.Command`."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)
    id: str = Field(default="", description="assigned when it is stored")
    action: str = Field(default="switch", description="the kind of order")
    heads: list[HeadRef] | None = Field(default=None, description="null: every head, or an order that is not for heads")
    mode: str = Field(default="", description="the mode that a switch gives; for another kind of order its action")
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
    undoes: str | None = Field(default=None, description="the order whose switch this one undoes")
    verification: Verification | None = Field(
        default=None, description="whether the heads' growth stopped; null until enough steps have passed"
    )
    decided_by: str | None = Field(default=None, description="who approved or rejected it")
    decided_unix_seconds: float | None = Field(default=None, validation_alias=_stored_as("decided"))

    def names(self, refs: Collection[object]) -> bool:
        """Whether it applies to one of these heads."""
        return self.heads is None or not set(self.heads).isdisjoint(refs)

    @property
    def way(self) -> str:
        """The history of the order in words, such as `Approved by Ada at 11:24 UTC, delivered, applied`."""
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
    """Return the heads to switch, sorted, by their new mode: the present mode with the mitigation added.

    called_for: heads whose warnings call for the switch; modes: the present mode of every head that may change; held:
    heads from which a person removed a mitigation, which are not switched. An unknown scope means only these heads.
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
