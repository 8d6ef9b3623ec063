"""The catalogue's entries on the service itself: what it takes in, stores and sends."""

from typing import Final

from foreshock.contract.metric import (
    Alert,
    Levels,
    Metric,
)

SERVICE_METRICS: Final = (
    Metric(
        key="service.batches",
        title="Batches received",
        help="Batches received, by result: stored, duplicate, refused as malformed, busy (429: sent again later), "
        "quota (429: its token has no more to spend).",
        bad="Refused ones; busy ones that last.",
        board="service",
        kind="counter",
        labels=("result",),
        alerts=(
            Alert(
                name="ForeshockBatchesRefused",
                expr='increase({m}{result="refused"}[10m]) > 0 or ({m}{result="refused"} > 0 unless {m} offset 10m)',
                for_="0s",
                severity="warning",
                summary="The service refuses batches",
                description="{{ $value | humanize }} batches were refused in ten minutes.",
                action="Agent and service disagree on the wire format: look for refused batches in the training logs.",
            ),
        ),
    ),
    Metric(
        key="service.commit",
        title="Commit time",
        help="Time to store the last batch.",
        bad="Above 250 ms.",
        board="service",
        unit="seconds",
        labels=(),
    ),
    Metric(
        key="service.commands_pending",
        title="Commands pending",
        help="Commands that no agent has answered yet.",
        bad="Stays above zero while the run is active.",
        board="service",
        labels=("run",),
        alerts=(
            Alert(
                name="ForeshockCommandUnanswered",
                expr="{m} > 0 and on (run) foreshock_run_active == 1",
                for_="5m",
                severity="warning",
                summary="Run {{ $labels.run }}: a switch was ordered and no agent has answered",
                description="Commands that have waited for five minutes on a run that is active: {{ $value }}.",
                action="Look whether the run still sends samples; if it does, read the run's audit trail on its page.",
            ),
        ),
    ),
    Metric(
        key="service.webhooks",
        title="Webhooks received",
        help="Webhook deliveries by sender and result.",
        bad="Refused ones.",
        board="service",
        kind="counter",
        labels=("sender", "result"),
    ),
    Metric(
        key="service.watchdog",
        title="Watchdog last seen",
        help="When Alertmanager last delivered the watchdog alert (Unix time); proves the alert path.",
        bad="Minutes ago.",
        board="service",
        unit="timestamp_seconds",
        labels=(),
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
    Metric(
        key="service.series_dropped",
        title="Series dropped",
        help="Time series left out of /metrics by the series budget, at the last scrape.",
        bad="Above zero: raise the budget or end old runs.",
        board="service",
        labels=(),
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
    Metric(
        key="service.unreadable_rows",
        title="Unreadable rows",
        help="Stored rows that could not be read and were passed over since the service began, at most 10,000.",
        bad="Above zero: the log names each row once, and what is wrong with it.",
        board="service",
        labels=(),
    ),
    Metric(
        key="service.store",
        title="Store size",
        help="Size of the store.",
        bad="Grows without retention.",
        board="service",
        unit="bytes",
        labels=(),
    ),
)
