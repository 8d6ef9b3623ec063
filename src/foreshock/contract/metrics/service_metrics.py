"""The catalogue's metrics of incidents and of the service itself.

One alert covers failing heads, and fires per incident, not per head. `incident.words` has the service's text in its
labels, and the alert rule looks it up, so that Alertmanager's messages and those of the service are the same, with the
run's heads, mode and numbers.
"""

from typing import Final

from foreshock.contract.causes import CAUSES
from foreshock.contract.metrics.metric import Alert, Levels, Metric, ServiceMetric

SERVICE_METRICS: Final = (
    ServiceMetric(
        key="service.batches",
        title="Batches received",
        help="Batches received, by result: stored, duplicate, refused as malformed, busy (429: sent again later).",
        bad="Refused ones; busy ones that last.",
        kind="counter",
        labels=("result",),
        alerts=(
            Alert(
                name="ForeshockBatchesRefused",
                expr='increase({m}{result="refused"}[10m]) > 0 or ({m}{result="refused"} > 0 unless {m} offset 10m)',
                severity="warning",
                summary="The service refuses batches",
                description="{{ $value | humanize }} batches were refused in ten minutes.",
                action="Agent and service disagree on the wire format: look for refused batches in the training logs.",
            ),
        ),
    ),
    ServiceMetric(
        key="service.refusals",
        title="Refused tokens",
        help="Requests refused for their token: login (a wrong token), throttled login (too many attempts), token (a "
        "wrong token of an agent or a client).",
        bad="Rises: somebody guesses, or an agent has a withdrawn token; the log has the addresses.",
        kind="counter",
        labels=("what",),
    ),
    ServiceMetric(
        key="service.commit",
        title="Commit time",
        help="Time to store the last batch.",
        bad="Above 250 ms.",
        unit="seconds",
    ),
    ServiceMetric(
        key="service.commands_pending",
        title="Commands pending",
        help="Commands that no agent has answered yet.",
        bad="Stays above zero while the run is active.",
        labels=("run",),
        alerts=(
            Alert(
                name="ForeshockCommandUnanswered",
                expr="{m} > 0",
                for_="5m",
                severity="warning",
                summary="Run {{ $labels.run }}: a switch was ordered and no agent has answered",
                description="Commands that have waited for five minutes on a run that has not ended: {{ $value }}.",
                action="Check whether the run still sends samples; if it does, read the run's audit trail on its page.",
            ),
        ),
    ),
    ServiceMetric(
        key="service.webhooks",
        title="Webhooks received",
        help="Webhook deliveries by sender and result.",
        bad="Refused ones.",
        kind="counter",
        labels=("sender", "result"),
    ),
    ServiceMetric(
        key="service.watchdog",
        title="Watchdog last seen",
        help="When Alertmanager last delivered the watchdog alert (Unix time); proves the alert path.",
        bad="Minutes ago.",
        unit="timestamp_seconds",
        levels=Levels(alarm=300.0),
        alerts=(
            Alert(
                name="ForeshockAlertPathBroken",
                expr="time() - ({m} > 0) > 300",
                for_="1m",
                severity="warning",
                summary="Alerts no longer reach the service",
                description="The last watchdog arrived {{ $value | humanizeDuration }} ago; alerts switch nothing.",
                action="Check Alertmanager, its webhook's address and its token.",
            ),
        ),
    ),
    ServiceMetric(
        key="service.series_dropped",
        title="Series dropped",
        help="Time series left out of /metrics by the series budget, at the last scrape.",
        bad="Above zero: raise the budget or end old runs.",
        levels=Levels(alarm=1.0),
        alerts=(
            Alert(
                name="ForeshockSeriesDropped",
                expr="{m} > 0",
                for_="10m",
                severity="info",
                summary="The series budget leaves heads out of Prometheus",
                description="{{ $value }} series were left out of the last scrape. The service's own page shows all.",
                action="Raise the service's series budget or end old runs.",
            ),
        ),
    ),
    ServiceMetric(
        key="service.unreadable_rows",
        title="Unreadable rows",
        help="Unreadable stored rows that were skipped since the service began, at most 10,000.",
        bad="Above zero; the log has the reasons.",
    ),
    ServiceMetric(
        key="service.log_lines_dropped",
        title="Log lines left out",
        help="Repeated log lines that were omitted since the service began.",
        bad="Grows: somebody sends malformed HTTP.",
        kind="counter",
    ),
    ServiceMetric(
        key="service.store",
        title="Store size",
        help="Size of the store.",
        bad="Grows without retention.",
        unit="bytes",
    ),
)


def _in_words(label: str, otherwise: str) -> str:
    """Return a template that looks up one text of the incident; `otherwise` is used if its series was dropped."""
    asked = 'printf "foreshock_incident_words{run=%q,cause=%q}" $labels.run $labels.cause | query'
    return f'{{{{ with {asked} }}}}{{{{ . | first | label "{label}" }}}}{{{{ else }}}}{otherwise}{{{{ end }}}}'


INCIDENT_METRICS: Final = (
    Metric(
        key="incident.active",
        title="Incidents",
        help="1 for every incident that is not closed. act: what the run's policy does about it.",
        bad="Any of severity warning or critical.",
        labels=("run", "cause", "state", "severity", "act"),
        levels=Levels(alarm=1.0),
        alerts=(
            Alert(
                name="ForeshockHeadFailing",
                # without state and act, so that a change of state does not end one alert and start another
                expr='max without (state, act) ({m}{severity=~"warning|critical"}) == 1',
                severity="warning",
                summary="Run {{ $labels.run }}: attention becomes unstable in "
                + _in_words("heads", "some heads")
                + " ({{ $labels.cause }})",
                description=_in_words("sentence", "The page shows the incident."),
                action=" ".join(
                    [
                        "Look at the incident's first head on the run's page, and follow the page's instructions.",
                        *(info.advice for info in CAUSES.values() if info.advice),
                        "Otherwise look at the data, or resume from an earlier checkpoint.",
                    ]
                ),
                done=_in_words("done", "The page shows what was done."),
                to_do=_in_words("to_do", "Open the run's page and follow its instructions."),
            ),
        ),
    ),
    Metric(
        key="incident.words",
        title="Incidents in words",
        help="1 for every incident that is not closed, with the texts of its alert as labels.",
        bad="Any.",
        labels=("run", "cause", "heads", "sentence", "done", "to_do"),
    ),
    Metric(
        key="incident.heads",
        title="Heads in incidents",
        help="Heads that an incident warns about now; 0 if it concerns only the whole run.",
        bad="Many at once: look at the learning rate and the data first.",
        labels=("run", "cause"),
    ),
    Metric(
        key="incident.opened_step",
        title="Incidents opened at step",
        help="The step at which an incident opened.",
        bad="Long ago: nobody has acted on it.",
        labels=("run", "cause"),
    ),
    Metric(
        key="incident.corrected_step",
        title="Incidents corrected at step",
        help="The step at which the cause of an incident was corrected; was: the cause before that.",
        bad="Shortly ago: what to do depends on the cause.",
        labels=("run", "cause", "was"),
    ),
    Metric(
        key="incident.forecast",
        title="Steps left",
        help="Forecast: steps until the largest |score| of an incident's first head reaches 512.",
        bad="Fewer steps than you need to react.",
        unit="steps",
        labels=("run", "cause"),
        levels=Levels(alarm=1000.0, below=True),
        scale="log",
    ),
    Metric(
        key="incident.acknowledged",
        title="Incidents acknowledged",
        help="1 if somebody has acknowledged the incident, else 0.",
        bad="0 for several minutes.",
        labels=("run", "cause"),
    ),
)
