"""The catalogue's entries on incidents, and the one alert about failing heads: an incident, never a head alone.

What the alert says was done, and what is left to do, is written from contract.decision for every cause, state and act,
so that Alertmanager's messages and the service's own say the same.
"""

from collections.abc import Callable
from typing import Final, get_args

from foreshock.contract.decision import CAUSES, UNTOLD_SCOPE, Act, Decision, IncidentCause, Progress, curable, decision
from foreshock.contract.metric import Alert, Levels, Metric
from foreshock.contract.wire import Policy

_POLICY_OF: Final[dict[Act, Policy]] = {"none": "observe", "propose": "approve", "switch": "auto"}
_CURED: Final[tuple[Progress, ...]] = ("switched", "arrested", "not arrested")


def _said(part: Callable[[Decision], str]) -> str:
    """A template that says a part of the decision, by the labels cause, state and act."""

    def text(cause: IncidentCause, act: Act, progress: Progress) -> str:
        mitigation = "the run's mitigation"
        return part(decision(cause, _POLICY_OF[act], mitigation=mitigation, scope=UNTOLD_SCOPE, progress=progress))

    parts: list[tuple[str, str]] = []
    for cause in CAUSES:
        mine = f'eq $labels.cause "{cause}"'
        if curable(cause):
            parts += [(f'and ({mine}) (eq $labels.state "{p}")', text(cause, "none", p)) for p in _CURED]
            parts += [(f'and ({mine}) (eq $labels.act "{a}")', text(cause, a, "unswitched")) for a in get_args(Act)]
        else:
            parts.append((mine, text(cause, "none", "unswitched")))
    chain = "{{ else ".join(f"if {condition} }}}}{words}" for condition, words in parts)
    return "{{ " + chain + "{{ end }}"


INCIDENT_METRICS: Final = (
    Metric(
        key="incident.active",
        title="Incidents",
        help="1 for every incident that is not closed: all warnings of a run of one cause. act: what machines do about "
        "it under the run's policy.",
        bad="Any of severity warning or critical.",
        board="overview",
        labels=("run", "cause", "state", "severity", "act"),
        levels=Levels(alarm=1.0),
        alerts=(
            Alert(
                name="ForeshockHeadFailing",
                expr='{m}{severity=~"warning|critical"} == 1',
                for_="0s",
                severity="warning",
                summary="Run {{ $labels.run }} "
                '{{ if eq $labels.cause "not finite" }}computes numbers that are not finite'
                "{{ else }}is on its way to a loss explosion{{ end }} ({{ $labels.cause }}"
                '{{ with printf "foreshock_incident_heads'
                '{run=%q,cause=%q} > 0" $labels.run $labels.cause | query }}'
                ", heads: {{ . | first | value | humanize }}{{ else }}{{ end }}"
                '{{ with printf "foreshock_incident_heads{run=%q,cause=%q} == 0" $labels.run $labels.cause | query }}'
                ", the whole run{{ else }}{{ end }}"
                '{{ if ne $labels.state "open" }}, {{ $labels.state }}{{ end }}'
                '{{ with printf "foreshock_incident_corrected_step'
                '{run=%q,cause=%q}" $labels.run $labels.cause | query }}'
                ', told as {{ . | first | label "was" }} before{{ else }}{{ end }})',
                description="All warnings of this cause are one incident; the page ranks its heads by how soon they "
                'come to harm.{{ with printf "foreshock_incident_forecast_steps'
                '{run=%q,cause=%q}" $labels.run $labels.cause | query }}'
                " The first head's largest |score| {{ if gt (. | first | value) 0.0 }}reaches 512 in about "
                "{{ . | first | value | humanize }} steps{{ else }}is past 512{{ end }}."
                "{{ else }}{{ end }}",
                action="Look at the incident's first head on the run's page, and do what the page says. If the cause "
                "is rounding, switch every head. Otherwise lower the learning rate, look at the data, or resume from "
                "an earlier checkpoint.",
                done=_said(lambda made: made.done),
                to_do=_said(lambda made: made.to_do),
            ),
        ),
    ),
    Metric(
        key="incident.heads",
        title="Heads in incidents",
        help="Heads that an incident warns about now; 0 where it concerns the whole run alone.",
        bad="Many at once: look at the learning rate and the data first.",
        board="overview",
        labels=("run", "cause"),
    ),
    Metric(
        key="incident.opened_step",
        title="Incidents opened at step",
        help="The step at which an incident opened: links of alerts lead to the steps from shortly before it on.",
        bad="Long ago: nobody has acted on it.",
        board="overview",
        labels=("run", "cause"),
    ),
    Metric(
        key="incident.corrected_step",
        title="Incidents corrected at step",
        help="The step at which the cause of an incident was corrected; was: the cause that it was told under before. "
        "None where it was not.",
        bad="Shortly ago: look again at what to do, which goes by the cause.",
        board="overview",
        labels=("run", "cause", "was"),
    ),
    Metric(
        key="incident.forecast",
        title="Steps left",
        help="Forecast: steps until the largest |score| of an incident's first head reaches 512.",
        bad="Fewer steps than you need to react.",
        board="overview",
        unit="steps",
        labels=("run", "cause"),
        levels=Levels(alarm=1000.0, below=True),
        scale="log",
    ),
    Metric(
        key="incident.acknowledged",
        title="Incidents acknowledged",
        help="1 where somebody has acknowledged the incident, else 0.",
        bad="0 for longer than it takes to wake somebody.",
        board="overview",
        labels=("run", "cause"),
    ),
)
