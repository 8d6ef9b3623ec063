"""Incidents: what all warnings of a run come to, one for each cause; one for rounding and score growth together.

Warnings are of heads, and every rank has its own; people need one message. An incident opens with the first warning of
its cause, grows with every further one, and closes when all are quiet; its heads are ranked by how soon they come to
harm. A warning whose cause is corrected goes over to the incident of that cause. Where that one is not open, the
incident goes on under another name, from the step of its first warning, and says so. Rounding and score growth
that stand at one time are one incident (contract.decision.in_order).

It is a function of what is known: the newest word of every warning, the present modes, what became of switches, and who
acknowledged. So it does not depend on the order in which ranks were heard, needs no table of its own, and old stores
have incidents too. The agent reads its own warnings with the same function.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from foreshock.contract.causes import CAUSES, IncidentCause, curable, incident_id, mates
from foreshock.contract.decision import Progress, cause_of
from foreshock.contract.incident_form import Acknowledged as Acknowledged
from foreshock.contract.incident_form import HeadState, IncidentHead, sentence
from foreshock.contract.incident_form import Incident as Incident
from foreshock.contract.incident_form import IncidentState as IncidentState
from foreshock.contract.incident_form import SwitchOutcome as SwitchOutcome
from foreshock.contract.incident_form import Warned as Warned
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode
from foreshock.contract.orders import Ordered
from foreshock.contract.remedies import Known, answer, falls, progress_of, switched_of
from foreshock.contract.wire import HeadRef, Policy, Severity, Verdict

_SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")


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
    known = Known(modes or {}, list(judged), list(acknowledged), policy, mitigation, scope, orders, held, ended, clip)
    together: dict[frozenset[IncidentCause], list[Warned]] = {}
    for one in warned:
        if one.verdict.severity != "info":
            together.setdefault(mates(cause_of(one.verdict)), []).append(one)
    found: list[Incident] = []
    for all_of_it in together.values():
        at = max(last_step, *(one.verdict.step for one in all_of_it))
        by_cause: dict[IncidentCause, list[list[Warned]]] = {}
        for episode in _episodes(all_of_it):
            by_cause.setdefault(_causes(episode)[0], []).append(episode)
        found += [_incident(episodes, known, at) for episodes in by_cause.values()]
    return sorted(found, key=urgency)


def urgency(incident: Incident) -> tuple[bool, int, float, int]:
    """Sorts the most urgent first: open before closed, severe before mild, soon before late."""
    left = math.inf if incident.steps_left is None else incident.steps_left
    closed = incident.state in ("closed", "arrested")
    return closed, -_SEVERITIES.index(incident.severity), left, list(CAUSES).index(incident.cause)


def _causes(warned: Iterable[Warned]) -> list[IncidentCause]:
    return sorted({cause_of(one.verdict) for one in warned}, key=list(CAUSES).index)


def _since(one: Warned) -> int:
    """Since when it speaks of its incident's causes."""
    within = one.verdict.corrected_from in mates(cause_of(one.verdict))
    return one.raised_step if within else one.joined_step


def _episodes(warned: Sequence[Warned]) -> list[list[Warned]]:
    """Warnings that stood at one time belong together; what comes after all were quiet opens the incident again."""
    found: list[list[Warned]] = []
    until = -math.inf
    for one in sorted(warned, key=lambda one: (_since(one), one.rank, one.verdict.id)):
        if _since(one) > until:
            found.append([])
        found[-1].append(one)
        until = max(until, math.inf if _stands(one) else one.verdict.step)
    return found


def _opened(started: Warned, episode: Sequence[Warned]) -> int:
    """The step of the first warning; where an incident was reported under another cause before, of that one."""
    raised = [one.raised_step for one in episode if one.joined_step == started.joined_step]
    return min([_since(one) for one in episode] + (raised if started.verdict.corrected_from is not None else []))


def _stands(one: Warned) -> bool:
    return one.verdict.state != "cleared"


def _incident(episodes: Sequence[Sequence[Warned]], known: Known, last_step: int) -> Incident:
    episode = episodes[-1]
    causes = _causes(episode)
    cause = causes[0]
    by_head: dict[tuple[int | None, int | None], list[Warned]] = {}
    for one in episode:
        by_head.setdefault((one.verdict.layer, one.verdict.head), []).append(one)
    heads = [_head(own, known.modes, known.judged, last_step) for own in by_head.values()]
    heads.sort(key=_soonest)
    standing = [head for head in heads if head.state != "quiet"]
    loose = [head for head in standing if not _is_cured(head)]
    started = min(
        (one for one in episode if cause_of(one.verdict) == cause),
        key=lambda one: (one.joined_step, one.verdict.corrected_from is not None),
    )
    opened, was = _opened(started, episode), started.verdict.corrected_from
    mine = [a for a in known.acknowledged if a.cause in (*causes, was) and a.step >= opened]
    seen = max(mine, key=lambda a: (a.step, a.unix_seconds, a.who, a.reason, a.cause), default=None)
    first = heads[0]
    severity = max((head.severity for head in loose or heads), key=_SEVERITIES.index)
    if not loose and standing:
        severity = "info"
    suspect = [head.evidence["suspect_step"] for head in standing if "suspect_step" in head.evidence]
    before = min([opened, *map(int, filter(math.isfinite, suspect))])
    what, order = answer(episode, standing, known, before)
    driven = [head for head in standing if any(map(curable, head.causes))]
    progress = progress_of(driven)
    if progress == "arrested" and loose:
        progress = "unswitched"  # what grows by itself is open
    state: IncidentState = "closed" if not standing else "open" if progress == "unswitched" else progress
    if state == "open" and seen is not None:
        state = "acknowledged"
    return Incident(
        id=incident_id(cause),
        cause=cause,
        causes=causes,
        state=state,
        severity=severity,
        opened_step=opened,
        corrected_from=was,
        corrected_step=None if was is None else started.joined_step,
        step=max(head.step for head in heads),
        closed_step=None if standing else max(head.step for head in heads),
        times=len(episodes),
        standing=len(standing),
        switched=switched_of(driven),
        layers=sorted({head.layer for head in standing or heads if head.layer is not None}),
        steps_left=first.steps_left if loose else None,
        harm_step=first.harm_step if loose else None,
        harm_first_step=first.harm_first_step if loose else None,
        harm_last_step=first.harm_last_step if loose else None,
        heads=heads,
        acknowledged=seen,
        act=what.act,
        sentence=sentence(causes, heads, standing, opened, was, started.joined_step),
        done=what.done,
        to_do=what.to_do,
        ask=what.ask,
        order=order,
    )


def _is_cured(head: IncidentHead) -> bool:
    """Whether all that a head is warned about has stopped."""
    return head.state == "arrested" and all(map(curable, head.causes))


def _head(
    own: Sequence[Warned],
    modes: Mapping[HeadRef, str],
    judged: Sequence[SwitchOutcome],
    last_step: int,
) -> IncidentHead:
    """One head as all ranks that hold it see it: the rank that expects harm first speaks for it."""
    standing = [one for one in own if _stands(one)]
    verdict = min(standing or own, key=_speaks_first).verdict
    raised = min(one.raised_step for one in own)
    harm, low, high = (_step_of(verdict, steps) for steps in (
        verdict.forecast_steps, verdict.forecast_low_steps, verdict.forecast_high_steps))  # fmt: skip
    state: HeadState = "quiet"
    if standing:
        state = "unswitched"
        driven = [one for one in standing if curable(cause_of(one.verdict))]
        if driven and verdict.layer is not None and verdict.head is not None:
            latest = max(one.raised_step for one in driven)
            state = _cure((verdict.layer, verdict.head), latest, modes, judged)
    return IncidentHead(
        layer=verdict.layer,
        head=verdict.head,
        causes=_causes(standing or own),
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
    fall = all(one.verdict.signal != "nonfinite" and falls(one.verdict.evidence) for one in own)
    return "warning" if fall and worst == "critical" else worst


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
        _is_cured(head),
        head.signal != "nonfinite",
        math.inf if head.harm_step is None else head.harm_step,
        -_SEVERITIES.index(head.severity),
        head.raised_step,
        -1 if head.layer is None else head.layer,
        -1 if head.head is None else head.head,
    )
