"""Which heads a machine gives which mode, and how far an order has come in words."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from foreshock.contract.causes import CAUSES
from foreshock.contract.modes import Mode, is_mode
from foreshock.contract.orders import CLIP_ORDERS, ORDERS, Ordered, OrderName, action_of, can_be_ordered, switches

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_orders_that_runs_have_stored_keep_their_names_and_none_is_a_mode() -> None:
    assert list(CLIP_ORDERS.items()) == [
        ("qk_clip_never", "never"),
        ("qk_clip_warned", "warned"),
        ("qk_clip_always", "always"),
    ]
    assert {action_of(name) for name in CLIP_ORDERS} == {"qk_clip"}
    assert not any(map(is_mode, ORDERS))


def test_what_is_no_entry_switches_heads_and_an_entry_never_does() -> None:
    assert all(action_of(name) != "switch" for name in ORDERS)
    assert action_of("row_corrected") == action_of("a_mode_of_a_newer_agent") == "switch"


def test_people_may_order_a_mode_or_an_entry_and_nothing_else() -> None:
    orders = TypeAdapter(OrderName)
    for name in ("plain", "exact_delta+row_corrected", *ORDERS):
        assert can_be_ordered(name)
        assert orders.validate_python(name) == name
    for name in ("", "qk_clip", "qk_clip_always+plain", "a_mode_of_a_newer_agent"):
        assert not can_be_ordered(name)
        with pytest.raises(ValidationError):
            orders.validate_python(name)


def test_what_a_machine_proposes_is_a_switch_or_an_entry() -> None:
    assert {cause.remedy for cause in CAUSES.values()} <= {None, "switch", *map(action_of, ORDERS)}


def ordered(**changes: Any) -> Ordered:
    fields: dict[str, Any] = {"id": "c", "state": "pending", "mode": "row_corrected", "source": "agent", "who": "Ada"}
    return Ordered(**{**fields, "decided": True, "unix_seconds": 41_040.0, "verification": None, **changes})


def test_a_head_keeps_the_modes_that_a_person_gave_it_beside_the_mitigation() -> None:
    modes = {**dict.fromkeys(HEADS, 0), (0, 1): int(Mode.CENTRED_KEYS), (1, 1): int(Mode.ROW_CORRECTED)}
    assert switches([(0, 0)], modes, "row_corrected", "model") == {
        Mode.ROW_CORRECTED: [(0, 0), (1, 0)],
        Mode.ROW_CORRECTED | Mode.CENTRED_KEYS: [(0, 1)],
    }


@pytest.mark.parametrize(("scope", "held", "taken"), [("model", (1, 0), 3), ("layer", (0, 1), 1), ("model", (0, 0), 0)])
def test_a_head_that_a_person_took_back_is_not_switched_and_calls_for_no_switch_of_others(
    scope: str, held: tuple[int, int], taken: int
) -> None:
    found = switches([(0, 0)], dict.fromkeys(HEADS, 0), "row_corrected", scope, {held})
    assert held not in (heads := [ref for own in found.values() for ref in own])
    assert len(heads) == taken


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Approved by Ada at 11:24 UTC"),
        ({"state": "applied"}, "Approved by Ada at 11:24 UTC, delivered, applied"),
        (
            {"state": "applied", "verification": "verified"},
            "Approved by Ada at 11:24 UTC, delivered, applied, verified",
        ),
        ({"state": "rejected"}, "Rejected by Ada at 11:24 UTC"),
        ({"state": "cancelled", "decided": False, "source": "api"}, "Ordered by Ada at 11:24 UTC, stopped"),
        (
            {"state": "applied", "decided": False, "source": "rank", "who": "rank 0"},
            "Switched by rank 0 at 11:24 UTC, applied",
        ),
    ],
)
def test_an_order_says_who_did_what_when_and_what_became_of_it(changes: dict[str, Any], words: str) -> None:
    assert ordered(**changes).way == words
