"""Which heads a machine gives which mode, and how far an order has come in words."""

from typing import Any

import pytest

from foreshock.contract.modes import Mode
from foreshock.contract.orders import Order, can_order, switches

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def ordered(**changes: Any) -> Order:
    fields: dict[str, Any] = {"mode": "row_corrected", "source": "agent", "issued_by": "rank 0", "reason": ""}
    return Order(**{**fields, "decided_by": "Ada", "decided_unix_seconds": 41_040.0, **changes})


def test_a_head_keeps_the_modes_that_a_person_gave_it_beside_the_mitigation() -> None:
    modes = {**dict.fromkeys(HEADS, 0), (0, 1): int(Mode.PAPER_SOFTMAX), (1, 1): int(Mode.ROW_CORRECTED)}
    assert switches([(0, 0)], modes, "row_corrected", "model") == {
        Mode.ROW_CORRECTED: [(0, 0), (1, 0)],
        Mode.ROW_CORRECTED | Mode.PAPER_SOFTMAX: [(0, 1)],
    }


@pytest.mark.parametrize(
    ("scope", "held", "taken"),
    [("model", (1, 0), 3), ("layer", (0, 1), 1), ("model", (0, 0), 0), ("a newer one", (1, 0), 1)],
)
def test_a_head_that_a_person_took_back_is_not_switched_and_calls_for_no_switch_of_others(
    scope: str, held: tuple[int, int], taken: int
) -> None:
    found = switches([(0, 0)], dict.fromkeys(HEADS, 0), "row_corrected", scope, {held})
    assert held not in (heads := [ref for own in found.values() for ref in own])
    assert len(heads) == taken


@pytest.mark.parametrize(
    ("action", "mode", "known"),
    [("switch", "row_corrected", True), ("switch", "newer", False), ("newer", "row_corrected", False)],
)
def test_no_order_is_given_whose_kind_or_mode_this_version_does_not_know(action: str, mode: str, known: bool) -> None:
    assert can_order(action, mode) == known


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
        (
            {"state": "cancelled", "decided_by": None, "source": "api", "issued_by": "Ada"},
            "Ordered by Ada at 11:24 UTC, stopped",
        ),
        (
            {"state": "applied", "decided_by": None, "source": "rank"},
            "Switched by rank 0 at 11:24 UTC, applied",
        ),
    ],
)
def test_an_order_says_who_did_what_when_and_what_became_of_it(changes: dict[str, Any], words: str) -> None:
    assert ordered(**changes).way == words
