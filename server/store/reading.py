"""Rows are read back with care: one that cannot be read is passed over, counted and named, and hurts no other run.

What is acknowledged can be read (contract/wire.py checks it). What an earlier version stored, or a disk has torn, may
not be.
"""

from typing import Final, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

log = structlog.get_logger()
M = TypeVar("M", bound=BaseModel)
_REMEMBERED: Final = 10_000

unreadable: Final[dict[tuple[str, object], None]] = {}
"""(what, whose) of each row that could not be read since the process began, at most so many."""


def passed_over(what: str, whose: object, why: object) -> None:
    """Count a row and name it in the log, at its first time."""
    if (what, whose) not in unreadable and len(unreadable) < _REMEMBERED:
        unreadable[what, whose] = None
        log.error("a stored row cannot be read and is passed over", what=what, row=str(whose), why=str(why)[:300])


def read_back(kind: type[M], stored: str, what: str, whose: object) -> M | None:
    """A message as it was stored; None where it cannot be read. `what` and `whose` name the row."""
    try:
        return kind.model_validate_json(stored)
    except ValidationError as error:
        passed_over(what, whose, error.errors(include_url=False, include_input=False)[0]["msg"])
        return None
