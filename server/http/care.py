"""What people do with a run as a whole: they describe it, and delete it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from foreshock.server.access.auth import Actor, Deleter
from foreshock.server.models import Problem, RunDetail
from foreshock.server.requests import Decision, Description
from foreshock.server.runs import about
from foreshock.server.runs.listing import run_detail

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})


@router.post("/v1/runs/{run:path}/describe", response_model=RunDetail)
async def post_describe(request: Request, caller: Actor, run: str, said: Description) -> RunDetail:
    """Give a run a display name, tags and notes. Its name stays what agents, alerts and addresses know it by."""
    state = request.app.state
    async with state.store.write() as connection:
        await about.describe(state.store, connection, run, f"{said.who} ({caller.name})", said)
        found = await run_detail(connection, await about.find_run(connection, run), state.settings.verify_steps)
    state.broadcaster.wake()
    return found


@router.post("/v1/runs/{run:path}/delete", status_code=204)
async def post_delete(request: Request, caller: Deleter, run: str, decision: Decision) -> Response:
    """Delete a run that no longer trains, with everything that was stored of it. It cannot be taken back."""
    state = request.app.state
    await about.delete(state.store, run, f"{decision.who} ({caller.name})", decision)
    state.broadcaster.deleted(run)
    return Response(status_code=204)
