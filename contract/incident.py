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
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from foreshock.contract.decision import CAUSES, IncidentCause, Progress, cause_of, curable, decision
from foreshock.contract.incident_form import Acknowledged as Acknowledged
from foreshock.contract.incident_form import HeadState as HeadState
from foreshock.contract.incident_form import Incident as Incident
from foreshock.contract.incident_form import IncidentHead as IncidentHead
from foreshock.contract.incident_form import IncidentState as IncidentState
from foreshock.contract.incident_form import Judged as Judged
from foreshock.contract.incident_form import Warned as Warned
from foreshock.contract.incident_words import counted as counted
from foreshock.contract.incident_words import sentence
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode
from foreshock.contract.wire import HeadRef, Policy, Severity, Verdict

_SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")


def incident_id(cause: IncidentCause) -> str:
    """The name of a cause's incident within its run."""
    return cause.replace(" ", "-")


def incidents(
    warned: Iterable[Warned],
    *,
    modes: Mapping[HeadRef, str] | None = None,
    judged: Iterable[Judged] = (),
    acknowledged: Iterable[Acknowledged] = (),
    policy: Policy | None = None,
    mitigation: str,
    scope: str | None = None,
    last_step: int = 0,
) -> list[Incident]:
    """Every incident of a run, the most urgent first. The order of what is given does not matter.

    modes: the present mode of each head, where it is known. last_step: the run's; steps left are counted from it.
    Warnings of severity info are notes, and open nothing.
    """
    by_cause: dict[IncidentCause, list[Warned]] = {}
    for one in warned:
        if one.verdict.severity != "info":
            by_cause.setdefault(cause_of(one.verdict), []).append(one)
    cures, said = list(judged), list(acknowledged)
    found = []
    for cause, all_of_it in by_cause.items():
        episodes = _episodes(all_of_it)
        at = max(last_step, *(one.verdict.step for one in all_of_it))
        found.append(_incident(cause, episodes, modes or {}, cures, said, policy, mitigation, scope, at))
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
    cause: IncidentCause,
    episodes: Sequence[Sequence[Warned]],
    modes: Mapping[HeadRef, str],
    judged: Sequence[Judged],
    acknowledged: Sequence[Acknowledged],
    policy: Policy | None,
    mitigation: str,
    scope: str | None,
    last_step: int,
) -> Incident:
    episode = episodes[-1]
    by_head: dict[tuple[int | None, int | None], list[Warned]] = {}
    for one in episode:
        by_head.setdefault((one.verdict.layer, one.verdict.head), []).append(one)
    heads = [_head(cause, own, modes, judged, last_step) for own in by_head.values()]
    heads.sort(key=_soonest)
    standing = [head for head in heads if head.state != "quiet"]
    loose = [head for head in standing if head.state != "arrested"]
    started = min(episode, key=lambda one: (one.joined_step, one.verdict.corrected_from is not None))
    opened, was = _opened(started, episode), started.verdict.corrected_from
    mine = [a for a in acknowledged if a.cause in (cause, was) and a.step >= opened]
    seen = max(mine, key=lambda a: (a.step, a.unix_seconds, a.who, a.reason), default=None)
    progress = _progress(standing)
    switched = sum(head.state != "unswitched" for head in standing)
    first = heads[0]
    severity = max((head.severity for head in loose or heads), key=_SEVERITIES.index)
    if not loose and standing:
        severity = "info"
    suspect = [head.evidence["suspect_step"] for head in standing if "suspect_step" in head.evidence]
    what = decision(
        cause,
        policy,
        mitigation=mitigation,
        scope=scope,
        progress=progress,
        switched=switched,
        heads=len(standing),
        before_step=min([opened, *map(int, filter(math.isfinite, suspect))]),
        finite=all(head.signal != "nonfinite" for head in standing),
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
    )


def _head(
    cause: IncidentCause,
    own: Sequence[Warned],
    modes: Mapping[HeadRef, str],
    judged: Sequence[Judged],
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
        severity=max((one.verdict.severity for one in standing or own), key=_SEVERITIES.index),
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


def _cure(ref: HeadRef, raised_step: int, modes: Mapping[HeadRef, str], judged: Sequence[Judged]) -> Progress:
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
