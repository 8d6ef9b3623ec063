"""What people do with a run as a whole: they describe it, and delete it."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection
from starlette.responses import Response

from foreshock.server.access.auth import Actor, Deleter
from foreshock.server.models import Problem, RunDetail
from foreshock.server.requests import Decision, Description
from foreshock.server.runs import run_metadata
from foreshock.server.runs.listing import run_detail

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})


@router.patch("/v1/runs/{run:path}", response_model=RunDetail)
async def patch_run(request: Request, caller: Actor, run: str, description: Description) -> RunDetail:
    """Give a run a display name, tags and notes. Its name stays what agents, alerts and addresses know it by."""
    state = request.app.state

    def describe(connection: Connection) -> RunDetail:
        run_metadata.describe(connection, run, f"{description.who} ({caller.name})", description)
        return run_detail(connection, run_metadata.find_run(connection, run), state.settings.verify_steps)

    found: RunDetail = await state.store.write(describe)
    state.broadcaster.wake()
    return found


@router.delete("/v1/runs/{run:path}", status_code=204)
async def delete_run(request: Request, caller: Deleter, run: str, decision: Annotated[Decision, Query()]) -> Response:
    """Delete a run that no longer trains, with everything that was stored of it. It cannot be taken back."""
    state = request.app.state
    await run_metadata.delete(state.store, run, f"{decision.who} ({caller.name})", decision)
    state.broadcaster.deleted(run)
    return Response(status_code=204)
