"""Incidents: what all warnings of a run come to, one for each cause.

Warnings speak of heads, and every rank has its own; people need one voice. An incident opens with the first warning of
its cause, grows with every further one, and closes when all are quiet; its heads are ranked by how soon they come to
harm. It is a function of what is known: the newest word of every warning, the present modes, what became of switches,
and who acknowledged. So it does not depend on the order in which ranks were heard, needs no table of its own, and old
stores have incidents too. The agent reads its own warnings with the same function.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.decision import CAUSES, Act, IncidentCause, Progress, cause_of, curable, decision
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode
from foreshock.contract.wire import HeadRef, Policy, Severity, Verdict

IncidentState = Literal["open", "acknowledged", "switched", "arrested", "not arrested", "closed"]
HeadState = Literal["unswitched", "switched", "arrested", "not arrested", "quiet"]
_SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")
_NAMED: Final = 3


class Warned(NamedTuple):
    """A warning of a rank in its newest word."""

    rank: int
    raised_step: int
    verdict: Verdict


class Judged(NamedTuple):
    """What became of a switch: it speaks of every warning of its heads that was raised until `step`."""

    heads: frozenset[HeadRef] | None
    """None: every head."""
    step: int
    arrested: bool


class Acknowledged(BaseModel):
    """Somebody has seen an incident and takes care of it."""

    model_config = ConfigDict(frozen=True)
    cause: IncidentCause
    step: int = Field(description="the incident's newest step when it was acknowledged")
    who: str
    reason: str
    unix_seconds: float


class IncidentHead(BaseModel):
    """A head of an incident, or the whole run where layer and head are null. All ranks that speak of it together."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    layer: int | None
    head: int | None
    state: HeadState = Field(description="quiet: no warning stands any more; else where the cure of this head stands")
    severity: Severity
    signal: str
    raised_step: int
    step: int = Field(description="of its newest word")
    steps_left: float | None = Field(description="until the largest |score| reaches 512; 0 past it, null: not foreseen")
    harm_step: int | None = Field(description="the step at which that is expected")
    harm_first_step: int | None
    harm_last_step: int | None
    sentence: str
    evidence: dict[str, float]


class Incident(BaseModel):
    """All warnings of one cause in a run. `id` names it within its run: its cause, with a dash for a space."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    id: str
    cause: IncidentCause
    state: IncidentState
    severity: Severity = Field(description="of its worst head that is neither quiet nor arrested")
    opened_step: int
    step: int = Field(description="of its newest word")
    closed_step: int | None
    times: int = Field(description="how often it has opened in this run")
    standing: int = Field(description="heads that are warned about now; the whole run counts as one")
    switched: int = Field(description="how many of them have a mode under which growth by rounding ends")
    layers: list[int] = Field(description="of the heads that stand, or of all where none does")
    steps_left: float | None = Field(description="of the head that comes to harm first")
    harm_step: int | None
    harm_first_step: int | None
    harm_last_step: int | None
    heads: list[IncidentHead] = Field(description="soonest harm first; quiet ones last")
    acknowledged: Acknowledged | None
    act: Act = Field(description="what machines do about it under the run's policy: switch, propose or none")
    sentence: str = Field(description="the incident in words")
    done: str = Field(description="what was done about it, in words")
    to_do: str = Field(description="what is left to people, in words")

    @property
    def standing_heads(self) -> int:
        """Heads that are warned about now; 0 where the whole run alone is."""
        return sum(head.layer is not None and head.state != "quiet" for head in self.heads)

    @property
    def first(self) -> IncidentHead:
        """The head to look at first."""
        return self.heads[0]


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
    for one in sorted(warned, key=lambda one: (one.raised_step, one.rank, one.verdict.id)):
        if one.raised_step > until:
            found.append([])
        found[-1].append(one)
        until = max(until, math.inf if _stands(one) else one.verdict.step)
    return found


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
    opened = min(one.raised_step for one in episode)
    mine = [a for a in acknowledged if a.cause == cause and a.step >= opened]
    seen = max(mine, key=lambda a: (a.step, a.unix_seconds, a.who, a.reason), default=None)
    progress = _progress(standing)
    switched = sum(head.state != "unswitched" for head in standing)
    first = heads[0]
    severity = max((head.severity for head in loose or heads), key=_SEVERITIES.index)
    if not loose and standing:
        severity = "info"
    what = decision(
        cause,
        policy,
        mitigation=mitigation,
        scope=scope,
        progress=progress,
        switched=switched,
        heads=len(standing),
        before_step=opened,
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
        sentence=_sentence(cause, heads, standing, opened),
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


_WORDS: Final[dict[IncidentCause, str]] = {
    "rounding": "Scores drift as rounding drives them",
    "score growth": "Scores grow, which rounding was not shown to cause,",
    "not finite": "Numbers are not finite",
    "other": "The loss left its track",
}


def _sentence(
    cause: IncidentCause, heads: Sequence[IncidentHead], standing: Sequence[IncidentHead], opened: int
) -> str:
    shown = standing or heads
    said = f"{_WORDS[cause]} in {in_words(shown)}, since step {opened:,}."
    if not standing:
        return f"{said} Quiet since step {max(head.step for head in heads):,}."
    first = shown[0]
    if first.layer is not None and len(shown) > 1:
        said += f" First: {name_of(first)}."
    return said if first.state == "arrested" else said + harm_in_words(first)


def harm_in_words(head: IncidentHead) -> str:
    """When a head's largest |score| reaches 512, as a sentence after another; empty where nobody can say."""
    if head.harm_step is None:
        return ""
    if head.harm_step <= head.step:
        return " Its largest |score| is past 512."
    between = ""
    if head.harm_first_step is not None and head.harm_last_step is not None:
        between = f" ({_round(head.harm_first_step)} to {_round(head.harm_last_step)})"
    return f" Its largest |score| reaches 512 about step {_round(head.harm_step)}{between}."


def _round(step: int) -> str:
    """A forecast is not known to the step: three digits."""
    unit = 10 ** max(0, len(str(step)) - 3)
    return f"{round(step / unit) * unit:,}"


def name_of(head: IncidentHead) -> str:
    """Layer 0 head 2, in small letters."""
    if head.layer is None:
        return "the whole run"
    return f"layer {head.layer}" + ("" if head.head is None else f" head {head.head}")


def counted(heads: Sequence[IncidentHead]) -> str:
    """How many heads these are; the whole run is none of them."""
    named = sum(head.layer is not None for head in heads)
    whole = ["the whole run"] if named < len(heads) else []
    return " and ".join(whole + [f"{named} head{'s' if named > 1 else ''}"] * (named > 0))


def in_words(heads: Sequence[IncidentHead]) -> str:
    """How many heads of which layers; a few by name."""
    if len(heads) <= _NAMED:
        return " and ".join(filter(None, [", ".join(map(name_of, heads[:-1])), name_of(heads[-1])]))
    layers = sorted({head.layer for head in heads if head.layer is not None})
    return f"{counted(heads)} of {'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 7; at most four parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    named = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts]
    return ", ".join(named[:4]) + (f" and {len(numbers) - sum(map(len, parts[:4]))} more" if len(named) > 4 else "")
