"""When the store is in trouble, which passes: its disk is full or read-only, its server is gone or starting."""

from typing import Any, Final

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

log = structlog.get_logger()
_PASSING: Final = (OperationalError, InterfaceError, InternalError, PoolTimeoutError)


def is_away(error: BaseException) -> bool:
    """Whether the same work may succeed later, as it is."""
    return isinstance(error, _PASSING) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def log_store_error(sentence: str, error: BaseException, **fields: Any) -> None:
    """Log that work failed; where the store is away in one line, else with everything that helps to find the fault."""
    away = is_away(error)
    log.error(sentence, error=str(error).partition("\n")[0][:500], exc_info=None if away else error, **fields)
