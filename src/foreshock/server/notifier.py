"""Notifications as text, to Slack and to a generic webhook. Off unless a URL is set.

Messages report incidents and their changes, orders that wait for approval, results of switches, and runs that fell
silent. Each is sent once, because a replica claims it in the store before it sends. Events wait `notify_gather_seconds`
for further ones, and are sent together. After three failed attempts a message is dropped and counted; alerts that must
not be missed are sent by Alertmanager (docs/grafana.md). A message is short enough to read on a telephone at night:
severity and run first, then the problem, the actions so far, the next action, and a link. Whatever the number of runs
and heads, it has fewer than LONGEST characters.
"""

import asyncio
import json
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

import structlog
from sqlalchemy import Connection, func, select

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import STEPS_BEFORE
from foreshock.contract.incident import Incident, counted, heads_in_words, urgency
from foreshock.contract.metrics.run_metrics import SILENT_SECONDS
from foreshock.server.models import RunEvent
from foreshock.server.outgoing import Outgoing, OutgoingError
from foreshock.server.runs.eventlog import events_after, newest_cursor
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.runs.ranks import status_of
from foreshock.server.settings import Settings
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, insert_or_ignore, log_store_error, pause, set_state
from foreshock.server.store.schema import events, runs, service_state

LONGEST: Final = 1500
_RUNS_ALONE: Final = 3
_NAMES: Final = 6
_LETTERS: Final = 80
_ORDERED: Final = re.compile(r"\b[Ss]witch (?:every head|on) to (\w+)")
"""Finds the request for a switch in a text of contract.causes, and its mode."""
_WORDS: Final = {"critical": "Critical", "warning": "Warning", "info": "Note"}


def messages_of(
    changed: Mapping[str, Sequence[Incident]],
    other: Mapping[str, Sequence[str]],
    page: str,
    ended: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Return (run, message) for each run; for more than a few runs one message for all, with an empty run.

    changed: incidents that opened, became worse or changed their state, by run; other: further sentences by run;
    ended: the runs among them that have ended.
    """
    named = sorted(changed.keys() | other.keys())
    if len(named) <= _RUNS_ALONE:
        return [(run, of_run(run, changed.get(run, ()), other.get(run, ()), page, ended=run in ended)) for run in named]
    return [("", of_many(changed, other, page))]


def of_run(run: str, changed: Sequence[Incident], other: Sequence[str], page: str, *, ended: bool = False) -> str:
    """Return the message for one run: its changed incidents, the most urgent first, then the other sentences."""
    lines = []
    ranked = sorted(changed, key=urgency)
    for incident in ranked:
        lines.append(f"{_head(incident)}: Run {run}: {incident.sentence}")
        if incident.state != "closed":
            to_do = incident.to_do if ended else to_do_of(run, incident)
            lines += ["The run has ended."] * ended + [f"Done: {incident.done}", f"To do: {to_do}"]
    lines += [f"Run {run}: {sentence}" for sentence in dict.fromkeys(other)]
    return fitted(lines, [f"Evidence and switch: {_place(run, ranked, page)}"] if page else [])


def of_many(changed: Mapping[str, Sequence[Incident]], other: Mapping[str, Sequence[str]], page: str) -> str:
    """Return one message for many runs, with a line for each of the most urgent."""
    worst = {run: min(found, key=urgency) for run, found in changed.items() if found}
    ranked = sorted(worst, key=lambda run: (urgency(worst[run]), run))
    runs = len(changed.keys() | other.keys())
    head = _head(worst[ranked[0]]) if ranked else "Note"
    lines = [f"{head}: {runs} runs have news of their incidents or switches."]
    lines += [f"{shortened(run)}: {_head(worst[run]).lower()}, {_brief(worst[run])}" for run in ranked[:_NAMES]]
    if runs > len(lines) - 1:
        lines.append(f"... and {runs - (len(lines) - 1)} more runs.")
    lines.append(
        "To do: look at the learning rate, the data and the machines that these runs share, then at the first."
    )
    return fitted(lines, [f"All runs: {page.rstrip('/')}/"] if page else [])


def to_do_of(run: str, incident: Incident) -> str:
    """Return the next action for people, and the command for it: an approval, a switch or `resume-plan`."""
    if incident.ask == "approve":
        return f'{incident.to_do} Type: foreshock approve {shlex.quote(run)} --reason "{incident.cause}"'
    named = _ORDERED.search(incident.to_do)
    if named is None:
        goes_back = "checkpoint" in incident.to_do and incident.closed_step is None
        return f"{incident.to_do} Type: foreshock resume-plan {shlex.quote(run)}" if goes_back else incident.to_do
    order = f'foreshock switch {shlex.quote(run)} --mode {named[1]} --reason "{incident.cause}"'
    return f"{incident.to_do} Type: {order}"


def words_of(run: str, incident: Incident) -> tuple[str, str, str, str]:
    """Return the texts of an incident's alert: its heads, the incident, the actions so far, the next action."""
    standing = [head for head in incident.heads if head.state != "quiet"]
    return (
        heads_in_words([head.ref for head in standing or incident.heads]),
        incident.sentence,
        incident.done,
        to_do_of(run, incident),
    )


def silent(runs: Sequence[str], minutes: float, page: str) -> str:
    """Return one message for all runs that fell silent."""
    for_minutes = f"sent nothing for {minutes:.0f} minutes"
    if len(runs) == 1:
        what = f"Run {shortened(runs[0])} has {for_minutes}."
        to_do = "Check whether the training still runs; if it does, run `foreshock doctor` on its machine."
        link = f"Last steps: {_place(runs[0], (), page)}"
    else:
        more = f" and {len(runs) - _NAMES} more" if len(runs) > _NAMES else ""
        what = f"{len(runs)} runs have {for_minutes}: {', '.join(map(shortened, sorted(runs)[:_NAMES]))}{more}."
        to_do, link = (
            "First check the cluster, its network and this service's address.",
            f"All runs: {page.rstrip('/')}/",
        )
    return fitted([f"Warning: {what}", "Done: Nothing.", f"To do: {to_do}"], [link] if page else [])


def fitted(lines: Sequence[str], last: Sequence[str]) -> str:
    """Join the lines and cut the text if it is too long; the lines of `last` are never cut."""
    end = "\n".join(last)
    room = LONGEST - len(end) - 2
    body = "\n".join(lines)
    if len(body) > room:
        body = body[: max(0, room - 1)].rstrip() + "…"
    return f"{body}\n{end}" if end else body


def shortened(name: str) -> str:
    """Shorten a long name in the middle, because the names of similar runs differ at their ends."""
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS // 2]}…{name[-_LETTERS // 2 + 1 :]}"


def _place(run: str, ranked: Sequence[Incident], page: str) -> str:
    """Return the page's address for the first incident: its head, the metric of its cause, and steps from before it."""
    asked = {"runs": run}
    for incident in ranked[:1]:
        first = incident.first
        if first.layer is not None and first.head is not None:
            asked["head"] = f"{first.layer}.{first.head}"
        asked["metric"] = CAUSES[first.causes[0]].shown_by
        since = incident.opened_step - max(STEPS_BEFORE, 2 * (incident.step - incident.opened_step))
        if since > 0:
            asked["steps"] = f"{since}-"
    return f"{page.rstrip('/')}/?{urlencode(asked, quote_via=quote, safe='')}"


def _head(incident: Incident) -> str:
    if incident.state in ("closed", "arrested"):
        return incident.state.capitalize()
    word = _WORDS[incident.severity]
    return word if incident.state == "open" else f"{word}, {incident.state}"


def _brief(incident: Incident) -> str:
    heads = counted([head.ref for head in incident.heads])
    return f"{' and '.join(incident.causes)}, {heads} since step {incident.opened_step:,}"


log = structlog.get_logger()
_CURSOR: Final = "notified"
_AHEAD_SECONDS: Final = 3600.0
"""More than the clocks of two replicas differ; otherwise both would report the same silent run in turn."""
_SILENT_CURSOR: Final = "notified silence"
_KINDS: Final = ("incident", "switched", "command")
_AT_ONCE: Final = 1000
_TRIES: Final = 3
_PAUSE_SECONDS: Final = 1.0


@dataclass
class Notifier:
    """Reads new events from the store and sends notifications about them."""

    store: Store
    settings: Settings
    out: Outgoing
    failed: int = 0
    retry_seconds: float = 2.0

    @classmethod
    def of(cls, store: Store, settings: Settings) -> "Notifier | None":
        """Return a notifier, or None if no URL is set."""
        if settings.notify_slack_url is None and settings.notify_webhook_url is None:
            return None
        return cls(store, settings, Outgoing(frozenset(host.lower() for host in settings.notify_hosts)))

    async def run(self, closing: asyncio.Event) -> None:
        """Send notifications until `closing` is set."""
        while not closing.is_set():
            try:
                await self.turn()
            except Exception as error:
                log_store_error("notifications could not be read; the service tries again", error)
            await pause(closing, _PAUSE_SECONDS)

    async def turn(self) -> None:
        """Claim new events and silent runs, and send messages about them."""
        page = self.settings.public_url

        def claim(connection: Connection) -> tuple[list[RunEvent], dict[str, list[Incident]], set[str], list[str]]:
            found = self._claim(connection)
            return found, *self._changed(connection, found), self._fallen_silent(connection)

        found, changed, ended, quiet = await self.store.write(claim)
        other: dict[str, list[str]] = defaultdict(list)
        for event in found:
            if _is_sent(event, event.run in changed):
                other[event.run].append(event.sentence)
        for run, message in messages_of(changed, other, page, ended):
            last = next((event for event in reversed(found) if run in ("", event.run)), None)
            await self._notify(message, last, changed)
        if quiet:
            await self._notify(silent(quiet, SILENT_SECONDS / 60, page), None, {})

    def _claim(self, connection: Connection) -> list[RunEvent]:
        """Return the events since the last claim; empty until the oldest has waited `notify_gather_seconds`."""
        newest = newest_cursor(connection)
        after = self._cursor(connection, _CURSOR, float(newest))  # earlier events are not sent
        oldest = select(func.min(events.c.unix_seconds)).where(events.c.id > after, events.c.kind.in_(_KINDS))
        first = connection.execute(oldest).scalar()
        if first is not None and 0 <= time.time() - first < self.settings.notify_gather_seconds:
            return []
        found = events_after(connection, int(after), _AT_ONCE, kinds=_KINDS)
        seen = found[-1][0] if len(found) == _AT_ONCE else max([newest, *(cursor for cursor, _ in found)])
        if seen > after:
            set_state(connection, _CURSOR, float(seen))
        return [event for _, event in found]

    def _changed(self, connection: Connection, found: Sequence[RunEvent]) -> tuple[dict[str, list[Incident]], set[str]]:
        """Return the present state of the incidents in the claimed events, by run, and those of the runs that ended.

        Events that only report growth are left out.
        """
        named: dict[str, set[str]] = defaultdict(set)
        for event in found:
            if event.incident is not None and not event.incident.grown:
                named[event.run].add(event.incident.id)
        ids = connection.execute(select(runs.c.id, runs.c.name).where(runs.c.name.in_(named)))
        names = {row.id: row.name for row in ids}
        made = incidents_of(connection, list(names), self.settings.verify_steps)
        changed = {
            names[run_id]: [one for one in own if one.id in named[names[run_id]]] for run_id, own in made.items()
        }
        starts = process_starts.of_now(connection, names)
        ended = {names[run_id] for run_id, own in starts.items() if status_of(own) != "active"}
        return {run: own for run, own in changed.items() if own}, ended

    def _fallen_silent(self, connection: Connection) -> list[str]:
        """Return active runs that have become silent, for SILENT_SECONDS, since the last call."""
        until = time.time() - SILENT_SECONDS
        after = self._cursor(connection, _SILENT_CURSOR, until)
        if after > until + _AHEAD_SECONDS:  # the cursor was set by a clock that was ahead and has been corrected
            set_state(connection, _SILENT_CURSOR, until)
        if until - after < 6 * self.settings.notify_gather_seconds or until <= after:
            return []  # wait, because the runs of one cluster fall silent within a heartbeat of each other
        set_state(connection, _SILENT_CURSOR, until)
        rows = select(runs.c.id, runs.c.name).where(runs.c.last_seen > after, runs.c.last_seen <= until)
        names = {row.id: row.name for row in connection.execute(rows)}
        starts = process_starts.of_now(connection, names)
        return sorted(names[run_id] for run_id, own in starts.items() if status_of(own) == "active")

    def _cursor(self, connection: Connection, key: str, at_first: float) -> float:
        """Return the cursor up to which events were sent, locked until the transaction ends, so that one replica sends
        them."""
        first = insert_or_ignore(connection, service_state).values(key=key, value=at_first)
        connection.execute(first)
        locked = select(service_state.c.value).where(service_state.c.key == key).with_for_update()
        return float(connection.execute(locked).scalar_one())

    async def _notify(self, message: str, event: RunEvent | None, changed: Mapping[str, Sequence[Incident]]) -> None:
        slack, webhook = self.settings.notify_slack_url, self.settings.notify_webhook_url
        if slack is not None:
            plain = message.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # Slack's own escapes
            await self._send("slack", slack.get_secret_value(), json.dumps({"text": plain}))
        if webhook is not None:
            brief = {
                run: [one.model_dump(mode="json", exclude={"heads": True, "order": {"heads"}}) for one in own]
                for run, own in changed.items()
            }
            body = {"message": message, "event": event and event.model_dump(mode="json"), "incidents": brief}
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


def _is_sent(event: RunEvent, in_incident: bool) -> bool:
    """Whether to send an event that is not an incident; not if an incident of the same run already reports it."""
    if event.switched is not None:
        return event.switched.outcome == "refused" or (event.switched.outcome == "applied" and not in_incident)
    if event.command is None:
        return False
    waits = event.command.state == "proposed" and (event.command.source == "service" or not in_incident)
    return waits or event.command.verification is not None
