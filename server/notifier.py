"""Notifications in words, to Slack and to a generic webhook. Off unless a URL is set.

Warnings, switches and commands that wait for approval are told, each once: a replica claims an event in the store
before it sends. An event whose sending fails three times is given up and counted; what must not be missed is
Alertmanager's to send (docs/service.md).
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import Verdict
from foreshock.server.models import RunEvent
from foreshock.server.outgoing import Outgoing, OutgoingError
from foreshock.server.pause import pause
from foreshock.server.runs.eventlog import read_events
from foreshock.server.runs.newest import described
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store, insert_or_ignore
from foreshock.server.store.schema import boots, events, runs, service_state
from foreshock.server.store.trouble import tell

log = structlog.get_logger()
_CURSOR: Final = "notified"
_KINDS: Final = ("verdict", "switched", "command")
_AT_ONCE: Final = 20
_TRIES: Final = 3
_PAUSE_SECONDS: Final = 1.0
_SAME_SECONDS: Final = 600.0
"""The ranks of a run see the same head fail; the first to say so is enough for this long."""
_DONE: Final = {
    "observe": "Nothing is switched: the run's policy is observe.",
    "approve": "A switch waits for your approval.",
    "auto": "The agent switches the head by itself.",
}


@dataclass
class Notifier:
    """Reads new events from the store and tells the ones that people should know."""

    store: Store
    settings: Settings
    out: Outgoing
    failed: int = 0
    retry_seconds: float = 2.0
    _told: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, settings: Settings) -> "Notifier | None":
        """None when no URL is set."""
        if settings.notify_slack_url is None and settings.notify_webhook_url is None:
            return None
        return cls(store, settings, Outgoing(frozenset(host.lower() for host in settings.notify_hosts)))

    async def run(self, closing: asyncio.Event) -> None:
        """Tell until `closing` is set."""
        while not closing.is_set():
            try:
                await self.turn()
            except Exception as error:
                tell("notifications could not be read; it is tried again", error)
            await pause(closing, _PAUSE_SECONDS)

    async def turn(self) -> None:
        """Claim what is new, and tell it."""
        async with self.store.write() as connection:
            found = await self._claim(connection)
            policies = {event.run: await _policy(connection, event.run) for event in found if event.verdict}
        for event in found:
            message = self._message(event, policies.get(event.run, "observe"))
            if message is not None:
                await self._tell(event, message)

    async def _claim(self, connection: AsyncConnection) -> list[RunEvent]:
        newest = (await connection.execute(select(func.max(events.c.id)))).scalar() or 0
        first = insert_or_ignore(self.store, service_state).values(key=_CURSOR, value=float(newest))
        await connection.execute(first)  # what happened before the first start is not told
        own = service_state.c.key == _CURSOR
        cursor = select(service_state.c.value).where(own).with_for_update()
        after = int((await connection.execute(cursor)).scalar_one())
        found = await read_events(connection, kinds=_KINDS, after=after, limit=_AT_ONCE)
        seen = found[-1].id if len(found) == _AT_ONCE else max([newest, *(event.id for event in found)])
        if seen > after:
            await connection.execute(update(service_state).where(own).values(value=float(seen)))
        return found

    def _message(self, event: RunEvent, policy: str) -> str | None:
        """The event in words; None for what nobody needs to hear, or has heard."""
        if event.verdict is not None:
            words = message_of(event.run, event.verdict, policy, self.settings.public_url)
            key = f"{event.verdict.layer}/{event.verdict.head}"
            if event.verdict.state != "raised" or event.verdict.severity == "info":
                return None
            key = f"{event.run} {key} {event.verdict.signal}"
        elif event.switched is not None and event.switched.outcome in ("applied", "refused"):
            words = self._said(event)
            key = f"{event.run} {event.switched.outcome} {event.switched.heads} {event.switched.after}"
        elif event.command is not None and event.command.verification is not None:
            words, key = self._said(event), f"{event.command.id} verification"
        elif event.command is not None and event.command.state == "proposed":
            words, key = self._said(event), event.command.id
        else:
            return None
        now = time.monotonic()
        self._told = {known: when for known, when in self._told.items() if now - when < _SAME_SECONDS}
        if key in self._told:
            return None
        self._told[key] = now
        return words

    def _said(self, event: RunEvent) -> str:
        return "\n".join([f"Run {event.run}: {event.sentence}", *_link(event.run, self.settings.public_url)])

    async def _tell(self, event: RunEvent, message: str) -> None:
        slack, webhook = self.settings.notify_slack_url, self.settings.notify_webhook_url
        if slack is not None:
            plain = message.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # Slack's own escapes
            await self._send("slack", slack.get_secret_value(), json.dumps({"text": plain}))
        if webhook is not None:
            body = {"message": message, "event": event.model_dump(mode="json")}
            await self._send("webhook", webhook.get_secret_value(), json.dumps(body))

    async def _send(self, name: str, url: str, body: str) -> None:
        why = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(self.retry_seconds * attempt)
            try:
                status = await self.out.post(url, body.encode())
            except OutgoingError as error:
                why = str(error)
                continue
            if 200 <= status < 300:
                return
            why = f"it answered {status}"
            if status < 500 and status != 429:
                break
        self.failed += 1
        log.error("a notification was not delivered", to=name, why=why)


def message_of(run: str, verdict: Verdict, policy: str, page: str) -> str:
    """What, where, why, how long is left, what was done, and the link: in the words of dashboards/messages.py."""
    where = "the model as a whole" if verdict.layer is None else f"layer {verdict.layer}"
    where += "" if verdict.head is None else f" head {verdict.head}"
    steps = verdict.forecast_steps
    lines = [
        f"{verdict.severity.capitalize()}: Run {run}: {where} is on its way to a loss explosion ({verdict.cause}).",
        f"{verdict.sentence.rstrip('.') or 'A warning'} (signal {verdict.signal}, step {verdict.step:,}).",
        f"Done: {_DONE[policy]}",
    ]
    if steps is not None and 0 <= steps < 1e9 and "512" not in verdict.sentence:
        lines[1] += f" Largest |score| reaches 512 in about {steps:,.0f} steps."
    return "\n".join([*lines, *_link(run, page)])


def _link(run: str, page: str) -> list[str]:
    return [f"Evidence and switch: {page.rstrip('/')}/?runs={quote(run, safe='')}"] if page else []


async def _policy(connection: AsyncConnection, run: str) -> str:
    known = await connection.execute(select(boots).join(runs, boots.c.run_id == runs.c.id).where(runs.c.name == run))
    return str(described(known.all()).get("policy", "observe"))
