"""Webhooks in: an alert may ask for a switch, never more.

Alertmanager proves itself by a bearer token with the scope `act`. A delivery may come twice, late or resolved: an alert
(by fingerprint and start) orders or proposes a switch of the same heads once, and only alerts on the list below act at
all. Each alert of a delivery is read on its own: one that is malformed holds up no other.
It must speak of an incident that the service knows of itself: what may be done is that incident's own decision
(contract.decision), the same that the agent takes and that people read: nothing but an audit row, a proposed
command, or a command, bounded by a cool-down.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import Connection, Row, delete, select, update

from foreshock.contract.causes import curable
from foreshock.contract.incident import Incident
from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.contract.modes import DEFAULT_MITIGATION, is_mode
from foreshock.contract.orders import switches
from foreshock.server import commands
from foreshock.server.auth import Actor
from foreshock.server.commands import heads_by_rank, modes_here, nobody_left, propose
from foreshock.server.models import Problem, Storable, WebhookResult
from foreshock.server.runs.incidents import incidents_of, rejected_heads
from foreshock.server.runs.newest import described
from foreshock.server.settings import Settings
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import insert_or_ignore, lock_runs
from foreshock.server.store.schema import runs, service_state, webhook_alerts

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})

SWITCHING_ALERTS: Final = frozenset(alert.name for alert in BY_KEY["incident.active"].alerts)
SENDER: Final = "alertmanager"
_REMEMBERED_SECONDS: Final = 7 * 86_400.0

Text = Annotated[Storable, Field(max_length=1024)]


class Alert(BaseModel):
    """One alert of a delivery, as Alertmanager sends it; fields that we do not use are ignored."""

    status: Text
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=64)
    startsAt: Text = ""  # noqa: N815 - the sender's spelling
    fingerprint: Text = ""


class Delivery(BaseModel):
    """A webhook's body."""

    version: Text = ""
    status: Text = ""
    alerts: list[Any]
    """Read one by one, as `Alert`."""


@router.post("/v1/webhooks/alertmanager")
async def from_alertmanager(request: Request, caller: Actor, delivery: Delivery) -> WebhookResult:
    """A delivery of Alertmanager (version 4)."""
    state = request.app.state
    results = []
    for alert in map(_read, delivery.alerts):  # each for itself: it holds its run, and none waits for another's
        result = alert if isinstance(alert, str) else _passed_over(alert)
        if isinstance(alert, Alert) and result is None:
            result = await state.store.write(
                partial(_act, settings=state.settings, alert=alert, prefix=caller.run_prefix)
            )
        results.append(str(result))
        state.counters.webhooks[SENDER, results[-1].split(":")[0]] += 1
    state.broadcaster.wake()
    return WebhookResult(results=results)


def _read(alert: Any) -> Alert | str:
    """An alert, or why it cannot be read."""
    try:
        return Alert.model_validate(alert)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"refused: {'.'.join(map(str, first['loc']))[:64]}: {first['msg']}"


def _passed_over(alert: Alert) -> str | None:
    """Why an alert needs no look into the store."""
    name = alert.labels.get("alertname", "")
    if name not in SWITCHING_ALERTS and name != WATCHDOG.name:
        return "ignored: no action is tied to this alert"
    return None if alert.status == "firing" else "ignored: resolved alerts undo nothing"


def _has_acted(connection: Connection, key: str) -> bool:
    """Whether an alert of this key has ordered or proposed something within a week."""
    known = webhook_alerts.c.key == key, webhook_alerts.c.unix_seconds >= time.time() - _REMEMBERED_SECONDS
    return connection.execute(select(webhook_alerts.c.key).where(*known)).first() is not None


def _remember(connection: Connection, key: str) -> None:
    now = time.time()
    connection.execute(delete(webhook_alerts).where(webhook_alerts.c.unix_seconds < now - _REMEMBERED_SECONDS))
    connection.execute(insert_or_ignore(connection, webhook_alerts).values(key=key, unix_seconds=now))


def _act(connection: Connection, settings: Settings, alert: Alert, prefix: str) -> str:
    name = alert.labels.get("alertname", "")
    if name == WATCHDOG.name:
        if prefix:  # one tenant's alerts say nothing of the way that everybody's take
            return "ignored: the watchdog counts from a token that reaches every run"
        _seen(connection)
        return "watchdog"
    run = alert.labels.get("run", "")
    row = connection.execute(select(runs).where(runs.c.name == run)).first()
    if row is None or not run.startswith(prefix):
        return "refused: no run has this name"
    lock_runs(connection, [row.id])
    found = incidents_of(connection, [row.id], settings.verify_steps).get(row.id, [])
    cause = alert.labels.get("cause")
    meant = next((one for one in found if one.cause == cause and one.state != "closed"), None)
    if meant is None:
        return "refused: the run has no open incident of this cause"
    if meant.act == "none":
        known = _current_policy(_boots(connection, row.id)) if any(map(curable, meant.causes)) else ""
        why = f"the run's policy is {known}" if known else f"no switch helps against {meant.causes[-1]}"
        details = {"alert": name, "incident": meant.id, "why": why}
        audit.append(connection, actor=SENDER, action="webhook observed", run=run, details=details)
        return f"observed: {why}"
    order = commands.Order(
        run_id=row.id,
        run=run,
        source=SENDER,
        issued_by=SENDER,
        reason=f"alert {name}: {' and '.join(meant.causes)} since step {meant.opened_step:,}",
        heads=None,
        mode="",
        state="proposed",
        expires=time.time() + settings.command_expiry_seconds,
    )
    return _switch(settings, connection, order, meant, f"alert:{alert.fingerprint}:{alert.startsAt}:{run}")


def _boots(connection: Connection, run_id: int) -> Sequence[Row[Any]]:
    return process_starts.of_now(connection, [run_id])[run_id]


def _current_policy(known: Sequence[Row[Any]]) -> str:
    return str(described(known).get("policy", "observe"))


def _switch(
    settings: Settings, connection: Connection, order: commands.Order, incident: Incident, alert_key: str
) -> str:
    """Order or propose the switch that the incident calls for: one order for each mode that its heads get."""
    run_id, run = order.run_id, order.run
    description = described(_boots(connection, run_id))
    mitigation, scope = description.get("mitigation", DEFAULT_MITIGATION), description.get("switch_scope") or "head"
    ranks = (heads_by_rank(connection, [run_id])).get(run_id, {})
    here, held = modes_here(connection, run_id)
    driven = [head for head in incident.heads if any(map(curable, head.causes))]
    bare = {(head.layer, head.head) for head in driven if head.state == "unswitched"}
    asked = {(layer, head) for layer, head in bare if layer is not None and head is not None}
    loose = asked - rejected_heads(connection, run_id)
    known = is_mode(mitigation)
    wanted = switches(loose, here, mitigation, scope, held) if known else {}
    refs = sorted(ref for heads in wanted.values() for ref in heads)
    details = {"reason": order.reason[:500], "incident": incident.id, "policy": description.get("policy")}
    details |= {"heads": [list(ref) for ref in refs[:64]], "mode": mitigation}

    def note(action: str, why: str) -> str:
        audit.append(connection, actor=SENDER, action=action, run=run, details=details | {"why": why})
        return f"{action.removeprefix('webhook ')}: {why}"

    if not asked:
        return note("webhook observed", "its heads are switched")
    if not known:
        return note("webhook refused", f"mode {mitigation} is not known to this service; it may be the older one")
    if not refs:
        who = "took the switch of these heads back" if loose else "rejected this switch"
        return note("webhook observed", f"a person {who}, which holds until one of these heads has a new warning")
    if nobody_left(refs, ranks):
        return note("webhook refused", "every rank that holds these heads has ended")
    key = hashlib.sha256(f"{alert_key}:{refs}".encode()).hexdigest()
    if _has_acted(connection, key):
        return "duplicate: this alert has acted before"
    order = replace(order, state="pending" if incident.act == "switch" else "proposed")
    if why := propose(connection, order, wanted, settings.webhook_cooldown_seconds):
        return note("webhook refused", why)
    _remember(connection, key)
    return "ordered" if incident.act == "switch" else "proposed"


def _seen(connection: Connection) -> None:
    values: dict[str, Any] = {"key": "watchdog", "value": time.time()}
    connection.execute(insert_or_ignore(connection, service_state).values(values))
    connection.execute(update(service_state).where(service_state.c.key == "watchdog").values(value=values["value"]))
