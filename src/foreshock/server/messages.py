"""What people are sent by the service itself, in words.

A message is short enough to be read on a telephone at night: severity and run first, then what, what was done, what to
do, and where to look. However many heads fail and however many runs, it has fewer than LONGEST characters.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from foreshock.contract.causes import CAUSES
from foreshock.contract.decision import STEPS_BEFORE
from foreshock.contract.incident import Incident, urgency
from foreshock.contract.incident_form import counted, in_words

LONGEST: Final = 1500
_IN_FULL: Final = 2
_RUNS_ALONE: Final = 3
_NAMES: Final = 6
_SENTENCES: Final = 4
_LETTERS: Final = 80
_ORDERED: Final = re.compile(r"\b[Ss]witch (?:every head|on) to (\w+)")
"""How contract.decision asks people for a switch, and to which mode."""
_WORDS: Final = {"critical": "Critical", "warning": "Warning", "info": "Note"}


def messages_of(
    changed: Mapping[str, Sequence[Incident]],
    other: Mapping[str, Sequence[str]],
    page: str,
    ended: Collection[str] = (),
) -> list[tuple[str, str]]:
    """(run, message) for what changed at one time; of more than a few runs one message for all, whose run is empty.

    changed: incidents that opened, turned worse or changed their state, by run; other: further sentences of the run;
    ended: the runs among them that have ended.
    """
    named = sorted(changed.keys() | other.keys())
    if len(named) <= _RUNS_ALONE:
        return [(run, of_run(run, changed.get(run, ()), other.get(run, ()), page, ended=run in ended)) for run in named]
    return [("", of_many(changed, other, page))]


def of_run(run: str, changed: Sequence[Incident], other: Sequence[str], page: str, *, ended: bool = False) -> str:
    """The incidents of one run that changed, the most urgent in full, and what else people should know of the run."""
    lines = []
    ranked = sorted(changed, key=urgency)
    for incident in ranked[:_IN_FULL]:
        lines.append(f"{_head(incident)}: Run {run}: {incident.sentence}")
        if incident.state != "closed":
            to_do = incident.to_do if ended else to_do_of(run, incident)
            lines += ["The run has ended."] * ended + [f"Done: {incident.done}", f"To do: {to_do}"]
    if len(ranked) > _IN_FULL:
        more = ", ".join(f"{' and '.join(one.causes)} ({_head(one).lower()})" for one in ranked[_IN_FULL:])
        lines.append(f"In the same run: {more}.")
    sentences = list(dict.fromkeys(other))
    lines += [f"Run {run}: {sentence}" for sentence in sentences[:_SENTENCES]]
    if len(sentences) > _SENTENCES:
        lines.append(f"... and {len(sentences) - _SENTENCES} more switches; the page lists them.")
    return fitted(lines, [f"Evidence and switch: {_place(run, ranked, page)}"] if page else [])


def of_many(changed: Mapping[str, Sequence[Incident]], other: Mapping[str, Sequence[str]], page: str) -> str:
    """What changed in many runs at once, one line for each of the most urgent."""
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
    """What is left to people, and the command that does it: an approval or a switch."""
    if incident.ask == "approve":
        return f'{incident.to_do} Type: foreshock approve {shlex.quote(run)} --reason "{incident.cause}"'
    named = _ORDERED.search(incident.to_do)
    if named is None:
        return incident.to_do
    order = f'foreshock switch {shlex.quote(run)} --mode {named[1]} --reason "{incident.cause}"'
    return f"{incident.to_do} Type: {order}"


def words_of(run: str, incident: Incident) -> tuple[str, str, str, str]:
    """What an alert says of an incident: its heads, the incident, what was done, what to do."""
    standing = [head for head in incident.heads if head.state != "quiet"]
    return in_words(standing or incident.heads), incident.sentence, incident.done, to_do_of(run, incident)


def silent(runs: Sequence[str], minutes: float, page: str) -> str:
    """Runs that nothing is heard of any more, together."""
    one = len(runs) == 1
    names = ", ".join(shortened(run) for run in sorted(runs)[:_NAMES])
    more = f" and {len(runs) - _NAMES} more" if len(runs) > _NAMES else ""
    what = "Run" if one else f"{len(runs)} runs"
    lines = [
        f"Warning: {what} {names if one else ''}{' has' if one else 'have'} sent nothing for {minutes:.0f} minutes"
        + ("." if one else f": {names}{more}."),
        "Done: Nothing.",
        "To do: Look whether the training lives; if it does, run `foreshock doctor` on its machine."
        if one
        else "To do: Look first at what they share: the cluster, its network, this service's address.",
    ]
    link = f"Last steps: {_place(runs[0], (), page)}" if one else f"All runs: {page.rstrip('/')}/"
    return fitted(lines, [link] if page else [])


def fitted(lines: Sequence[str], last: Sequence[str]) -> str:
    """The lines, cut where together they are too long; `last` is kept whole."""
    end = "\n".join(last)
    room = LONGEST - len(end) - 2
    body = "\n".join(lines)
    if len(body) > room:
        body = body[: max(0, room - 1)].rstrip() + "…"
    return f"{body}\n{end}" if end else body


def shortened(name: str) -> str:
    """A long name without its middle: what tells runs apart stands at either end."""
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS // 2]}…{name[-_LETTERS // 2 + 1 :]}"


def _place(run: str, ranked: Sequence[Incident], page: str) -> str:
    """The address that shows the first incident: its head, the metric of its cause, the steps from before it on."""
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
    return f"{' and '.join(incident.causes)}, {counted(incident.heads)} since step {incident.opened_step:,}"
