"""What the newest process starts and samples of runs say: what a run is now, and how urgently it needs a person.

One answer for the page, the API and the command line.
"""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, case, desc, func, select

from foreshock.contract.metrics.catalog import SILENT_SECONDS
from foreshock.contract.wire import Layer, Severity, Started
from foreshock.server.curves.merging import LIVE_SAMPLES, Axis, axes_of
from foreshock.server.models import RunStatus
from foreshock.server.store import process_starts
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import boots, runs, samples

_SEVERITIES: Final[tuple[Severity | None, ...]] = (None, "info", "warning", "critical")


def condition_of(fields: Mapping[str, Any], now: float | None = None) -> dict[str, Any]:
    """What RunSummary says of a run's state, from its other fields: it changes while nothing arrives.

    A run that has not ended is silent when nothing is heard of it, and hung when it is heard of and no step ends. The
    severity is that of its worst open incident; of a silent or hung run at least a warning, of a loss that is not
    finite critical, whether its agent warned of it or not.
    """
    now = time.time() if now is None else now
    condition, since = fields["status"], None
    if condition == "active":
        stepped = fields["last_step_unix_seconds"]
        if now - fields["last_seen_unix_seconds"] >= SILENT_SECONDS:
            condition, since = "silent", fields["last_seen_unix_seconds"]
        elif stepped is not None and now - stepped >= fields["hung_after_seconds"]:
            condition, since = "hung", stepped
    found: list[Severity | None] = [one.severity for one in fields["incidents"]]
    if since is not None:
        found.append("warning")
    if fields["loss"] is not None and not math.isfinite(fields["loss"]):
        found.append("critical")
    severity = max(found, key=_SEVERITIES.index, default=None)
    urgency = _SEVERITIES.index(severity) + len(_SEVERITIES) * (fields["status"] == "active")
    return {"condition": condition, "condition_since_unix_seconds": since, "severity": severity, "urgency": urgency}


_STEPS_LOOKED_AT = 16


class _Description(Started):
    """As a boot's is stored: its layers stand elsewhere."""

    layers: tuple[Layer, ...] = ()


def described(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """The description that the newest process start gave of itself, without its layers; empty when none has yet."""
    for row in reversed(process_starts.in_order(rows)):
        description = (
            read_back(_Description, row.description, "description of boot", row.id) if row.description else None
        )
        if description is not None:
            return description.model_dump(exclude={"layers"})
    return {}


def status_of(rows: Sequence[Row[Any]]) -> RunStatus:
    """A run has finished when the newest process start of every rank has; the worst ending names it."""
    endings = {row.finished_status for row in process_starts.newest(rows).values()}
    if not endings or None in endings:
        return "active"
    return "failed" if "failed" in endings else "stopped" if "stopped" in endings else "completed"


def newest_samples(connection: Connection, run_ids: Collection[int]) -> dict[int, tuple[Axis, list[Row[Any]]]]:
    """The heads of each run that has a sample, and the samples of its newest reading: three queries for all runs.

    It is the newest step that as many ranks of the newest generation have reported as any of the last few.
    """
    live = LIVE_SAMPLES.order_by(None)
    steps = live.with_only_columns(samples.c.step).where(samples.c.run_id == runs.c.id).group_by(samples.c.step)
    nth = steps.order_by(desc(samples.c.step)).offset(_STEPS_LOOKED_AT - 1).limit(1).correlate(runs).scalar_subquery()
    lately = select(runs.c.id, func.coalesce(nth, 0).label("first")).where(runs.c.id.in_(run_ids)).cte()
    living = func.count(func.distinct(case((boots.c.newest, boots.c.rank))))
    ranks = func.count(func.distinct(boots.c.rank))
    order = desc(living), desc(ranks), desc(samples.c.step)
    place = func.row_number().over(partition_by=samples.c.run_id, order_by=order)
    placed = live.with_only_columns(samples.c.run_id, samples.c.step, place.label("place"))
    placed = placed.join(lately, and_(samples.c.run_id == lately.c.id, samples.c.step >= lately.c.first))
    newest = placed.group_by(samples.c.run_id, samples.c.step).cte()
    same = and_(samples.c.run_id == newest.c.run_id, samples.c.step == newest.c.step, newest.c.place == 1)
    rows: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(LIVE_SAMPLES.join(newest, same)):
        rows[row.run_id].append(row)
    axes = axes_of(connection, rows.keys())
    return {run_id: (axes[run_id], own) for run_id, own in rows.items()}
