"""Webhooks in: an alert may ask for a switch, never more.

Alertmanager proves itself by a bearer token with the scope `act`, Grafana by signing the raw body. A delivery may come
twice, late or resolved: an alert acts once (by fingerprint and start), and only alerts on the list below act at all.
It must speak of an incident that the service knows of itself: what may be done is that incident's own decision
(contract.decision), the same that the agent takes and that people are told: nothing but an audit row, a proposed
command, or a command, bounded by a cool-down and by so many an hour.
"""

import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import Row, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, WATCHDOG
from foreshock.contract.decision import curable
from foreshock.contract.incident import Incident
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.wire import HeadRef
from foreshock.server.access.auth import Actor
from foreshock.server.access.problems import ProblemError, items
from foreshock.server.commands import lifecycle as commands
from foreshock.server.commands.bounds import refusal
from foreshock.server.commands.heads_by_rank import holdings, nobody_left
from foreshock.server.models import Problem, WebhookResult
from foreshock.server.requests import Storable
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.runs.newest import described
from foreshock.server.settings import Settings
from foreshock.server.store import audit
from foreshock.server.store.database import Store, insert_or_ignore
from foreshock.server.store.schema import boots, runs, service_state, webhook_alerts

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})

SWITCHING_ALERTS: Final = frozenset(alert.name for alert in BY_KEY["incident.active"].alerts)
SIGNATURE: Final = "x-grafana-alerting-signature"
TIMESTAMP: Final = "x-grafana-alerting-signature-timestamp"
_REMEMBERED_SECONDS: Final = 7 * 86_400.0

Text = Annotated[Storable, Field(max_length=1024)]


class Alert(BaseModel):
    """One alert of a delivery, as Alertmanager and Grafana both send it; fields that we do not use are ignored."""

    status: Text
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=64)
    startsAt: Text = ""  # noqa: N815 - the sender's spelling
    fingerprint: Text = ""


class Delivery(BaseModel):
    """A webhook's body."""

    version: Text = ""
    status: Text = ""
    alerts: list[Alert] = Field(max_length=1000)


@router.post("/v1/webhooks/alertmanager")
async def from_alertmanager(request: Request, caller: Actor, delivery: Delivery) -> WebhookResult:
    """A delivery of Alertmanager (version 4)."""
    return await _handle(request, "alertmanager", delivery, caller.run_prefix)


@router.post(
    "/v1/webhooks/grafana",
    openapi_extra={
        "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Delivery"}}}}
    },
)
async def from_grafana(request: Request) -> WebhookResult:
    """A delivery of Grafana, signed with HMAC-SHA256."""
    settings: Settings = request.app.state.settings
    body = await request.body()
    try:
        _check_signature(settings, request, body)
        delivery = Delivery.model_validate_json(body)
        key = await _refuse_replay(request.app.state.store, request, body)
    except ProblemError as error:
        await _refused(request, "grafana", error.detail)
        raise
    except ValidationError as error:
        await _refused(request, "grafana", "malformed body")
        found = error.errors(include_input=False, include_url=False)
        raise ProblemError(422, "The delivery is malformed.", errors=items(found)) from None
    done = await _handle(request, "grafana", delivery, "")
    if key is not None:  # only now: a delivery that failed may come again, and each of its alerts acts once
        async with request.app.state.store.write() as connection:
            await _first_time(request.app.state.store, connection, key)
    return done


def _check_signature(settings: Settings, request: Request, body: bytes) -> None:
    if settings.grafana_hmac_secret is None:
        raise ProblemError(403, "Grafana's webhook is closed; set FORESHOCK_GRAFANA_HMAC_SECRET to open it.")
    signatures = request.headers.getlist(SIGNATURE)
    stamps = request.headers.getlist(TIMESTAMP)
    if len(signatures) != 1 or len(stamps) > 1:
        raise ProblemError(401, f"Exactly one header {SIGNATURE} is needed, and at most one {TIMESTAMP}.")
    signed = body
    if stamps:
        stamp = stamps[0]
        if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 12):
            raise ProblemError(401, f"{TIMESTAMP} is not a Unix time.")
        if abs(time.time() - int(stamp)) > settings.webhook_window_seconds:
            raise ProblemError(401, "The signature is too old or from the future.")
        signed = stamp.encode() + b":" + body
    secret = settings.grafana_hmac_secret.get_secret_value().encode()
    if not hmac.compare_digest(hmac.new(secret, signed, hashlib.sha256).hexdigest().encode(), signatures[0].encode()):
        raise ProblemError(401, "The signature does not match the body.")


async def _refuse_replay(store: Store, request: Request, body: bytes) -> str | None:
    """A stamped delivery counts once; the key by which it is remembered. Without a stamp alerts still act once."""
    stamp = request.headers.get(TIMESTAMP)
    if stamp is None:
        return None
    key = hashlib.sha256(b"delivery:" + stamp.encode() + b":" + body).hexdigest()
    async with store.read() as connection:
        if (await connection.execute(select(webhook_alerts.c.key).where(webhook_alerts.c.key == key))).first():
            raise ProblemError(409, "This delivery was received before and is not applied again.")
    return key


async def _refused(request: Request, sender: str, why: str) -> None:
    state = request.app.state
    state.counters.webhooks[sender, "refused"] += 1
    if state.forgeries.take(sender) > 0:
        return  # a flood of forgeries is counted, not written down one by one
    async with state.store.write() as connection:
        await audit.append(state.store, connection, actor=sender, action="webhook refused", details={"why": why})


async def _first_time(store: Store, connection: AsyncConnection, key: str) -> bool:
    """Remember a key for a week; True when it was not known."""
    now = time.time()
    forgotten = delete(webhook_alerts).where(webhook_alerts.c.unix_seconds < now - _REMEMBERED_SECONDS)
    await connection.execute(forgotten)
    statement = insert_or_ignore(store, webhook_alerts).values(key=key, unix_seconds=now)
    return bool((await connection.execute(statement.returning(webhook_alerts.c.key))).first())


async def _handle(request: Request, sender: str, delivery: Delivery, prefix: str) -> WebhookResult:
    state = request.app.state
    results = []
    for alert in delivery.alerts:  # each for itself: it holds its run, and none waits for another's
        async with state.store.write() as connection:
            result = await _act(state.settings, state.store, connection, sender, alert, prefix)
        state.counters.webhooks[sender, result.split(":")[0]] += 1
        results.append(result)
    state.broadcaster.wake()
    return WebhookResult(results=results)


async def _act(
    settings: Settings, store: Store, connection: AsyncConnection, sender: str, alert: Alert, prefix: str
) -> str:
    name = alert.labels.get("alertname", "")
    if name == WATCHDOG.name and alert.status == "firing":
        if prefix:  # one tenant's alerts say nothing of the way that everybody's take
            return "ignored: the watchdog counts from a token that reaches every run"
        await _seen(store, connection)
        return "watchdog"
    if name not in SWITCHING_ALERTS:
        return "ignored: no action is tied to this alert"
    if alert.status != "firing":
        return "ignored: resolved alerts undo nothing"
    run = alert.labels.get("run", "")
    row = (await connection.execute(select(runs).where(runs.c.name == run))).first()
    if row is None or not run.startswith(prefix):
        return "refused: no such run"
    await store.lock_runs(connection, [row.id])
    found = (await incidents_of(connection, [row.id], settings.verify_steps)).get(row.id, [])
    meant = next((one for one in found if _speaks_of(alert, one)), None)
    if meant is None:
        return "refused: the run has no such incident"
    if meant.act == "none":
        known = _told_policy(await _boots(connection, row.id)) if curable(meant.cause) else ""
        why = f"the run's policy is {known}" if known else f"no switch helps against {meant.cause}"
        details = {"alert": name, "incident": meant.id, "why": why}
        await audit.append(store, connection, actor=sender, action="webhook observed", run=run, details=details)
        return f"observed: {why}"
    key = hashlib.sha256(f"alert:{alert.fingerprint}:{alert.startsAt}:{run}:{_ref_of(alert)}".encode()).hexdigest()
    if not await _first_time(store, connection, key):
        return "duplicate: this alert has acted before"
    return await _switch(settings, store, connection, sender, row.id, run, meant, alert)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _ref_of(alert: Alert) -> HeadRef | None:
    """The head that an alert names; rules of 0.1.0 do, rules on incidents name none."""
    layer, head = (alert.labels.get(label, "") for label in ("layer", "head"))
    return (int(layer), int(head)) if _is_number(layer) and _is_number(head) else None


def _speaks_of(alert: Alert, incident: Incident) -> bool:
    """Whether an alert means an incident that stands: by its cause, and by its head where it names one."""
    if incident.state == "closed" or alert.labels.get("cause", incident.cause) != incident.cause:
        return False
    if not (alert.labels.get("layer") or alert.labels.get("head")):
        return "cause" in alert.labels
    return any((head.layer, head.head) == _ref_of(alert) and head.state != "quiet" for head in incident.heads)


async def _boots(connection: AsyncConnection, run_id: int) -> Sequence[Row[Any]]:
    return (await connection.execute(select(boots).where(boots.c.run_id == run_id))).all()


def _told_policy(known: Sequence[Row[Any]]) -> str:
    return str(described(known).get("policy", "observe"))


async def _switch(
    settings: Settings,
    store: Store,
    connection: AsyncConnection,
    sender: str,
    run_id: int,
    run: str,
    incident: Incident,
    alert: Alert,
) -> str:
    """Order or propose the switch that the incident calls for, of the heads that lack it within the run's scope."""
    said = described(await _boots(connection, run_id))
    mode, scope = said.get("mitigation", DEFAULT_MITIGATION), said.get("switch_scope") or "head"
    ranks = (await holdings(connection, [run_id])).get(run_id, {})
    held = {ref for holding in ranks.values() for ref in holding.heads}
    named = _ref_of(alert)
    loose = {(head.layer, head.head) for head in incident.heads if head.state == "unswitched"}
    asked = loose if named is None else loose & {named}
    layers = {ref[0] for ref in asked}
    refs = sorted(ref for ref in held if scope == "model" or ref in asked or (scope == "layer" and ref[0] in layers))
    details = {"alert": alert.labels.get("alertname"), "incident": incident.id, "policy": said.get("policy")}
    details |= {"heads": [list(ref) for ref in refs[:64]], "mode": mode}

    async def note(action: str, why: str) -> str:
        await audit.append(store, connection, actor=sender, action=action, run=run, details=details | {"why": why})
        return f"{action.removeprefix('webhook ')}: {why}"

    if not asked:
        return await note("webhook observed", "its heads are switched")
    if nobody_left(refs, ranks):
        return await note("webhook refused", "every rank that holds these heads has ended")
    if why := await refusal(settings, connection, run_id, refs, mode):
        return await note("webhook refused", why)
    order = commands.Order(
        run_id=run_id,
        run=run,
        source=sender,
        issued_by=sender,
        reason=f"alert {alert.labels['alertname']}: {incident.sentence}"[:500],
        heads=refs,
        mode=mode,
        state="pending" if incident.act == "switch" else "proposed",
        expires=time.time() + settings.command_expiry_seconds,
    )
    await commands.create(store, connection, order)
    return "ordered" if incident.act == "switch" else "proposed"


async def _seen(store: Store, connection: AsyncConnection) -> None:
    values: dict[str, Any] = {"key": "watchdog", "value": time.time()}
    await connection.execute(insert_or_ignore(store, service_state).values(values))
    await connection.execute(
        update(service_state).where(service_state.c.key == "watchdog").values(value=values["value"])
    )
