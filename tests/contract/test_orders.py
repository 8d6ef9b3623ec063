"""Which heads a switch changes to which mode, and the text that describes the progress of an order."""

from typing import Any

import pytest

from foreshock.contract.modes import Mode
from foreshock.contract.orders import Order, can_order, switches

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def ordered(**changes: Any) -> Order:
    fields: dict[str, Any] = {"mode": "row_corrected", "source": "agent", "issued_by": "rank 0", "reason": ""}
    return Order(**{**fields, "decided_by": "Ada", "decided_unix_seconds": 41_040.0, **changes})


def test_switch_keeps_modes_that_a_user_set_in_addition_to_the_mitigation() -> None:
    modes = {**dict.fromkeys(HEADS, 0), (0, 1): int(Mode.PAPER_SOFTMAX), (1, 1): int(Mode.ROW_CORRECTED)}
    assert switches([(0, 0)], modes, "row_corrected", "model") == {
        Mode.ROW_CORRECTED: [(0, 0), (1, 0)],
        Mode.ROW_CORRECTED | Mode.PAPER_SOFTMAX: [(0, 1)],
    }


@pytest.mark.parametrize(
    ("scope", "taken_back", "switched"),
    [("model", (1, 0), 3), ("layer", (0, 1), 1), ("model", (0, 0), 0), ("a newer one", (1, 0), 1)],
)
def test_head_that_a_user_switched_back_is_excluded_and_triggers_no_switch(
    scope: str, taken_back: tuple[int, int], switched: int
) -> None:
    found = switches([(0, 0)], dict.fromkeys(HEADS, 0), "row_corrected", scope, {taken_back})
    assert taken_back not in (heads := [ref for own in found.values() for ref in own])
    assert len(heads) == switched


@pytest.mark.parametrize(
    ("action", "mode", "possible"),
    [("switch", "row_corrected", True), ("switch", "newer", False), ("newer", "row_corrected", False)],
)
def test_orders_of_unknown_kind_or_mode_are_not_possible(action: str, mode: str, possible: bool) -> None:
    assert can_order(action, mode) == possible


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
def test_order_text_names_the_person_the_time_and_the_progress(changes: dict[str, Any], words: str) -> None:
    assert ordered(**changes).way == words
