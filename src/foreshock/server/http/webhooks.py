"""Webhook for Alertmanager: an alert may request a switch, and nothing else.

Alertmanager authenticates with a bearer token with the scope `act`. Deliveries may be repeated, late or resolved, so an
alert (by fingerprint and start) orders or proposes a switch of the same heads only once, and only the alerts listed
below do so. Each alert of a delivery is parsed separately, so a malformed one does not block the others.
The alert must name an open incident of the service. The incident's own decision (contract.decision), which the agent
uses too, determines the result: only an audit row, a proposed command, or a command, limited by a cool-down.
"""

import hashlib
import time
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import Connection, delete, select

from foreshock.contract.causes import curable
from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.orders import Order
from foreshock.contract.wire import first_error
from foreshock.server.auth import Actor
from foreshock.server.commands import changes_for, propose
from foreshock.server.models import Problem, Storable, WebhookResult
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.runs.ranks import described
from foreshock.server.settings import Settings
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import insert_or_ignore, lock_runs, set_state
from foreshock.server.store.schema import runs, webhook_alerts

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})

SWITCHING_ALERTS: Final = frozenset(alert.name for alert in BY_KEY["incident.active"].alerts)
SENDER: Final = "alertmanager"
_REMEMBERED_SECONDS: Final = 7 * 86_400.0

Text = Annotated[Storable, Field(max_length=1024)]


class Alert(BaseModel):
    """One alert of a delivery, as Alertmanager sends it; unused fields are ignored."""

    status: Text
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=64)
    startsAt: Text = ""  # noqa: N815 - the sender's spelling
    fingerprint: Text = ""


class Delivery(BaseModel):
    """The body of a webhook request."""

    version: Text = ""
    status: Text = ""
    alerts: list[Any]
    """Parsed one by one, as `Alert`."""


@router.post("/v1/webhooks/alertmanager")
async def from_alertmanager(request: Request, caller: Actor, delivery: Delivery) -> WebhookResult:
    """Receive a delivery of Alertmanager (version 4)."""
    state = request.app.state
    results = []
    for sent in delivery.alerts:  # each in its own transaction, which locks only the alert's run
        try:
            alert = Alert.model_validate(sent)
        except ValidationError as error:
            results.append(f"refused: {first_error(error)[:200]}")
        else:
            act = partial(_act, settings=state.settings, alert=alert, prefix=caller.run_prefix)
            results.append(_passed_over(alert) or await state.store.write(act))
        state.counters.webhooks[SENDER, results[-1].split(":")[0]] += 1
    state.broadcaster.wake()
    return WebhookResult(results=results)


def _passed_over(alert: Alert) -> str | None:
    """Return the result of an alert that needs no read from the store, or None."""
    name = alert.labels.get("alertname", "")
    if name not in SWITCHING_ALERTS and name != WATCHDOG.name:
        return "ignored: no action is tied to this alert"
    return None if alert.status == "firing" else "ignored: resolved alerts undo nothing"


def _act(connection: Connection, settings: Settings, alert: Alert, prefix: str) -> str:
    name = alert.labels.get("alertname", "")
    if name == WATCHDOG.name:
        if prefix:  # the alerts of one tenant do not prove that those of all runs are delivered
            return "ignored: the watchdog needs a token with access to every run"
        set_state(connection, "watchdog", time.time())
        return "watchdog"
    run = alert.labels.get("run", "")
    row = connection.execute(select(runs).where(runs.c.name == run)).first()
    if row is None or not run.startswith(prefix):
        return "refused: there is no run with this name"
    lock_runs(connection, [row.id])
    found = incidents_of(connection, [row.id], settings.verify_steps).get(row.id, [])
    cause = alert.labels.get("cause")
    meant = next((one for one in found if one.cause == cause and one.state != "closed"), None)
    if meant is None:
        return "refused: the run has no open incident of this cause"
    description = described(process_starts.of_now(connection, [row.id])[row.id])
    if meant.act == "none":
        why = f"a switch does not help against {meant.causes[-1]}"
        if any(map(curable, meant.causes)):
            why = f"the run's policy is {description.get('policy', 'observe')}"
        noted: dict[str, Any] = {"alert": name, "incident": meant.id, "why": why}
        audit.append(connection, actor=SENDER, action="webhook observed", run=run, details=noted)
        return f"observed: {why}"
    order = Order(
        mode=description.get("mitigation", DEFAULT_MITIGATION),
        source=SENDER,
        issued_by=SENDER,
        reason=f"alert {name}: {' and '.join(meant.causes)} since step {meant.opened_step:,}",
        state="pending" if meant.act == "switch" else "proposed",
        expires_unix_seconds=time.time() + settings.command_expiry_seconds,
    )
    bare = [head for head in meant.heads if head.state == "unswitched" and head.curable]
    asked = {(head.layer, head.head) for head in bare if head.layer is not None and head.head is not None}
    orders = changes_for(connection, row.id, order, asked, description.get("switch_scope") or "head")
    heads = sorted(ref for one in orders for ref in one.heads or ())
    key = hashlib.sha256(f"alert:{alert.fingerprint}:{alert.startsAt}:{run}:{heads}".encode()).hexdigest()
    connection.execute(delete(webhook_alerts).where(webhook_alerts.c.unix_seconds < time.time() - _REMEMBERED_SECONDS))
    if connection.execute(select(webhook_alerts.c.key).where(webhook_alerts.c.key == key)).first() is not None:
        return "duplicate: this alert has acted before"
    gate = propose(connection, row.id, orders, asked, settings.webhook_cooldown_seconds)
    if gate.why:
        noted = {"alert": name, "incident": meant.id, "why": gate.why, "mode": order.mode, "heads": heads[:64]}
        audit.append(connection, actor=SENDER, action=f"webhook {gate.result}", run=run, details=noted)
        return f"{gate.result}: {gate.why}"
    connection.execute(insert_or_ignore(connection, webhook_alerts).values(key=key, unix_seconds=time.time()))
    return gate.result
