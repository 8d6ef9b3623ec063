"""Rows are read back with care: one that cannot be read is passed over, counted and named, and hurts no other run.

What is acknowledged can be read (contract/wire.py checks it). What an earlier version stored, or a disk has torn, may
not be.
"""

import hashlib
from functools import lru_cache
from typing import Final, TypeVar

import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from foreshock.contract.wire import HeadRef, Layer

log = structlog.get_logger()
M = TypeVar("M", bound=BaseModel)
_LAYERS: TypeAdapter[tuple[Layer, ...]] = TypeAdapter(tuple[Layer, ...])
_REMEMBERED: Final = 10_000

unreadable: Final[dict[tuple[str, object], None]] = {}
"""(what, whose) of each row that could not be read since the process began, at most _REMEMBERED."""


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


@lru_cache(maxsize=256)
def layers_of(stored: str) -> tuple[Layer, ...]:
    """The layers of a stored topology; none where it cannot be read."""
    try:
        return _LAYERS.validate_json(stored)
    except ValidationError as error:
        why = error.errors(include_url=False, include_input=False)[0]["msg"]
        passed_over("topology", hashlib.sha256(stored.encode()).hexdigest(), why)
        return ()


@lru_cache(maxsize=256)
def heads_of_layers(stored: str) -> tuple[HeadRef, ...]:
    """The (layer, head) of every row of a boot's arrays, in order."""
    return tuple((layer.layer, head) for layer in layers_of(stored) for head in layer.heads)
