"""Error responses: RFC 9457 problem+json with a fixed shape, without internal details."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from foreshock.server.models import Problem, ProblemItem
from foreshock.server.store.database import BusyError, ClosingError, is_away

log = structlog.get_logger()
_MAX_ERRORS: Final = 10
TOO_LARGE: Final = (
    "The body is too large for this address. The limits are 64 KiB at the login, 33 MiB for a batch, elsewhere 1 MiB."
)


class ProblemError(HTTPException):
    """An error that can be raised anywhere in a request and becomes its response."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[ProblemItem] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.errors = errors


def problem(
    status: int, detail: str, errors: Sequence[ProblemItem] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response for an error."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=_encodable(detail), errors=list(errors))
    return Response(body.model_dump_json(), status, headers, "application/problem+json")


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a field name in a request may contain and a response cannot encode."""
    return text.encode("utf-8", "replace").decode()


def items(errors: Sequence[Any]) -> list[ProblemItem]:
    """Convert up to ten of pydantic's errors, without the input that caused them."""
    return [
        ProblemItem(
            where=_encodable(".".join(str(part) for part in error["loc"])[:200]) or "body",
            message=_encodable(_words(error)[:300]),
        )
        for error in list(errors)[:_MAX_ERRORS]
    ]


def _words(error: Any) -> str:
    """Return pydantic's message, but a clearer one instead of "Value should have at most 64 items after validation",
    which pydantic says of a text with a validator."""
    about = error.get("ctx") or {}
    if about.get("field_type") == "Value" and "actual_length" in about:
        bound = f"at most {about['max_length']}" if "max_length" in about else f"no fewer than {about['min_length']}"
        return f"Has {about['actual_length']} characters; {bound} are allowed"
    message = str(error["msg"])
    if error.get("type") != "value_error":
        return message
    message = message.removeprefix("Value error, ")
    return message[:1].upper() + message[1:]


_SENTENCES: Final = {
    404: "This address does not exist; /openapi.json lists all addresses.",
    405: "This address does not support that method.",
}


def answer_to(error: Exception, path: str) -> Response:
    """Return the response to a request that ended with this error, expected or not."""
    again = {"retry-after": "2"}
    if isinstance(error, ProblemError):
        return problem(error.status_code, error.detail, error.errors, error.headers)
    if isinstance(error, HTTPException):
        return problem(error.status_code, _SENTENCES.get(error.status_code, str(error.detail)), headers=error.headers)
    if isinstance(error, RequestValidationError):
        found = error.errors()
        count = "1 field of the request is" if len(found) == 1 else f"{len(found)} fields of the request are"
        return problem(422, f"{count} wrong.", items(found))
    if isinstance(error, BusyError):
        why = "Too many of your reads wait already. Retry after the time in Retry-After."
        return problem(429, why, headers=again)
    if isinstance(error, ClosingError):
        return problem(503, "The service is shutting down; try again.", headers=again)
    if is_away(error):
        log.warning("the store is unavailable", error=str(error).partition("\n")[0][:300])
        return problem(503, "The store is unavailable; try again.", headers=again)
    log.error("request failed", path=path[:200], error=type(error).__name__, exc_info=error)
    return problem(500, "The service failed on this request; see its log for the reason.")


def install(app: FastAPI) -> None:
    """Register handlers so that every error of a request becomes a problem response."""

    async def on_error(request: Request, error: Exception) -> Response:
        return answer_to(error, request.url.path)

    for kind in (HTTPException, RequestValidationError, BusyError, ClosingError, SQLAlchemyError, Exception):
        app.add_exception_handler(kind, on_error)
