"""Every way a request can fail is a problem of one shape, that says what to do and shows nothing of the inside."""

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

INSIDE = "SELECT secret FROM /srv/foreshock/data.db"
WAYS: dict[str, tuple[Exception, int]] = {
    "ours": (ProblemError(409, "It is decided.", headers={"x-why": "late"}), 409),
    "going down": (ClosingError(INSIDE), 503),
    "busy": (BusyError(INSIDE), 429),
    "store away": (OperationalError(INSIDE, {}, OSError(INSIDE)), 503),
    "server gone": (DBAPIError(INSIDE, {}, OSError(INSIDE), connection_invalidated=True), 503),
    "not there": (HTTPException(404), 404),
    "no method": (HTTPException(405, headers={"allow": "GET"}), 405),
    "nobody's": (RuntimeError(INSIDE), 500),
    "work that is wrong": (IntegrityError(INSIDE, {}, ValueError(INSIDE)), 500),
}


class Wanted(BaseModel):
    """What the failing address takes."""

    count: int


def ask(error: Exception, body: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    install(app)

    @app.post("/fails")
    async def fails(_: Wanted) -> None:
        raise error

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/fails", json=body)

    return asyncio.run(asked())


def read(answer: Any) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json"
    told = json.loads(answer.text if isinstance(answer, httpx.Response) else answer.body)
    assert set(told) == set(Problem.model_fields)
    return Problem.model_validate(told)


@pytest.mark.parametrize("way", WAYS)
def test_each_failure_is_a_problem_response_without_internal_details(way: str) -> None:
    error, status = WAYS[way]
    answer = ask(error, {"count": 3})
    told = read(answer)
    assert (answer.status_code, told.status, told.errors) == (status, status, [])
    assert told.detail == "It is decided." or (way != "ours" and told.detail.endswith("."))
    assert "SELECT" not in answer.text
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    for name, value in (getattr(error, "headers", None) or {}).items():
        assert answer.headers[name] == value


def test_invalid_body_is_reported_by_field_without_its_value() -> None:
    answer = ask(RuntimeError(), {"count": "s3cret"})
    told = read(answer)
    assert (told.status, told.detail) == (422, "1 field of the request is wrong.")
    [item] = told.errors
    assert item.where == "body.count"
    assert "integer" in item.message
    assert "s3cret" not in answer.text
