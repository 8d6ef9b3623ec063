"""Incidents: what all warnings of a run come to, one for each cause.

Warnings speak of heads, and every rank has its own; people need one voice. An incident opens with the first warning of
its cause, grows with every further one, and closes when all are quiet; its heads are ranked by how soon they come to
harm. A warning whose cause is corrected goes over to the incident of that cause. Where that one is not open, the
incident goes on under another name, from the step at which it was first told, and says so.

It is a function of what is known: the newest word of every warning, the present modes, what became of switches, and who
acknowledged. So it does not depend on the order in which ranks were heard, needs no table of its own, and old stores
have incidents too. The agent reads its own warnings with the same function.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from foreshock.contract.decision import CAUSES, IncidentCause, Progress, cause_of, curable, decision
from foreshock.contract.incident_form import Acknowledged as Acknowledged
from foreshock.contract.incident_form import HeadState as HeadState
from foreshock.contract.incident_form import Incident as Incident
from foreshock.contract.incident_form import IncidentHead as IncidentHead
from foreshock.contract.incident_form import IncidentState as IncidentState
from foreshock.contract.incident_form import SwitchOutcome as SwitchOutcome
from foreshock.contract.incident_form import Warned as Warned
from foreshock.contract.incident_form import counted as counted
from foreshock.contract.incident_form import sentence
from foreshock.contract.modes import CLIP_ORDERS, ROUNDING_ENDS, is_mode, parse_mode
from foreshock.contract.orders import Ordered
from foreshock.contract.wire import HeadRef, Policy, Severity, Verdict

_SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")


class _Known(NamedTuple):
    """What is known of a run beside its warnings: the keywords of `incidents`."""

    modes: Mapping[HeadRef, str]
    judged: Sequence[SwitchOutcome]
    acknowledged: Sequence[Acknowledged]
    policy: Policy | None
    mitigation: str
    scope: str | None
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]] | None
    held: Collection[HeadRef]
    ended: bool
    clip: str | None


def incident_id(cause: IncidentCause) -> str:
    """The name of a cause's incident within its run."""
    return cause.replace(" ", "-")


def incidents(
    warned: Iterable[Warned],
    *,
    modes: Mapping[HeadRef, str] | None = None,
    judged: Iterable[SwitchOutcome] = (),
    acknowledged: Iterable[Acknowledged] = (),
    policy: Policy | None = None,
    mitigation: str,
    scope: str | None = None,
    last_step: int = 0,
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]] | None = None,
    held: Collection[HeadRef] = (),
    ended: bool = False,
    clip: str | None = None,
) -> list[Incident]:
    """Every incident of a run, the most urgent first. The order of what is given does not matter.

    modes: the present mode of each head, where it is known. last_step: the run's; steps left are counted from it.
    orders: what was ordered and proposed, for which heads (None: every head), the newest first; None where that is not
    known. held: heads that a person took a mitigation from, which no machine switches. ended: the run has ended. clip:
    `Started.qk_clip` as it is now. Warnings of severity info are notes, and open nothing.
    """
    known = _Known(modes or {}, list(judged), list(acknowledged), policy, mitigation, scope, orders, held, ended, clip)
    by_cause: dict[IncidentCause, list[Warned]] = {}
    for one in warned:
        if one.verdict.severity != "info":
            by_cause.setdefault(cause_of(one.verdict), []).append(one)
    found: list[Incident] = []
    for cause, all_of_it in sorted(by_cause.items(), key=lambda one: CAUSES.index(one[0])):
        drifts = any(one.cause == "rounding" and one.state not in ("closed", "arrested") for one in found)
        at = max(last_step, *(one.verdict.step for one in all_of_it))
        found.append(_incident(cause, _episodes(all_of_it), known, at, drifts))
    return sorted(found, key=urgency)


def urgency(incident: Incident) -> tuple[bool, int, float, int]:
    """Sorts the most urgent first: open before closed, severe before mild, soon before late."""
    left = math.inf if incident.steps_left is None else incident.steps_left
    closed = incident.state in ("closed", "arrested")
    return closed, -_SEVERITIES.index(incident.severity), left, CAUSES.index(incident.cause)


def _episodes(warned: Sequence[Warned]) -> list[list[Warned]]:
    """Warnings that stood at one time belong together; what comes after all were quiet opens the incident again."""
    found: list[list[Warned]] = []
    until = -math.inf
    for one in sorted(warned, key=lambda one: (one.joined_step, one.rank, one.verdict.id)):
        if one.joined_step > until:
            found.append([])
        found[-1].append(one)
        until = max(until, math.inf if _stands(one) else one.verdict.step)
    return found


def _opened(started: Warned, episode: Sequence[Warned]) -> int:
    """The step of the first warning: of an incident that was told under another cause before, the first of those."""
    if started.verdict.corrected_from is None:
        return started.joined_step
    return min(one.raised_step for one in episode if one.joined_step == started.joined_step)


def _stands(one: Warned) -> bool:
    return one.verdict.state != "cleared"


def _incident(
    cause: IncidentCause, episodes: Sequence[Sequence[Warned]], known: _Known, last_step: int, drifts: bool
) -> Incident:
    episode = episodes[-1]
    by_head: dict[tuple[int | None, int | None], list[Warned]] = {}
    for one in episode:
        by_head.setdefault((one.verdict.layer, one.verdict.head), []).append(one)
    heads = [_head(cause, own, known.modes, known.judged, last_step) for own in by_head.values()]
    heads.sort(key=_soonest)
    standing = [head for head in heads if head.state != "quiet"]
    loose = [head for head in standing if head.state != "arrested"]
    started = min(episode, key=lambda one: (one.joined_step, one.verdict.corrected_from is not None))
    opened, was = _opened(started, episode), started.verdict.corrected_from
    mine = [a for a in known.acknowledged if a.cause in (cause, was) and a.step >= opened]
    seen = max(mine, key=lambda a: (a.step, a.unix_seconds, a.who, a.reason), default=None)
    progress = _progress(standing)
    switched = sum(head.state != "unswitched" for head in standing)
    first = heads[0]
    severity = max((head.severity for head in loose or heads), key=_SEVERITIES.index)
    if not loose and standing:
        severity = "info"
    suspect = [head.evidence["suspect_step"] for head in standing if "suspect_step" in head.evidence]
    rejected = {(one.verdict.layer, one.verdict.head) for one in episode if _stands(one) and one.rejected}
    order = None
    if curable(cause):
        order = _order(standing, progress, known.orders or (), rejected, known.held)
    elif cause == "score growth":
        order = _clip_order(standing, known.orders or (), rejected)
    what = decision(
        cause,
        known.policy,
        mitigation=known.mitigation,
        scope=known.scope,
        progress=progress,
        switched=switched,
        heads=len(standing),
        before_step=min([opened, *map(int, filter(math.isfinite, suspect))]),
        finite=all(head.signal != "nonfinite" for head in standing),
        orders_known=known.orders is not None,
        order=order,
        over=bool(standing) and all(_falls(head.evidence) for head in standing),
        ended=known.ended,
        clip=known.clip,
        drifts=drifts,
    )
    state: IncidentState = "closed" if not standing else "open" if progress == "unswitched" else progress
    if state == "open" and seen is not None:
        state = "acknowledged"
    return Incident(
        id=incident_id(cause),
        cause=cause,
        state=state,
        severity=severity,
        opened_step=opened,
        corrected_from=was,
        corrected_step=None if was is None else started.joined_step,
        step=max(head.step for head in heads),
        closed_step=None if standing else max(head.step for head in heads),
        times=len(episodes),
        standing=len(standing),
        switched=switched,
        layers=sorted({head.layer for head in standing or heads if head.layer is not None}),
        steps_left=first.steps_left if loose else None,
        harm_step=first.harm_step if loose else None,
        harm_first_step=first.harm_first_step if loose else None,
        harm_last_step=first.harm_last_step if loose else None,
        heads=heads,
        acknowledged=seen,
        act=what.act if standing else "none",
        sentence=sentence(cause, heads, standing, opened, was, started.joined_step),
        done=what.done if standing else "All warnings are quiet.",
        to_do=what.to_do if standing else "Nothing.",
        ask=what.ask if standing else "none",
        order=order,
    )


def _falls(evidence: Mapping[str, float]) -> bool:
    """Whether what had grown in a head became less over the window: offset and largest score, as far as known."""
    both = [(evidence.get(key), evidence.get(f"{key}_before")) for key in ("offset", "score")]
    known = [(abs(now), abs(before)) for now, before in both if now is not None and before is not None]
    return bool(known) and all(now < before for now, before in known)


def _order(
    standing: Sequence[IncidentHead],
    progress: Progress,
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]],
    rejected: Collection[tuple[int | None, int | None]],
    held: Collection[HeadRef],
) -> Ordered | None:
    """The newest order that tells where the incident's heads stand.

    Of heads that are not switched: the newest one for any of them. A rejection or a switch that was taken back counts
    while it holds for all of them. Of heads that are switched: the newest one that did it, or a proposal of more.
    A proposal that waits goes before newer orders, since it is what people can answer.
    """
    bare = {(head.layer, head.head) for head in standing if head.state == "unswitched"}
    own = bare or {(head.layer, head.head) for head in standing}
    for heads, order in sorted(orders, key=lambda each: each[1].state != "proposed"):
        if order.mode in CLIP_ORDERS:
            continue
        if heads is not None and own.isdisjoint(heads):
            continue
        cures = is_mode(order.mode) and bool(parse_mode(order.mode) & ROUNDING_ENDS)
        if progress != "unswitched":
            counts = cures and order.state in ("applied", "proposed")
        elif order.state == "rejected":
            counts = own <= set(rejected)
        elif order.state == "applied":
            counts = not cures and own <= set(held)
        else:
            counts = cures
        if counts:
            return order
    return None


def _clip_order(
    standing: Sequence[IncidentHead],
    orders: Sequence[tuple[frozenset[HeadRef] | None, Ordered]],
    rejected: Collection[tuple[int | None, int | None]],
) -> Ordered | None:
    """The newest order about QK-Clip, a proposal that waits first; a rejection counts while it holds for all heads."""
    refused = {(head.layer, head.head) for head in standing} <= set(rejected)
    clips = [order for _, order in orders if order.mode in CLIP_ORDERS and (order.state != "rejected" or refused)]
    return min(clips, key=lambda order: order.state != "proposed", default=None)


def _head(
    cause: IncidentCause,
    own: Sequence[Warned],
    modes: Mapping[HeadRef, str],
    judged: Sequence[SwitchOutcome],
    last_step: int,
) -> IncidentHead:
    """One head as all ranks that hold it see it: the rank that expects harm first speaks for it."""
    standing = [one for one in own if _stands(one)]
    told = min(standing or own, key=_speaks_first)
    verdict = told.verdict
    raised = min(one.raised_step for one in own)
    harm, low, high = (_step_of(verdict, steps) for steps in (
        verdict.forecast_steps, verdict.forecast_low_steps, verdict.forecast_high_steps))  # fmt: skip
    state: HeadState = "quiet"
    if standing:
        state = "unswitched"
        if curable(cause) and verdict.layer is not None and verdict.head is not None:
            latest = max(one.raised_step for one in standing)
            state = _cure((verdict.layer, verdict.head), latest, modes, judged)
    return IncidentHead(
        layer=verdict.layer,
        head=verdict.head,
        state=state,
        severity=_severity(standing or own),
        signal=verdict.signal,
        raised_step=raised,
        step=max(one.verdict.step for one in own),
        steps_left=None if harm is None else float(max(0, harm - last_step)),
        harm_step=harm,
        harm_first_step=low,
        harm_last_step=high,
        harm_in_sight=verdict.harm_in_sight,
        corrected_from=verdict.corrected_from,
        sentence=verdict.sentence,
        evidence=verdict.evidence,
    )


def _severity(own: Sequence[Warned]) -> Severity:
    """The worst of what ranks say of a head; what has begun to fall by itself is a warning at most."""
    worst = max((one.verdict.severity for one in own), key=_SEVERITIES.index)
    falls = all(one.verdict.signal != "nonfinite" and _falls(one.verdict.evidence) for one in own)
    return "warning" if falls and worst == "critical" else worst


def _cure(ref: HeadRef, raised_step: int, modes: Mapping[HeadRef, str], judged: Sequence[SwitchOutcome]) -> Progress:
    """Where a head's cure stands. Who was arrested stays so until a warning is raised after that was found."""
    mode = modes.get(ref, "plain")
    if not is_mode(mode) or not parse_mode(mode) & ROUNDING_ENDS:
        return "unswitched"
    spoken = [one for one in judged if (one.heads is None or ref in one.heads) and one.step >= raised_step]
    if not spoken:
        return "switched"
    newest = max(one.step for one in spoken)  # of several at one step the worse word counts
    return "arrested" if all(one.arrested for one in spoken if one.step == newest) else "not arrested"


def _progress(standing: Sequence[IncidentHead]) -> Progress:
    states = {head.state for head in standing}
    if "not arrested" in states:
        return "not arrested"
    if not states or "unswitched" in states:
        return "unswitched"
    return "arrested" if states == {"arrested"} else "switched"


def _step_of(verdict: Verdict, steps: float | None) -> int | None:
    if steps is None or not math.isfinite(steps) or abs(steps) > 1e12:
        return None
    return verdict.step + round(max(0.0, steps))


def _speaks_first(one: Warned) -> tuple[float, int, int, int, str]:
    harm = _step_of(one.verdict, one.verdict.forecast_steps)
    severity = _SEVERITIES.index(one.verdict.severity)
    return math.inf if harm is None else harm, -severity, -one.verdict.step, one.rank, one.verdict.id


def _soonest(head: IncidentHead) -> tuple[bool, bool, bool, float, int, int, int, int]:
    """What is not finite is harmed already; then by the step of harm; what is arrested or quiet comes last."""
    return (
        head.state == "quiet",
        head.state == "arrested",
        head.signal != "nonfinite",
        math.inf if head.harm_step is None else head.harm_step,
        -_SEVERITIES.index(head.severity),
        head.raised_step,
        -1 if head.layer is None else head.layer,
        -1 if head.head is None else head.head,
    )
