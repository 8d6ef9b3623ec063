"""Incidents: the warnings of a run, grouped by cause; active rounding and score growth form one incident.

Each warning concerns one head on one rank, but people need a single message. An incident opens with the first warning
of its cause, grows with every further one, and closes when all are cleared; its heads are sorted by the steps left. If
the cause of a warning is corrected, the warning belongs to the incident of the new cause, from the step at which it was
raised. If no other warning of the former cause remains, the incident continues under the new cause and says so.

Incidents are computed only from the newest verdict of every warning, the present modes, the results of switches, and
acknowledgements. So they do not depend on the order in which ranks report, need no table, and exist for old stores too.
The agent computes the incidents of its own warnings with the same function.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.causes import CAUSES, Ask, IncidentCause, Text, curable, incident_id, mates
from foreshock.contract.decision import (
    UNDONE,
    WHOSE,
    Act,
    Progress,
    act_on,
    cause_of,
    checkpoint_before,
    is_active,
)
from foreshock.contract.modes import ROUNDING_ENDS, is_mode, parse_mode, stronger
from foreshock.contract.orders import Order
from foreshock.contract.wire import SEVERITIES, HeadRef, Policy, Severity, Verdict

IncidentState = Literal["open", "acknowledged", "switched", "arrested", "not arrested", "closed"]
HeadState = Literal["unswitched", "switched", "arrested", "not arrested", "quiet"]
AnyRef = tuple[int | None, int | None]
"""(layer, head), or the whole run if both are None."""


class Warned(NamedTuple):
    """A warning of a rank, with its newest verdict."""

    rank: int
    raised_step: int
    verdict: Verdict
    rejected: bool = False
    """Whether a person rejected a switch while the warning was active."""

    @property
    def ref(self) -> AnyRef:
        """Its (layer, head)."""
        return self.verdict.layer, self.verdict.head

    @property
    def cause(self) -> IncidentCause:
        """The cause of the incident that it belongs to."""
        return cause_of(self.verdict)

    @property
    def active(self) -> bool:
        """Whether it is not cleared."""
        return self.verdict.state != "cleared"

    @property
    def joined_step(self) -> int:
        """The step since which it has its present cause."""
        corrected = self.verdict.corrected_step
        return self.raised_step if corrected is None else max(corrected, self.raised_step)


class SwitchOutcome(NamedTuple):
    """The verified result of a switch; it applies to every warning of its heads that was raised up to `step`."""

    heads: frozenset[HeadRef] | None
    """None: every head."""
    step: int
    arrested: bool


class Acknowledged(BaseModel):
    """The acknowledgement of an incident by a person who takes care of it."""

    model_config = ConfigDict(frozen=True)
    cause: IncidentCause
    step: int = Field(description="the incident's newest step when it was acknowledged")
    who: str
    reason: str
    unix_seconds: float


class IncidentHead(BaseModel):
    """A head of an incident, or the whole run if layer and head are null; the warnings of all ranks together."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    layer: int | None
    head: int | None
    causes: list[IncidentCause] = Field(description="causes of its warnings; several if ranks report different ones")
    state: HeadState = Field(description="quiet: no active warning; else the state of this head's mitigation")
    severity: Severity
    signal: str
    raised_step: int
    step: int = Field(description="step of its newest verdict")
    steps_left: float | None = Field(description="until the largest |score| reaches 512; 0 past it, null: no forecast")
    harm_step: int | None = Field(description="the expected step at which it reaches 512")
    harm_first_step: int | None = Field(description="the earliest such step; the latest cannot be estimated")
    harm_in_sight: bool | None = Field(description="false: on its course it stays below 512; null: no forecast")
    corrected_from: IncidentCause | None = Field(description="the cause that was reported before")
    sentence: str
    evidence: dict[str, float]

    @property
    def ref(self) -> AnyRef:
        """Its (layer, head)."""
        return self.layer, self.head

    @property
    def curable(self) -> bool:
        """Whether a switch helps against one of its causes."""
        return any(map(curable, self.causes))

    @property
    def cured(self) -> bool:
        """Whether all growth that it is warned about has stopped."""
        return self.state == "arrested" and all(map(curable, self.causes))


class IncidentInShort(BaseModel):
    """An incident without its heads. `id` is unique within its run: its cause, with a dash for a space."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    id: str
    cause: IncidentCause = Field(description="the first of `causes`")
    causes: list[IncidentCause] = Field(default_factory=list, description="every cause of its warnings")
    state: IncidentState
    severity: Severity = Field(description="of its worst head that is neither quiet nor arrested")
    opened_step: int = Field(description="step of the first warning, also if that had another cause")
    step: int = Field(description="step of its newest verdict")
    times: int = Field(description="how often it has opened in this run")
    corrected_from: IncidentCause | None = Field(default=None, description="the cause that was reported before")
    corrected_step: int | None = Field(default=None, description="the step at which its cause was corrected")
    standing: int = Field(description="heads that are warned about now; the whole run counts as one")
    steps_left: float | None = Field(description="steps left of the first head to reach 512")
    sentence: str = Field(description="the incident in words")


class Incident(IncidentInShort):
    """All warnings of one cause in a run, or of rounding and score growth if both were active at the same time."""

    before_step: int = Field(description="checkpoints before this step are not affected")
    closed_step: int | None
    switched: int = Field(description="number of heads with the cause rounding that have a mode which stops its growth")
    layers: list[int] = Field(description="layers of the heads with active warnings, or of all heads if there are none")
    harm_step: int | None
    harm_first_step: int | None
    heads: list[IncidentHead] = Field(description="soonest harm first; quiet ones last")
    acknowledged: Acknowledged | None
    act: Act = Field(description="the automatic action under the run's policy: switch, propose or none")
    done: str = Field(description="the actions so far, in words")
    to_do: str = Field(description="the next actions of people, in words")
    ask: Ask = Field(description="the action that `to_do` requests: approve `order`, order a switch, or none of these")
    order: Order | None = Field(description="the newest order for its heads, or the proposal that waits")

    @property
    def standing_heads(self) -> int:
        """The number of heads that are warned about now; 0 if only the whole run is."""
        return sum(head.layer is not None and head.state != "quiet" for head in self.heads)

    @property
    def first(self) -> IncidentHead:
        """The head to look at first."""
        return self.heads[0]


_NAMED_HEADS: Final = 3
"""The maximum number of heads to name one by one; of more, only the count is given."""


def _sentence(
    causes: Sequence[IncidentCause],
    heads: Sequence[IncidentHead],
    standing: Sequence[IncidentHead],
    opened: int,
    was: IncidentCause | None,
    corrected: int,
) -> str:
    """Return the incident in words: its first step, its heads, and the expected step at which one reaches 512."""
    shown = standing or heads
    named = [
        f"{CAUSES[cause].reads} in {heads_in_words([head.ref for head in own])}"
        for cause in causes
        if (own := [head for head in shown if cause in head.causes])
    ]
    text = f"{', and '.join([named[0], *(f'{one[0].lower()}{one[1:]}' for one in named[1:])])}, since step {opened:,}."
    if was is not None:
        text += f" Corrected: until step {corrected:,} this was reported as {was}."
    if not standing:
        return f"{text} Quiet since step {max(head.step for head in heads):,}."
    first = shown[0]
    only_level = first.signal == "level" and len(shown) < 2
    if first.layer is None and was is None and (first.signal == "nonfinite" or only_level):
        return first.sentence  # it names place, extent and harm
    if first.layer is not None and len(shown) > 1:
        text += f" First: {_name_of(first.ref)}."
    if first.state == "arrested":
        return text
    if first.harm_step is None:
        slows = " Its growth slows down: on this course its largest |score| stays below 512."
        return text + slows * (first.harm_in_sight is False)
    if first.harm_step <= first.step:
        return f"{text} Its largest |score| is past 512."
    early = "" if first.harm_first_step is None else f" (not before {_rounded(first.harm_first_step)})"
    return f"{text} Its largest |score| reaches 512 about step {_rounded(first.harm_step)}{early}."


def _rounded(step: int) -> str:
    """Format a step with three significant digits, the precision of a forecast."""
    unit = 10 ** max(0, len(str(step)) - 3)
    return f"{round(step / unit) * unit:,}"


def _name_of(ref: AnyRef) -> str:
    layer, head = ref
    return "the whole run" if layer is None else f"layer {layer}" + ("" if head is None else f" head {head}")


def counted(heads: Sequence[AnyRef]) -> str:
    """Return the number of heads in words; a reference to the whole run is named separately."""
    named = sum(layer is not None for layer, _ in heads)
    whole = ["the whole run"] if named < len(heads) else []
    return " and ".join(whole + [f"{named} head{'s' if named > 1 else ''}"] * (named > 0))


def heads_in_words(heads: Sequence[AnyRef] | None) -> str:
    """Return a few heads by name, or the number of heads and their layers; None stands for every head."""
    if not heads:
        return "every head" if heads is None else "no head"
    if len(heads) <= _NAMED_HEADS:
        return " and ".join(filter(None, [", ".join(map(_name_of, heads[:-1])), _name_of(heads[-1])]))
    parts: list[list[int]] = []
    for layer in (layers := sorted({layer for layer, _ in heads if layer is not None})):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    named = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts[:4]]
    more = f" and {len(layers) - sum(map(len, parts[:4]))} more" if len(parts) > 4 else ""
    return f"{counted(heads)} of {'layer' if len(layers) == 1 else 'layers'} {', '.join(named)}{more}"


def page_of(url: str, *runs: str) -> str:
    """Return the address of the live page for these runs (at least one) of the service at `url`."""
    return f"{url.rstrip('/')}/?runs={quote(','.join(runs), safe='/:,')}"


class RunContext(NamedTuple):
    """The state of a run in addition to its warnings."""

    mitigation: str
    modes: Mapping[HeadRef, str] = {}
    """The present mode of each head, if known."""
    judged: Sequence[SwitchOutcome] = ()
    acknowledged: Sequence[Acknowledged] = ()
    policy: Policy | None = None
    scope: str | None = None
    last_step: int = 0
    """The step from which `steps_left` is counted."""
    orders: Sequence[Order] | None = None
    """Ordered and proposed switches, the newest first; None: not known."""
    held: Collection[HeadRef] = ()
    """Heads from which a person removed a mitigation; they are not switched automatically."""
    ended: bool = False
    clip: str | None = None
    """The present value of `Started.qk_clip`."""


def _decide(
    episode: Sequence[Warned], standing: Sequence[IncidentHead], known: RunContext, before_step: int
) -> tuple[Text, Order | None]:
    """Return the texts for the actions so far and the next ones, and the order that shows the state of the switch."""
    if not standing:
        refs = {one.ref for one in episode}
        order = next((one for one in known.orders or () if one.state == "applied" and one.names(refs)), None)
        way = "" if order is None else f" {order.way}."
        return Text(f"All warnings are quiet.{way}", "Nothing."), order
    order, decided = None, []
    for cause in [one for one in CAUSES if any(one in head.causes for head in standing)]:
        heads = [head for head in standing if cause in head.causes]
        own = order = _order(episode, heads, known, cause) if curable(cause) else order
        decided.append(_text(cause, heads, known, before_step, own if curable(cause) else None))
    what, *more = decided
    broken = any(head.signal == "nonfinite" for head in standing if head.curable)
    if not more or broken or known.ended:
        return what, order
    [growth] = more  # some heads have the cause rounding, others score growth
    if what.to_do == "Nothing.":
        return Text(f"Rounding: {what.done} Score growth: {growth.done}", growth.to_do), order
    return what._replace(to_do=f"{what.to_do} Scores grow too: {growth.to_do}"), order


def _text(
    cause: IncidentCause, heads: Sequence[IncidentHead], known: RunContext, before_step: int, order: Order | None
) -> Text:
    """Return the text for the heads with this cause, with its fields filled in."""
    switched, all_of_them = switched_of(heads), len(heads)
    texts = CAUSES[cause].texts
    text = texts.get(_state(cause, heads, known, order)) or texts[""]
    count = f"All {all_of_them}" if switched >= all_of_them else f"{switched} of {all_of_them}"
    given, way = "The head is" if all_of_them < 2 else f"{count} heads are", "" if order is None else f" {order.way}."
    words = {
        "checkpoint": checkpoint_before(before_step),
        "given": f"{given} switched",
        "ended": f"{given} switched.{way}" if switched else "No head was switched.",
        "so_far": f" So far {switched} of {all_of_them} are switched." if 0 < switched < all_of_them else "",
        "whose": WHOSE.get(known.scope or "head", "every head"),
        "mitigation": known.mitigation,
        "stronger": stronger(known.mitigation) or "",
        "mode": "" if order is None else order.mode,
        "by": "" if order is None else order.way,
        "way": way,
    }
    return Text(text.done.format(**words), text.to_do.format(**words), text.ask)


def _state(cause: IncidentCause, heads: Sequence[IncidentHead], known: RunContext, order: Order | None) -> str:
    """Return the key of the text in `CauseInfo.texts`; an existing order takes precedence over the policy."""
    progress = progress_of(heads) if curable(cause) else "unswitched"
    slows = all(head.severity == "info" for head in heads)
    severe = any(head.severity == "critical" for head in heads)
    act, undecided = act_on(cause, known.policy), order is None or order.state in UNDONE
    if cause == "not finite" and any(head.severity == "critical" and head.raised_step <= 1 for head in heads):
        return "first step"
    if known.ended and progress != "arrested":
        return "ended, not arrested" if progress == "not arrested" else "ended"
    if cause == "score growth":
        return "slows" if slows else known.clip or ""
    if cause == "attention kernel":
        ours = {ref for ref, mode in known.modes.items() if mode != "plain"}
        return "moved" if all(head.ref in ours for head in heads) else ""
    if not curable(cause):
        return "" if severe else "warning"
    if any(head.signal == "nonfinite" for head in heads):
        return f"not finite, {act}"
    if progress == "not arrested" and order is not None and order.state == "proposed":
        return "not arrested, proposed"
    if progress == "not arrested" and stronger(known.mitigation):
        return "not arrested, stronger"
    if progress != "unswitched":
        return progress
    if undecided and all(falls(head.evidence) for head in heads):
        return "over"
    if undecided and slows and act != "switch":
        return "slows"
    if order is not None:
        return order.state
    return "no proposal" if act == "propose" and known.orders is not None else act


def switched_of(heads: Sequence[IncidentHead]) -> int:
    return sum(head.state not in ("quiet", "unswitched") for head in heads)


def falls(evidence: Mapping[str, float]) -> bool:
    """Whether a head's offset and largest score, as far as known, are smaller than at the start of the window."""
    both = [(evidence.get(key), evidence.get(f"{key}_before")) for key in ("offset", "score")]
    known = [(abs(now), abs(before)) for now, before in both if now is not None and before is not None]
    return bool(known) and all(now < before for now, before in known)


def _order(
    episode: Sequence[Warned], standing: Sequence[IncidentHead], known: RunContext, cause: IncidentCause
) -> Order | None:
    """Return the newest order that shows the state of the incident's heads.

    If some heads are not switched, it is the newest order for any of them; a rejection or an undone switch counts only
    if it applies to all of them. If all are switched, it is the newest order that switched them, or a proposal of a
    stronger mode. A waiting proposal takes precedence over newer orders, because people can answer it.
    """
    bare = {head.ref for head in standing if head.state == "unswitched"}
    own, progress = bare or {head.ref for head in standing}, progress_of(standing)
    rejected = {one.ref for one in episode if one.rejected and is_active(one.verdict) and one.cause == cause}
    for order in sorted(known.orders or (), key=lambda each: each.state != "proposed"):
        counts = cures = _cures(order.mode)
        if progress != "unswitched":
            counts = cures and order.state in ("applied", "proposed")
        elif order.state == "rejected":
            counts = own <= rejected
        elif order.state == "applied":
            counts = not cures and own <= set(known.held)
        if counts and order.names(own):
            return order
    return None


def _cures(mode: str) -> bool:
    """Whether growth by rounding ends under a mode; False for a mode of another version."""
    return is_mode(mode) and bool(parse_mode(mode) & ROUNDING_ENDS)


def progress_of(standing: Sequence[IncidentHead]) -> Progress:
    states = {head.state for head in standing}
    if "not arrested" in states:
        return "not arrested"
    if not states or "unswitched" in states:
        return "unswitched"
    return "arrested" if states == {"arrested"} else "switched"


def incidents(warned: Iterable[Warned], known: RunContext) -> list[Incident]:
    """Return every incident of a run, the most urgent first. The order of `warned` does not matter.

    Warnings of severity info are notes, and do not open an incident.
    """
    together: dict[frozenset[IncidentCause], list[Warned]] = {}
    for one in warned:
        if one.verdict.severity != "info":
            together.setdefault(mates(one.cause), []).append(one)
    found: list[Incident] = []
    for all_of_it in together.values():
        at = max(known.last_step, *(one.verdict.step for one in all_of_it))
        by_cause: dict[IncidentCause, list[list[Warned]]] = {}
        for episode in _episodes(all_of_it):
            by_cause.setdefault(_causes(episode)[0], []).append(episode)
        found += [_incident(episodes, known, at) for episodes in by_cause.values()]
    return sorted(found, key=urgency)


def urgency(incident: Incident) -> tuple[bool, int, float, int]:
    """Sort key, the most urgent first: open before closed, then by severity, then by steps left."""
    left = math.inf if incident.steps_left is None else incident.steps_left
    closed = incident.state in ("closed", "arrested")
    return closed, -SEVERITIES.index(incident.severity), left, list(CAUSES).index(incident.cause)


def _causes(warned: Iterable[Warned]) -> list[IncidentCause]:
    return sorted({one.cause for one in warned}, key=list(CAUSES).index)


def _episodes(warned: Sequence[Warned]) -> list[list[Warned]]:
    """Split warnings into episodes: those that overlap in time; a warning after all were cleared starts a new one."""
    found: list[list[Warned]] = []
    until = -math.inf
    for one in sorted(warned, key=lambda one: (one.raised_step, one.rank, one.verdict.id)):
        if one.raised_step > until:
            found.append([])
        found[-1].append(one)
        until = max(until, math.inf if one.active else one.verdict.step)
    return found


def _incident(episodes: Sequence[Sequence[Warned]], known: RunContext, last_step: int) -> Incident:
    episode = episodes[-1]
    causes = _causes(episode)
    cause = causes[0]
    by_head: dict[AnyRef, list[Warned]] = {}
    for one in episode:
        by_head.setdefault(one.ref, []).append(one)
    heads = [_head(own, known, last_step) for own in by_head.values()]
    heads.sort(key=_soonest)
    standing = [head for head in heads if head.state != "quiet"]
    loose = [head for head in standing if not head.cured]
    started = min(
        (one for one in episode if one.cause == cause),
        key=lambda one: (one.joined_step, one.verdict.corrected_from is not None),
    )
    opened, was = min(one.raised_step for one in episode), started.verdict.corrected_from
    mine = [a for a in known.acknowledged if a.cause in (*causes, was) and a.step >= opened]
    seen = max(mine, key=lambda a: (a.step, a.unix_seconds, a.who, a.reason, a.cause), default=None)
    first = heads[0]
    severity = max((head.severity for head in loose or heads), key=SEVERITIES.index)
    if not loose and standing:
        severity = "info"
    suspect = [head.evidence["suspect_step"] for head in standing if "suspect_step" in head.evidence]
    before = min([opened, *map(int, filter(math.isfinite, suspect))])
    what, order = _decide(episode, standing, known, before)
    acts = [act_on(one, known.policy) for one in causes if any(one in head.causes for head in standing)]
    driven = [head for head in standing if head.curable]
    progress = progress_of(driven)
    if progress == "arrested" and loose:
        progress = "unswitched"  # because growth that a switch does not affect continues
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
        before_step=before,
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
        heads=heads,
        acknowledged=seen,
        act=next(iter(acts), "none"),
        sentence=_sentence(causes, heads, standing, opened, was, started.joined_step),
        done=what.done,
        to_do=what.to_do,
        ask=what.ask,
        order=order,
    )


def _head(own: Sequence[Warned], known: RunContext, last_step: int) -> IncidentHead:
    """Combine the warnings of all ranks about one head; the values are those of the rank with the earliest harm."""
    standing = [one for one in own if one.active]
    verdict = min(standing or own, key=_speaks_first).verdict
    raised = min(one.raised_step for one in own)
    harm, low = (_step_of(verdict, steps) for steps in (verdict.forecast_steps, verdict.forecast_low_steps))
    state: HeadState = "quiet"
    if standing:
        state = "unswitched"
        driven = [one.raised_step for one in standing if curable(one.cause)]
        if driven and verdict.layer is not None and verdict.head is not None:
            state = _cure((verdict.layer, verdict.head), max(driven), known)
    what_all_say: dict[str, Any] = {
        "causes": _causes(standing or own),
        "state": state,
        "severity": _severity(standing or own),
        "raised_step": raised,
        "step": max(one.verdict.step for one in own),
        "steps_left": None if harm is None else float(max(0, harm - last_step)),
        "harm_step": harm,
        "harm_first_step": low,
    }
    return IncidentHead.model_validate(dict(verdict) | what_all_say)


def _severity(own: Sequence[Warned]) -> Severity:
    """Return the highest severity that any rank reports of a head. If its values fall, it is at most a warning; if its
    growth slows down so that the score will stay below 512, it is a note, which causes no alert."""
    worst = max((one.verdict.severity for one in own), key=SEVERITIES.index)
    if any(one.verdict.signal == "nonfinite" for one in own):
        return worst
    if all(one.verdict.harm_in_sight is False for one in own):
        return "info"
    fall = all(falls(one.verdict.evidence) for one in own)
    return "warning" if fall and worst == "critical" else worst


def _cure(ref: HeadRef, raised_step: int, known: RunContext) -> Progress:
    """Return the state of a head's mitigation. An arrested head stays arrested until a later warning is raised."""
    if not _cures(known.modes.get(ref, "plain")):
        return "unswitched"
    spoken = [one for one in known.judged if (one.heads is None or ref in one.heads) and one.step >= raised_step]
    if not spoken:
        return "switched"
    newest = max(one.step for one in spoken)  # of several results at one step the worst counts
    return "arrested" if all(one.arrested for one in spoken if one.step == newest) else "not arrested"


def _step_of(verdict: Verdict, steps: float | None) -> int | None:
    if steps is None or not math.isfinite(steps) or abs(steps) > 1e12:
        return None
    return verdict.step + round(max(0.0, steps))


def _speaks_first(one: Warned) -> tuple[float, int, int, int, str]:
    harm = _step_of(one.verdict, one.verdict.forecast_steps)
    severity = SEVERITIES.index(one.verdict.severity)
    return math.inf if harm is None else harm, -severity, -one.verdict.step, one.rank, one.verdict.id


def _soonest(head: IncidentHead) -> tuple[bool, bool, bool, float, int, int, int, int]:
    """Sort key: non-finite heads, which are harmed already, first; then by step of harm; arrested and quiet last."""
    return (
        head.state == "quiet",
        head.cured,
        head.signal != "nonfinite",
        math.inf if head.harm_step is None else head.harm_step,
        -SEVERITIES.index(head.severity),
        head.raised_step,
        -1 if head.layer is None else head.layer,
        -1 if head.head is None else head.head,
    )
