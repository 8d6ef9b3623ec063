"""When the store is in trouble, which passes: its disk is full or read-only, its server is gone or starting."""

import socket
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]
import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

log = structlog.get_logger()
STORE_ERRORS: Final = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError, socket.gaierror)
"""What work on the store raises where the store is in trouble, or the work itself is wrong; `is_away` tells which."""


def is_away(error: BaseException) -> bool:
    """Whether the same work may succeed later, as it is."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeoutError):
        return True
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error.orig and error.orig.__cause__, asyncpg.PostgresError)
    return isinstance(error, STORE_ERRORS) and not isinstance(error, SQLAlchemyError)


def log_store_error(sentence: str, error: BaseException, **told: Any) -> None:
    """Log that work failed; where the store is away in one line, else with everything that helps to find the fault."""
    away = is_away(error)
    log.error(sentence, error=str(error).partition("\n")[0][:500], exc_info=None if away else error, **told)
