"""Incidents of runs: computed from the stored warnings on every read, and written to the event log when they change.

Incidents are not stored, only their acknowledgements, as events in the log. Events of kind `incident` record their
changes; the stream sends these events, and people are notified of each once.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, and_, desc, select, update

from foreshock.contract.causes import IncidentCause
from foreshock.contract.decision import calls_for_switch
from foreshock.contract.incident import Acknowledged, AnyRef, Incident, RunContext, SwitchOutcome, Warned, incidents
from foreshock.contract.modes import DEFAULT_MITIGATION, is_mode, mode_name, parse_mode
from foreshock.contract.orders import Order
from foreshock.contract.wire import SEVERITIES, HeadRef, Switched, Verdict
from foreshock.server.models import IncidentChange
from foreshock.server.problems import ProblemError
from foreshock.server.readings import Newest, merge, newest_samples, read_back
from foreshock.server.runs.eventlog import heads_of, printable, write_events
from foreshock.server.runs.ranks import described, heads_by_rank, status_of
from foreshock.server.store import audit, process_starts
from foreshock.server.store.schema import boots, command_ranks, commands, events, warnings


class Given(NamedTuple):
    """The result of an order for a head."""

    step: int
    taken: bool
    """Whether the order removed a mitigation."""
    mode: str | None
    """The head's mode since then; None while other ranks have not answered."""


@dataclass
class Orders:
    """Orders and proposals of a run, the newest first, and the newest result for each head."""

    known: list[Order] = field(default_factory=list)
    given: dict[HeadRef, Given] = field(default_factory=dict)
    judged: list[SwitchOutcome] = field(default_factory=list)
    """The outcomes of verified switches; `step` is the last step at which a rank applied the switch."""

    def modes(self, newest: Newest | None) -> tuple[dict[HeadRef, str], int]:
        """Return the present modes, from the newest reading and later orders, and the step of that reading."""
        found, step = dict[HeadRef, str](), 0
        if newest is not None:
            axis, rows = newest
            reading = merge(axis, rows, frozenset({"modes"}))
            step = int(reading.steps[-1])
            for ref, mode in zip(axis.heads, reading.fields["modes"][-1], strict=True):
                with suppress(ValueError):  # not reported (NaN), or unknown to this version
                    found[ref] = mode_name(int(mode))
        later = {ref: one.mode for ref, one in self.given.items() if one.mode is not None and one.step >= step}
        return found | later, step

    def held(self, warned: Iterable[Warned]) -> set[HeadRef]:
        """Return heads from which a person removed a mitigation and that have had no new warning since.

        The agent applies the same rule.
        """
        raised: dict[AnyRef, int] = {}
        for one in warned:
            if one.active:
                raised[one.ref] = max(one.raised_step, raised.get(one.ref, 0))
        return {ref for ref, one in self.given.items() if one.taken and raised.get(ref, -1) <= one.step}


def orders_of(connection: Connection, run_ids: Collection[int]) -> dict[int, Orders]:
    """Return the switches of each of these runs, without dry runs."""
    found: dict[int, Orders] = defaultdict(Orders)
    mine = commands.c.run_id.in_(run_ids), ~commands.c.dry_run, commands.c.action == "switch"
    rows = connection.execute(select(commands).where(*mine).order_by(desc(commands.c.number))).all()
    done = carried_out(connection, *mine)
    for row in rows:
        own, order = found[row.run_id], Order.model_validate(row._mapping)
        own.known.append(order)
        if order.verification in ("verified", "not arrested") and done[row.id]:
            last = max(one.step for one in done[row.id])
            heads = None if order.heads is None else frozenset(order.heads)
            own.judged.append(SwitchOutcome(heads, last, order.verification == "verified"))
        for step, ref, before, after in done[row.id]:
            if is_mode(before) and is_mode(after):
                taken = row.source != "rank" and bool(parse_mode(before) & ~parse_mode(after))
                own.given.setdefault(ref, Given(step, taken, after if row.state == "applied" else None))
    return found


class SwitchedHead(NamedTuple):
    """A head whose mode a rank changed."""

    step: int
    ref: HeadRef
    before: str
    after: str


def carried_out(connection: Connection, *only: ColumnElement[bool]) -> dict[str, list[SwitchedHead]]:
    """Return, by command id, the heads that ranks switched, except at steps that a later process start repeated."""
    found: dict[str, list[SwitchedHead]] = defaultdict(list)
    by = boots.c.run_id == commands.c.run_id, boots.c.rank == command_ranks.c.rank, boots.c.boot == command_ranks.c.boot
    query = select(commands.c.id, commands.c.heads, command_ranks.c.switched, boots.c.until_step).join(command_ranks)
    query = query.outerjoin(boots, and_(*by)).where(*only, command_ranks.c.outcome == "applied")
    for row in connection.execute(query.where(command_ranks.c.switched.is_not(None)).order_by(command_ranks.c.rank)):
        switched = read_back(Switched, row.switched, "answer of command", row.id)
        if switched is not None and (row.until_step is None or switched.step <= row.until_step):
            own, heads = heads_of(row), zip(switched.heads, switched.before, switched.after, strict=True)
            named = None if own is None else frozenset(own)
            found[row.id] += [SwitchedHead(switched.step, *one) for one in heads if named is None or one[0] in named]
    return found


def reject_evidence(connection: Connection, run_id: int, heads: Collection[HeadRef] | None) -> None:
    """Mark active warnings that call for a switch of these heads (None: every head) as rejected."""
    for one in warned_of(connection, [run_id], warnings.c.active).get(run_id, ()):
        if calls_for_switch(one.verdict) and (heads is None or one.ref in heads):
            same = warnings.c.run_id == run_id, warnings.c.rank == one.rank, warnings.c.uid == one.verdict.id
            connection.execute(update(warnings).where(*same).values(rejected=True))


def incidents_of(
    connection: Connection,
    run_ids: Collection[int],
    verify_steps: int,
    *,
    starts: Mapping[int, Sequence[Row[Any]]] | None = None,
    newest: Mapping[int, Newest] | None = None,
) -> dict[int, list[Incident]]:
    """Return the incidents of each of these runs that has any, the most urgent first.

    verify_steps: steps after a switch until it is verified; the result applies to all warnings raised until then.
    starts, newest: the runs' present process starts and newest samples, if the caller has read them already.
    """
    warned = warned_of(connection, run_ids)
    if not warned:
        return {}
    known = starts or process_starts.of_now(connection, warned)
    if newest is None:
        newest = newest_samples(connection, list(warned))
    acknowledged = _acknowledged(connection, warned)
    ordered = orders_of(connection, warned)
    found = {}
    for run_id, own in warned.items():
        description = described(known.get(run_id, ()))
        orders = ordered.get(run_id, Orders())
        modes, step = orders.modes(newest.get(run_id))
        context = RunContext(
            mitigation=description.get("mitigation") or DEFAULT_MITIGATION,
            modes=modes,
            judged=[one._replace(step=one.step + verify_steps) for one in orders.judged],
            acknowledged=acknowledged[run_id],
            policy=description.get("policy"),
            scope=description.get("switch_scope"),
            last_step=step,
            orders=orders.known,
            held=orders.held(own),
            ended=status_of(known.get(run_id, ())) != "active",
            clip=description.get("qk_clip"),
        )
        made = incidents(own, context)
        if made:
            found[run_id] = made
    return found


def warned_of(connection: Connection, run_ids: Collection[int], *only: ColumnElement[bool]) -> dict[int, list[Warned]]:
    """Return the newest verdict of every warning, by run; `only`: further conditions.

    Left out are warnings of steps that a later process start repeated, and those of an earlier generation whose rank no
    longer has the head, because no process would ever clear them.
    """
    query = select(warnings, boots.c.until_step, boots.c.newest).join(boots, warnings.c.boot_id == boots.c.id)
    query = query.where(warnings.c.run_id.in_(run_ids), *only)
    rows = connection.execute(query.order_by(warnings.c.raised_step, warnings.c.rank, warnings.c.uid)).all()
    held = heads_by_rank(connection, {row.run_id for row in rows if not row.newest})
    found: dict[int, list[Warned]] = defaultdict(list)
    for row in rows:
        verdict = read_back(Verdict, row.verdict, "warning", (row.run_id, row.rank, row.uid))
        if verdict is None or (row.until_step is not None and verdict.step > row.until_step):
            continue
        own = held.get(row.run_id, {}).get(row.rank)
        if row.newest or (own and (verdict.layer is None or own.may_hold([(verdict.layer, verdict.head)]))):
            found[row.run_id].append(Warned(row.rank, row.raised_step, verdict, row.rejected))
    return found


def present(connection: Connection, run_id: int) -> tuple[dict[HeadRef, int], set[HeadRef]]:
    """Return the present mode of every head (plain for all if none is known), and heads not switched automatically."""
    ranks = heads_by_rank(connection, [run_id]).get(run_id, {})
    refs = {ref for holding in ranks.values() for ref in holding.heads}
    orders = orders_of(connection, [run_id]).get(run_id, Orders())
    names, _ = orders.modes(newest_samples(connection, [run_id]).get(run_id))
    held = orders.held(warned_of(connection, [run_id]).get(run_id, ()))
    return {ref: int(parse_mode(names.get(ref, "plain"))) for ref in refs if ref in names or not names}, held


def rejected_heads(connection: Connection, run_id: int) -> set[AnyRef]:
    """Return the heads with an active warning for which a person rejected a switch."""
    warned = warned_of(connection, [run_id]).get(run_id, ())
    return {one.ref for one in warned if one.rejected and one.active}


def _acknowledged(connection: Connection, run_ids: Collection[int]) -> dict[int, list[Acknowledged]]:
    query = select(events.c.id, events.c.run_id, events.c.payload)
    query = query.where(events.c.run_id.in_(run_ids), events.c.kind == "acknowledged")
    found: dict[int, list[Acknowledged]] = defaultdict(list)
    for row in connection.execute(query):
        acknowledged = read_back(Acknowledged, row.payload, "event", row.id)
        if acknowledged is not None:
            found[row.run_id].append(acknowledged)
    return found


def record_incidents(connection: Connection, run_ids: Collection[int], verify_steps: int) -> dict[int, list[Incident]]:
    """Log which incidents of these runs have opened, become worse, grown tenfold or changed their state.

    The caller has locked the runs (`lock_runs`). Returns the incidents.
    """
    now, rows = time.time(), list[dict[str, Any]]()

    def write(run_id: int, change: IncidentChange) -> None:
        shown = {"sentence": f"{change.state.capitalize()}: {change.sentence}", "outcome": change.cause}
        own = {"kind": "incident", "step": change.step, "unix_seconds": now, "payload": change.model_dump_json()}
        rows.append({"run_id": run_id, **own, **shown})

    known = incidents_of(connection, run_ids, verify_steps)
    for run_id, found in known.items():
        for incident in found:
            before, change = _last_change(connection, run_id, incident.cause), change_of(incident)
            if before is None or _has_changed(before, change):
                write(run_id, change)
            elif len(str(change.standing)) > len(str(before.standing)):
                write(run_id, change.model_copy(update={"grown": True}))
        for was, incident in _gone_over(found).items():
            before = _last_change(connection, run_id, was)
            if before is not None and before.state != "closed":
                sentence = f"The incident {was} was reclassified as {incident.cause}."
                if was in incident.causes:
                    sentence = f"The incident {was} joins {incident.cause}: both are active in this run."
                ends = {"state": "closed", "step": max(before.step, incident.step), "standing": 0, "steps_left": None}
                write(run_id, before.model_copy(update={**ends, "grown": False, "sentence": sentence}))
    write_events(connection, rows)
    return known


def _gone_over(found: Iterable[Incident]) -> dict[IncidentCause, Incident]:
    """Return causes that no longer have their own incident, each with the incident that contains its warnings now."""
    present = {incident.cause for incident in found}
    corrected = ((head.corrected_from, incident) for incident in found for head in incident.heads)
    joined = ((cause, incident) for incident in found for cause in incident.causes)
    return {was: incident for was, incident in (*corrected, *joined) if was is not None and was not in present}


def change_of(incident: Incident) -> IncidentChange:
    """Return the short form of an incident for the log."""
    return IncidentChange.model_validate(dict(incident))


def _has_changed(before: IncidentChange, now: IncidentChange) -> bool:
    """Whether an incident has another state, a new cause, or a higher severity than at its last event."""
    joined = set(now.causes) - {before.cause, *before.causes}
    other = (before.state, before.times) != (now.state, now.times)
    return bool(joined) or other or SEVERITIES.index(now.severity) > SEVERITIES.index(before.severity)


def _last_change(connection: Connection, run_id: int, cause: str) -> IncidentChange | None:
    of = events.c.run_id == run_id, events.c.kind == "incident", events.c.outcome == cause
    query = select(events.c.id, events.c.payload).where(*of).order_by(desc(events.c.id)).limit(1)
    row = connection.execute(query).first()
    return None if row is None else read_back(IncidentChange, row.payload, "event", row.id)


def acknowledge(
    connection: Connection, run: tuple[int, str], incident_id: str, who: str, reason: str, verify_steps: int
) -> Incident:
    """Record that `who` takes care of an incident of `run` (id and name); return the incident in its new state.

    The caller has locked the run. Raises ProblemError if the run has no such incident, or if it is closed.
    """
    run_id, name = run
    found = incidents_of(connection, [run_id], verify_steps).get(run_id, [])
    known = next((one for one in found if one.id == incident_id), None)
    if known is None:
        raise ProblemError(
            404, f"Run {name} has no incident {incident_id[:64]!r}; GET /v1/runs/RUN/incidents lists them."
        )
    if known.state == "closed":
        raise ProblemError(409, f"The incident {incident_id} of run {name} is closed.")
    now = time.time()
    acknowledgement = Acknowledged(cause=known.cause, step=known.step, who=who, reason=reason, unix_seconds=now)
    details = {"incident": incident_id, "step": known.step, "reason": reason}
    audit.append(connection, actor=who, action="acknowledged", run=name, details=details)
    row = {"run_id": run_id, "kind": "acknowledged", "step": known.step, "unix_seconds": now}
    sentence = printable(f"{who} acknowledged the incident {incident_id}: {reason}")
    write_events(connection, [{**row, "sentence": sentence, "payload": acknowledgement.model_dump_json()}])
    found = record_incidents(connection, [run_id], verify_steps).get(run_id, [])
    return next((one for one in found if one.id == incident_id), known)
