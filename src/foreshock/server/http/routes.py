"""The HTTP routes for people and the page."""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from sqlalchemy import Connection, Row
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from foreshock.contract.incident import Incident
from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.metric import MORE_CHARTS, Scale
from foreshock.contract.modes import DEFAULT_MITIGATION, MODES
from foreshock.contract.orders import Decided
from foreshock.contract.resume import ResumePlan, resume_plan
from foreshock.contract.wire import ModeName
from foreshock.server import commands, models
from foreshock.server.auth import COOKIE, Actor, Caller, Deleter, Keyring, Reader, caller_of, cookie_of
from foreshock.server.commands import plan
from foreshock.server.drawing import as_json, curve_of, curves, matrix, metric_of
from foreshock.server.http.exposition import Exposer
from foreshock.server.models import (
    Acknowledgement,
    AuditPage,
    CommandList,
    CommandRequest,
    CommandStatus,
    Curves,
    Decision,
    Description,
    EventKind,
    EventList,
    Health,
    IncidentList,
    Login,
    Matrix,
    Problem,
    RunDetail,
    RunList,
    Session,
    SwitchPlan,
    Undo,
)
from foreshock.server.problems import ProblemError
from foreshock.server.runs import current
from foreshock.server.runs.current import find_run, list_runs, run_detail
from foreshock.server.runs.eventlog import checkpoints_of, events_of
from foreshock.server.runs.incidents import acknowledge, incidents_of
from foreshock.server.runs.ranks import described, status_of
from foreshock.server.settings import Settings
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import LeftError, Store, T, Turns, Work, lock_runs, set_state


class Readiness:
    """Tests a write to the store, at most once per second for all callers."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._room = store, settings.max_body_bytes
        self.deadline_seconds, self.same_answer_seconds = 5.0, 1.0
        self._asking = asyncio.Lock()
        self._found = "never tried"
        self._found_at = -float("inf")

    async def of_store(self) -> str:
        """Return "ok", or the problem with the store."""
        async with self._asking:
            if time.monotonic() - self._found_at >= self.same_answer_seconds:
                self._found = await self._tried()
                self._found_at = time.monotonic()
        return self._found

    async def _tried(self) -> str:
        path = self._store.path
        try:
            if path is not None and not path.exists():
                return "its file is gone"
            if path is not None and shutil.disk_usage(path.parent).free < self._room:
                return "its disk is full"
            async with asyncio.timeout(self.deadline_seconds):
                await self._store.write(lambda connection: set_state(connection, "readiness", time.time()))
        except TimeoutError:
            return f"no write within {self.deadline_seconds:.0f} s"
        except Exception as error:
            return type(error).__name__
        return "ok"


router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})


class MetricLevels(models.Response):
    """The levels from which a value is marked; with `below`, small values are bad."""

    alarm: float
    watch: float | None
    below: bool


class MetricInfo(models.Response):
    """A metric of the catalogue, with everything needed to draw it."""

    key: str
    title: str
    help: str
    bad: str
    unit: str
    per_head: bool
    signed: bool = Field(description="either sign may be bad; the worst head is the largest in size")
    scale: Scale = Field(description="of its axis; symlog is linear between -1 and 1 and logarithmic beyond")
    percent: bool = Field(description="a share, read in percent")
    levels: MetricLevels | None
    chart: Literal["first", "more"] | None = Field(description="drawn at once, on demand, or (null) without a chart")


class ModeChoice(models.Response):
    """A mode that a head may be switched to; a head may have several."""

    name: str
    does: str
    cures: str


class Catalog(models.Response):
    """Every metric for curves and (if per_head) the matrix, in the order of the charts; every mode of the kernels."""

    metrics: list[MetricInfo]
    modes: list[ModeChoice]
    default_mode: str = Field(description="the mode that a switch uses by default")


@router.get("/v1/catalog")
async def get_catalog(_: Reader) -> Catalog:
    """Every metric that can be drawn, and every mode that can be ordered."""
    same = ("key", "title", "help", "bad", "unit", "signed", "scale", "percent")
    return Catalog(
        metrics=[
            MetricInfo(
                **{name: getattr(m, name) for name in same},
                per_head=m.head is not None,
                levels=None if m.levels is None else MetricLevels(**asdict(m.levels)),
                chart=None if m.chart is None else "first" if m.chart < MORE_CHARTS else "more",
            )
            for m in sorted(METRICS, key=lambda m: MORE_CHARTS if m.chart is None else m.chart)
            if m.has_series
        ],
        modes=[ModeChoice(name=mode.name, does=mode.does, cures=mode.cures) for mode in MODES],
        default_mode=DEFAULT_MITIGATION,
    )


@router.patch("/v1/runs/{run:path}", response_model=RunDetail)
async def patch_run(request: Request, caller: Actor, run: str, description: Description) -> RunDetail:
    """Give a run a display name, tags and notes. Agents, alerts and addresses still use the run's name."""

    def describe(connection: Connection) -> RunDetail:
        current.describe(connection, run, f"{description.who} ({caller.name})", description)
        return run_detail(connection, find_run(connection, run), _verify_steps(request))

    return await _write(request, describe)


@router.delete("/v1/runs/{run:path}", status_code=204)
async def delete_run(request: Request, caller: Deleter, run: str, decision: Annotated[Decision, Query()]) -> Response:
    """Delete a run that no longer trains, with all its data. This is final."""
    state = request.app.state
    await current.delete(state.store, run, f"{decision.who} ({caller.name})", decision)
    state.broadcaster.deleted(run)
    return Response(status_code=204)


Limit = Annotated[int, Query(ge=1, le=500)]
StepQuery = Annotated[int | None, Query(ge=0, le=2**53)]
Cursor = Annotated[int | None, Query(ge=1, le=2**62)]


def _store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


def _verify_steps(request: Request) -> int:
    settings: Settings = request.app.state.settings
    return settings.verify_steps


async def _write(request: Request, change: Work[T]) -> T:
    """Change the store, and send new events to the stream."""
    found = await _store(request).write(change)
    request.app.state.broadcaster.wake()
    return found


def _json(written: bytes) -> Response:
    """Return a response whose body was encoded in another thread, outside the event loop."""
    return Response(written, media_type="application/json")


async def _of_run(
    request: Request, run: str, read: Callable[[Connection, Row[Any]], T], turns: Turns | None = None
) -> T:
    """Call `read` with a run's row, in turn. Raises ProblemError if the run does not exist."""
    return await _read_in_turn(request, lambda connection: read(connection, find_run(connection, run)), turns)


async def _read_in_turn(request: Request, read: Work[T], turns: Turns | None = None) -> T:
    """Read, by default in the turns of small reads; give up if the client disconnects while waiting for its turn."""
    leaves = asyncio.ensure_future(_until_gone(request))
    try:
        async with (turns or _store(request).small).turn(caller_of(request).name, leaves):
            return await _store(request).read(read)
    except LeftError:
        raise ClientDisconnect from None
    finally:
        leaves.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get("/v1/runs", response_model=RunList)
async def get_runs(
    request: Request,
    caller: Reader,
    limit: Limit = 100,
    search: Annotated[str, Query(max_length=128, description="part of a name or tag")] = "",
    cursor: Annotated[
        str | None, Query(max_length=160, pattern=r"^0x1\.[0-9a-f]{13}p\+[0-9]{1,2}-[^\x00]{1,128}$")
    ] = None,
) -> Response:
    """Runs, the most recent first."""
    known, steps = request.app.state.known_runs, _verify_steps(request)

    def read(connection: Connection) -> bytes:
        found = list_runs(connection, known, caller.run_prefix, search, cursor, limit, steps)
        return found.model_dump_json().encode()

    return _json(await _read_in_turn(request, read))


@router.get("/v1/runs/{run:path}/curves", response_model=Curves)
async def get_curves(
    request: Request,
    _: Reader,
    run: str,
    line: Annotated[list[Annotated[str, Query(max_length=80)]], Query(min_length=1, max_length=256)],
    from_step: StepQuery = None,
    to_step: StepQuery = None,
    max_points: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Metrics by step; each `line` is METRIC (for per-head metrics the worst head of every layer), METRIC:LAYER:HEAD,
    or METRIC:LAYER for the layer's worst head."""
    wanted = [curve_of(text) for text in line]

    def read(connection: Connection, row: Row[Any]) -> bytes:
        return as_json(curves(connection, row, wanted, (from_step, to_step), max_points))

    return _json(await _of_run(request, run, read, _store(request).large))


@router.get("/v1/runs/{run:path}/matrix", response_model=Matrix)
async def get_matrix(
    request: Request,
    _: Reader,
    run: str,
    metric: Annotated[str, Query(max_length=64)],
    step: StepQuery = None,
    max_steps: Annotated[int, Query(ge=0, le=10_000)] = 500,
    from_layer: Annotated[int, Query(ge=0, lt=100_000)] = 0,
) -> Response:
    """One per-head metric, layers by heads, at or just before a step."""
    wanted = metric_of(metric, per_head=True)

    def read(connection: Connection, row: Row[Any]) -> bytes:
        return matrix(connection, row.id, run, wanted, step, max_steps, from_layer).model_dump_json().encode()

    return _json(await _of_run(request, run, read, _store(request).large))


@router.get("/v1/runs/{run:path}/events")
async def get_events(
    request: Request,
    _: Reader,
    run: str,
    kind: Annotated[list[EventKind], Query()] = [],  # noqa: B006
    limit: Limit = 100,
    cursor: Cursor = None,
) -> EventList:
    """Events of a run, newest first: all kinds, or only those named by `kind`."""

    found = await _of_run(request, run, lambda connection, _: events_of(connection, run, kind, cursor, limit + 1))
    more = found[limit - 1].id if len(found) > limit else None
    return EventList(events=found[:limit], next_cursor=str(more) if more else None)


@router.get("/v1/runs/{run:path}/incidents")
async def get_incidents(request: Request, _: Reader, run: str) -> IncidentList:
    """The incidents of a run with their remedies, the most urgent first, closed ones included."""

    def read(connection: Connection, row: Row[Any]) -> list[Incident]:
        return incidents_of(connection, [row.id], _verify_steps(request)).get(row.id, [])

    return IncidentList(incidents=await _of_run(request, run, read))


@router.get("/v1/runs/{run:path}/resume-plan")
async def get_resume_plan(request: Request, _: Reader, run: str) -> ResumePlan:
    """The checkpoint to resume a failed run from, and the settings to change; known checkpoints and their labels."""

    def read(connection: Connection, row: Row[Any]) -> ResumePlan:
        known = process_starts.of_now(connection, [row.id])
        starts = known.get(row.id, ())
        return resume_plan(
            run,
            checkpoints_of(connection, row.id),
            incidents_of(connection, [row.id], _verify_steps(request), starts=known).get(row.id, []),
            mitigation=described(starts).get("mitigation") or DEFAULT_MITIGATION,
            ended=status_of(starts) != "active",
        )

    return await _of_run(request, run, read)


@router.post("/v1/runs/{run:path}/acknowledge")
async def post_acknowledge(request: Request, caller: Actor, run: str, care: Acknowledgement) -> Incident:
    """Acknowledge an incident, until it closes."""
    who, steps = f"{care.who} ({caller.name})", _verify_steps(request)

    def write(connection: Connection) -> Incident:
        run_id = find_run(connection, run).id
        lock_runs(connection, [run_id])
        return acknowledge(connection, (run_id, run), care.incident, who, care.reason, steps)

    return await _write(request, write)


@router.get("/v1/runs/{run:path}/commands")
async def get_commands(request: Request, _: Reader, run: str, limit: Limit = 100) -> CommandList:
    """Commands of a run, newest first."""

    found = await _of_run(request, run, lambda connection, row: commands.status(connection, row.id, None, limit))
    return CommandList(commands=found)


@router.get("/v1/runs/{run:path}/switches")
async def get_switches(request: Request, _: Reader, run: str, mode: ModeName) -> SwitchPlan:
    """The changes that a switch of every head would make; each head also keeps its present modes."""
    return await _of_run(request, run, lambda connection, row: plan(connection, row.id, mode))


@router.post("/v1/runs/{run:path}/commands", status_code=201)
async def post_command(
    request: Request,
    caller: Actor,
    run: str,
    order: CommandRequest,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=256)] = None,
) -> CommandStatus:
    """Order a switch. A request repeated with the same Idempotency-Key gets 200 and the first command."""
    expiry = request.app.state.settings.command_expiry_seconds

    def write(connection: Connection) -> CommandStatus:
        command_id, new = commands.create_from_request(connection, run, order, caller.name, idempotency_key, expiry)
        response.status_code = 201 if new else 200
        [status] = commands.status(connection, None, command_id, 1)
        return status

    return await _write(request, write)


@router.get("/v1/runs/{run:path}", response_model=RunDetail)
async def get_run(request: Request, _: Reader, run: str) -> Response:
    """The full state of a run at its last step."""

    def read(connection: Connection, row: Row[Any]) -> bytes:
        return run_detail(connection, row, _verify_steps(request)).model_dump_json().encode()

    return _json(await _of_run(request, run, read))


@router.get("/v1/commands/{command}")
async def get_command(request: Request, caller: Reader, command: str) -> CommandStatus:
    """One command with the answers of the ranks."""
    return await _read_in_turn(request, lambda connection: _reachable(connection, caller, command))


def _reachable(connection: Connection, caller: Caller, command: str) -> CommandStatus:
    found = commands.status(connection, None, command, 1)
    if not found or not found[0].run.startswith(caller.run_prefix):  # the same answer hides commands of other tenants
        raise ProblemError(404, f"There is no command {command[:128]!r}.")
    return found[0]


@router.post("/v1/commands/{command}/undo", status_code=201)
async def undo(request: Request, caller: Actor, command: str, order: Undo) -> CommandList:
    """Revert the modes that a command changed; a rank refuses if its heads have had another mode since."""
    act = partial(commands.undo, dry_run=order.dry_run)
    return CommandList(commands=await _act(request, caller, command, order, act))


@router.post("/v1/commands/{command}/{how}")
async def decide(request: Request, caller: Actor, command: str, how: Decided, decision: Decision) -> CommandStatus:
    """Approve or reject a proposed command, or cancel a pending or delivered one: then no further rank receives it.
    Finished switches stay, and can be undone."""
    return (await _act(request, caller, command, decision, partial(commands.decide, how=how)))[0]


async def _act(
    request: Request, caller: Caller, command: str, decision: Decision, act: Callable[..., Sequence[str]]
) -> list[CommandStatus]:
    """Call `act` for a command that the caller may reach; return the status of the commands whose ids it returns."""

    def write(connection: Connection) -> list[CommandStatus]:
        _reachable(connection, caller, command)
        expiry = request.app.state.settings.command_expiry_seconds
        ids = act(connection, command, f"{decision.who} ({caller.name})", decision.reason, expiry=expiry)
        return [status for one in ids for status in commands.status(connection, None, one, 1)]

    return await _write(request, write)


@router.get("/v1/audit")
async def get_audit(request: Request, caller: Reader, limit: Limit = 100, cursor: Cursor = None) -> AuditPage:
    """Every order, approval, delivery, answer and refusal, newest first. Only for tokens with access to every run."""
    _speaks_of_all(caller)
    rows = await _read_in_turn(request, lambda connection: audit.rows(connection, limit + 1, before=cursor))
    more = rows[limit - 1].sequence if len(rows) > limit else None
    return AuditPage(rows=rows[:limit], next_cursor=str(more) if more else None)


@router.get("/v1/audit/export", response_class=Response)
async def export_audit(
    request: Request,
    caller: Reader,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """The audit trail as JSON lines, oldest first, from the row after `after` on; an empty response marks the end."""
    _speaks_of_all(caller)
    rows = await _read_in_turn(request, lambda connection: audit.rows(connection, limit, after=after))
    return Response("".join(row.model_dump_json() + "\n" for row in rows), media_type="application/x-ndjson")


def _speaks_of_all(caller: Caller) -> None:
    if caller.run_prefix:
        raise ProblemError(
            403,
            f"The token {caller.name} has a run_prefix; the audit trail covers all runs.",
        )


@router.get("/metrics", response_class=Response)
async def get_metrics(request: Request, caller: Reader) -> Response:
    """Metrics for Prometheus."""
    exposer: Exposer = request.app.state.exposer
    body, content_type = await exposer.expose(request.headers.get("accept", ""), caller.run_prefix)
    return Response(body, headers={"content-type": content_type})


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def get_healthz() -> Health:
    """Liveness probe: the process runs."""
    return Health(status="ok", checks={})


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def get_readyz(request: Request) -> Any:
    """Readiness probe, without a token: the service could write to its store within the last second.

    A full batch queue is reported but does not fail the probe, because one client may fill its own queue.
    """
    state = request.app.state
    store = await state.readiness.of_store()
    queue = "ok" if state.writer.depth < state.settings.ingest_queue_batches else "full"
    health = Health(status="ok" if store == "ok" else "degraded", checks={"store": store, "ingest queue": queue})
    return JSONResponse(health.model_dump(), 200 if store == "ok" else 503)


@router.get("/v1/session")
async def get_session(request: Request) -> Session:
    """The token and scopes of this browser's session."""
    return _session_of(caller_of(request))


def _session_of(caller: Caller) -> Session:
    name = caller.name if caller.scopes else None
    scopes = sorted(caller.scopes)
    return Session(login_needed=not scopes, name=name, scopes=scopes, csrf_token=caller.csrf_token)


@router.post("/v1/login")
async def post_login(request: Request, login: Login, response: Response) -> Session:
    """Exchange a token for the page's session cookie."""
    keyring: Keyring = request.app.state.keyring
    granted = await keyring.login(login.token)
    if granted is None:
        raise ProblemError(
            401,
            "The service does not know this token. Check for a typing error, or ask its administrator for a new one.",
        )
    cookie, caller = granted
    settings: Settings = request.app.state.settings
    secure = request.url.scheme == "https" or settings.public_url.startswith("https://")
    seconds = int(settings.session_seconds)
    response.set_cookie(COOKIE, cookie, max_age=seconds, httponly=True, samesite="strict", secure=secure)
    return _session_of(caller)


@router.post("/v1/logout")
async def post_logout(request: Request, response: Response, everywhere: bool = False) -> Session:
    """End the session; with `everywhere`, every session of the caller's token."""
    keyring: Keyring = request.app.state.keyring
    await keyring.logout(caller_of(request), cookie_of(request.headers), everywhere)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return Session(login_needed=True, scopes=[])
