"""The incidents that a recorded run would have shown people, and the heads that were named first.

Heads are many and warnings latch by the head; what calls somebody at night is an incident
(foreshock.contract.incident). One opens when a cause that nothing stands of is warned about, and closes when all of it
is quiet. Rounding and score growth that stand at one time are one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from foreshock.contract.causes import IncidentCause, mates
from foreshock.contract.decision import cause_of
from foreshock.contract.incident import Warned, incidents
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.slots import Floats
from foreshock.contract.wire import HeadRef, Verdict
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

NAMED: Final = 3
"""Heads of an incident that people look at."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An incident as it opened; the cause as it was corrected where all of it turned out to be of another."""

    step: int
    cause: IncidentCause
    expected_step: int | None
    """when harm was then expected; None where nobody could say"""
    corrected_from: IncidentCause | None = None


def opened(verdicts: Iterable[Verdict]) -> list[Opened]:
    """The incidents that a run's verdicts, in their order, open.

    A warning whose cause is corrected moves to the incident of that cause. Where that is not open, and nothing else of
    the old one stands, the old one goes on under the new cause.
    """
    standing: dict[frozenset[IncidentCause], dict[str, IncidentCause]] = {}
    """the warnings that stand and their causes, by the causes that are one incident"""
    newest: dict[frozenset[IncidentCause], int] = {}
    """the place of each one's newest incident"""
    found: list[Opened] = []
    for verdict in verdicts:
        if verdict.severity == "info":
            continue
        cause = cause_of(verdict)
        causes = mates(cause)
        left = None
        for other, ids in standing.items():
            if verdict.id in ids and (other != causes or verdict.state == "cleared"):
                del ids[verdict.id]
                left = other
        if verdict.state == "cleared":
            continue
        own = standing.setdefault(causes, {})
        corrected = own.get(verdict.id, cause) != cause
        if not own:
            if left is not None and not standing[left]:
                newest[causes], corrected = newest.pop(left), True
            else:
                newest[causes] = len(found)
                ahead = verdict.forecast_steps
                expected = None if ahead is None else verdict.step + round(min(ahead, 1e9))
                found.append(Opened(verdict.step, cause, expected))
        own[verdict.id] = cause
        latest = found[newest[causes]]
        if corrected and latest.cause != cause and set(own.values()) == {cause}:
            found[newest[causes]] = replace(latest, cause=cause, corrected_from=latest.cause)
    return found


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """The incident that stood on the page at some step."""

    cause: IncidentCause
    heads: list[HeadRef]
    """the first ones, soonest harm first"""


def incident_at(verdicts: Iterable[Verdict], step: int) -> OpenIncident | None:
    """The most urgent incident as it stood after `step`; None where none was open."""
    raised: dict[str, int] = {}
    newest: dict[str, Verdict] = {}
    for verdict in verdicts:
        if verdict.step <= step:
            raised.setdefault(verdict.id, verdict.step)
            newest[verdict.id] = verdict
    warned = [Warned(0, raised[name], verdict) for name, verdict in newest.items()]
    for incident in incidents(warned, mitigation=DEFAULT_MITIGATION, last_step=step):
        if incident.state != "closed":
            heads = [(h.layer, h.head) for h in incident.heads if h.layer is not None and h.head is not None]
            return OpenIncident(incident.cause, heads[:NAMED])
    return None


def failing_head(trace: Trace, harm_step: int | None) -> HeadRef | None:
    """The head that fails: the first whose |score| reaches 512; where none does, that of the largest |offset| in the
    first sample of the harm. None where the trace does not distinguish its heads, or nothing was recorded."""
    last: Floats | None = None
    for reading in readings(trace):
        if (reading.largest_score >= DANGEROUS_SCORE).any():
            return _one(trace.heads, reading.largest_score)
        if harm_step is not None and last is None and reading.step >= harm_step:
            last = np.abs(reading.score_offset)
    return None if last is None else _one(trace.heads, last)


def _one(heads: Sequence[HeadRef], values: Floats) -> HeadRef | None:
    """The head of the largest value; None where another has it too, or none is known."""
    if np.isnan(values).all():
        return None
    largest = np.nanmax(values)
    return heads[int(np.nanargmax(values))] if np.count_nonzero(values == largest) == 1 else None
