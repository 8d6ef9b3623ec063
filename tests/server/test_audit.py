"""Whatever is changed, left out or moved within an audit trail shows, at the first row that does not follow."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.server.models import AuditRow
from foreshock.server.store.audit import GENESIS, BrokenChainError, Chain, intact, read_line, row_hash

texts = st.text(max_size=12)
deeds = st.lists(
    st.tuples(
        texts, texts, st.none() | texts, st.dictionaries(texts, st.integers() | texts | st.booleans(), max_size=3)
    ),
    min_size=3,
    max_size=8,
)


def trail(done: Sequence[tuple[str, str, str | None, dict[str, Any]]]) -> list[AuditRow]:
    """The rows that would be written of these deeds, oldest first."""
    rows: list[AuditRow] = []
    for number, (actor, action, run, details) in enumerate(done, start=1):
        row = AuditRow(
            sequence=number,
            unix_seconds=1000.0 + number / 8,
            actor=actor,
            action=action,
            run=run,
            command=None,
            details=details,
            previous_hash=rows[-1].hash if rows else GENESIS,
            hash="",
        )
        row.hash = row_hash(row)
        rows.append(row)
    return rows


def followed(rows: Sequence[AuditRow]) -> int:
    """How many rows follow one another from the beginning on."""
    chain = Chain()
    for row in rows:
        try:
            chain.follow(row)
        except BrokenChainError:
            break
    return chain.sequence


@given(done=deeds, seen=st.integers(0, 8))
def test_a_trail_that_nobody_touched_follows_from_any_row_and_through_an_export(done: Any, seen: int) -> None:
    rows = trail(done)
    assert intact(rows[::-1])
    assert followed([read_line(row.model_dump_json().encode()) for row in rows]) == len(rows)
    later = Chain(rows[seen - 1] if 0 < seen <= len(rows) else None)
    for row in rows[later.sequence :]:
        later.follow(row)
    assert later.hash == rows[-1].hash


CHANGES: dict[str, Any] = {
    "unix_seconds": lambda row: row.unix_seconds + 0.125,
    "actor": lambda row: row.actor + "x",
    "action": lambda row: row.action + "x",
    "run": lambda row: "another" if row.run is None else None,
    "command": lambda row: "cmd-1",
    "details": lambda row: {**row.details, "who was it": 1},
}


@given(done=deeds, place=st.integers(0, 7), field=st.sampled_from(sorted(CHANGES)))
def test_a_row_that_was_changed_is_the_first_that_does_not_follow(done: Any, place: int, field: str) -> None:
    rows = trail(done)
    place %= len(rows)
    rows[place] = rows[place].model_copy(update={field: CHANGES[field](rows[place])})
    assert followed(rows) == place
    assert not intact(rows[::-1])


@given(done=deeds, place=st.integers(0, 7), field=st.sampled_from(sorted(CHANGES)))
def test_a_forger_who_hashes_the_row_anew_is_found_at_the_next_one(done: Any, place: int, field: str) -> None:
    rows = trail(done)
    place %= len(rows) - 1  # of the last row only the copy that somebody else keeps can tell
    forged = rows[place].model_copy(update={field: CHANGES[field](rows[place])})
    rows[place] = forged.model_copy(update={"hash": row_hash(forged)})
    assert followed(rows) == place + 1
    assert not intact(rows[::-1])


@given(done=deeds, place=st.integers(0, 7))
def test_a_row_that_was_left_out_or_moved_is_missed_where_it_stood(done: Any, place: int) -> None:
    rows = trail(done)
    place %= len(rows) - 1
    without = rows[:place] + rows[place + 1 :]
    assert followed(without) == place
    swapped = [*rows[:place], rows[place + 1], rows[place], *rows[place + 2 :]]
    assert followed(swapped) == place
    assert not intact(swapped[::-1])


def test_a_line_that_is_no_row_is_refused_with_what_it_holds() -> None:
    with pytest.raises(BrokenChainError, match=r"this is no row of an audit trail: b'\{\"sequence\": 1\}'"):
        read_line(b'{"sequence": 1}')
