"""Every failed request gets a problem response of one format, without internal details."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from starlette.exceptions import HTTPException

from foreshock.server.models import Problem
from foreshock.server.problems import ProblemError, install
from foreshock.server.store.database import BusyError, ClosingError

INTERNAL = "SELECT secret FROM /srv/foreshock/data.db"
FAILURES: dict[str, tuple[Exception, int]] = {
    "service error": (ProblemError(409, "It is decided.", headers={"x-why": "late"}), 409),
    "closing": (ClosingError(INTERNAL), 503),
    "busy": (BusyError(INTERNAL), 429),
    "store unavailable": (OperationalError(INTERNAL, {}, OSError(INTERNAL)), 503),
    "connection lost": (DBAPIError(INTERNAL, {}, OSError(INTERNAL), connection_invalidated=True), 503),
    "not found": (HTTPException(404), 404),
    "method not allowed": (HTTPException(405, headers={"allow": "GET"}), 405),
    "unexpected error": (RuntimeError(INTERNAL), 500),
    "constraint violated": (IntegrityError(INTERNAL, {}, ValueError(INTERNAL)), 500),
}


class Wanted(BaseModel):
    """The body of the failing route."""

    count: int


def ask(error: Exception, body: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    install(app)

    @app.post("/fails")
    async def fails(_: Wanted) -> None:
        raise error

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/fails", json=body)

    return asyncio.run(post())


def read(response: Any) -> Problem:
    assert response.headers["content-type"] == "application/problem+json"
    problem = json.loads(response.text if isinstance(response, httpx.Response) else response.body)
    assert set(problem) == set(Problem.model_fields)
    return Problem.model_validate(problem)


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_is_a_problem_response_without_internal_details(failure: str) -> None:
    error, status = FAILURES[failure]
    response = ask(error, {"count": 3})
    problem = read(response)
    assert (response.status_code, problem.status, problem.errors) == (status, status, [])
    assert problem.detail == "It is decided." or (failure != "service error" and problem.detail.endswith("."))
    assert "SELECT" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    for name, value in (getattr(error, "headers", None) or {}).items():
        assert response.headers[name] == value


def test_invalid_body_is_reported_by_field_without_its_value() -> None:
    response = ask(RuntimeError(), {"count": "s3cret"})
    problem = read(response)
    assert (problem.status, problem.detail) == (422, "1 field of the request is wrong.")
    [item] = problem.errors
    assert item.where == "body.count"
    assert "integer" in item.message
    assert "s3cret" not in response.text
