"""Every error is RFC 9457 problem+json with a fixed shape; nothing of the inside leaks into it."""

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
    "The body is larger than this address takes: 64 KiB at the login, 33 MiB for a batch, elsewhere 1 MiB."
)


class ProblemError(HTTPException):
    """Raised anywhere in a request; becomes the answer."""

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
    """The answer for an error."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=_encodable(detail), errors=list(errors))
    return Response(body.model_dump_json(), status, headers, "application/problem+json")


def _encodable(text: str) -> str:
    """Text without the lone surrogates that a request may have named a field by: no answer could hold them."""
    return text.encode("utf-8", "replace").decode()


def items(errors: Sequence[Any]) -> list[ProblemItem]:
    """Up to ten of pydantic's errors, without the input that caused them."""
    return [
        ProblemItem(
            where=_encodable(".".join(str(part) for part in error["loc"])[:200]) or "body",
            message=_encodable(_words(error)[:300]),
        )
        for error in list(errors)[:_MAX_ERRORS]
    ]


def _words(error: Any) -> str:
    """Pydantic's sentence, but of a text behind a validator: "Value should have at most 64 items after validation"."""
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
    404: "There is nothing at this address; /openapi.json lists what there is.",
    405: "This address does not take that method.",
}


def answer_to(error: Exception, path: str) -> Response:
    """The answer to a request at this path that ended with this error, be it of ours, of the store or of nobody."""
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
        return problem(503, "The service is going down; try again.", headers=again)
    if is_away(error):
        log.warning("the store is away", error=str(error).partition("\n")[0][:300])
        return problem(503, "The store cannot be used just now; try again.", headers=again)
    log.error("request failed", path=path[:200], error=type(error).__name__, exc_info=error)
    return problem(500, "The service failed on this request; its log says why.")


def install(app: FastAPI) -> None:
    """Every way a request can fail, as a problem."""

    async def on_error(request: Request, error: Exception) -> Response:
        return answer_to(error, request.url.path)

    for kind in (HTTPException, RequestValidationError, BusyError, ClosingError, SQLAlchemyError, Exception):
        app.add_exception_handler(kind, on_error)
