"""Every metric, once. The Prometheus name, the panel, the rule, the documentation row and the page derive from here.

Per-head metrics are read from a merged sample by `HeadReading`. Prometheus gets, under a series budget, the worst heads
of each run (`foreshock_head_*`) and one value per layer (`foreshock_layer_*`, the value of its worst head); every head
of every sample goes to the service's own store (docs/design.md, decision 9).
"""

from typing import Final

from foreshock.contract.incident_metrics import INCIDENT_METRICS
from foreshock.contract.metric import (
    Alert,
    HeadReading,
    Levels,
    Metric,
    root_mean_square,
    share,
    share_of_looked_at,
    standardised,
    value,
)
from foreshock.contract.modes import MODES
from foreshock.contract.slots import Floats, ReadOnce, Slot, Words

SILENT_SECONDS: Final = 300.0
"""A run that claims to be active and was not heard of for longer has fallen silent."""
HUNG_SECONDS: Final = 300.0
HUNG_STEPS: Final = 20
"""An active run that is heard of, and ended no step for so many of its own step times and seconds, hangs."""
FIRST_STEP_SECONDS: Final = 1800.0
"""What a run that has shown no step time yet may take: compilation and the first batches are slow."""
JUMP_RATIO, JUMP_NATS = 1.5, 0.5
"""By how much the loss has jumped when it is told: both, so that neither a small loss nor a noisy one does."""
_LOWEST_LOSS: Final = "min_over_time(avg_over_time({m}[2m])[6h:2m])"
HEAD_LABELS: Final = ("run", "layer", "head")

HEAD_METRICS: Final = (
    Metric(
        key="head.score_offset",
        title="Score offset",
        help="Mean of lse - log n over a head's rows (nats): how far its scores have drifted as a whole.",
        bad="One head's offset leaves its peers and keeps growing; softmax cannot see it, rounding can.",
        board="run",
        labels=HEAD_LABELS,
        head=share(Slot.SCORE_OFFSET_SUM),
        signed=True,
        scale="symlog",
        chart=1,
    ),
    Metric(
        key="head.score_offset_rms",
        title="Score offset, root mean square",
        help="Root mean square of lse - log n over a head's rows (nats); also sees offsets of both signs.",
        bad="Keeps doubling in one head.",
        board="run",
        labels=HEAD_LABELS,
        head=root_mean_square(Slot.SCORE_OFFSET_SUMSQ),
        scale="symlog",
        levels=Levels(watch=3.0, alarm=10.0),
    ),
    Metric(
        key="head.score_max",
        title="Largest score",
        help="Largest scaled attention score of a head since the last sample.",
        bad="Grows by a constant factor every thousand steps; at 512, rounding q and k to bf16 moves it by about 1.",
        board="run",
        labels=HEAD_LABELS,
        head=value(Slot.SCORE_MAX),
        scale="symlog",
        levels=Levels(watch=100.0, alarm=512.0),
        chart=2,
    ),
    Metric(
        key="head.row_max_abs",
        title="Largest |row maximum|",
        help="Largest absolute value of a row's maximum score; grows whichever way the scores drift.",
        bad="Grows by a constant factor every thousand steps.",
        board="heads",
        labels=HEAD_LABELS,
        head=value(Slot.ROW_MAX_ABS),
        scale="symlog",
    ),
    Metric(
        key="head.tied_rows_bf16",
        title="Rows with several maxima (bf16 scores)",
        help="Share of rows whose bf16-rounded scores have several maxima (paper, section 3.3.2).",
        bad="Rises from percents to most rows; it may fall again while the failure goes on.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=share_of_looked_at(Slot.TIED_ROWS_BF16),
        percent=True,
        chart=5,
    ),
    Metric(
        key="head.tied_rows_one",
        title="Rows with several P = 1",
        help="Share of rows with several entries exp(S - max) that round to 1 in the operand's dtype.",
        bad="Rises from well under a percent to a large share.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=share_of_looked_at(Slot.TIED_ROWS_ONE),
        percent=True,
    ),
    Metric(
        key="head.delta_bias",
        title="Delta bias",
        help="Sum of delta_lp - delta_hp over the sum of its absolute values, in [-1, 1] (paper, section 3.3.1).",
        bad="Stays on one side of zero in one head, sample after sample.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=share(Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS),
        percent=True,
        signed=True,
        chart=6,
    ),
    Metric(
        key="head.delta_bias_z",
        title="Delta bias, standardised",
        help="Sum of delta_lp - delta_hp over the root of its sum of squares.",
        bad="Beyond 4 with the same sign again and again.",
        board="heads",
        labels=HEAD_LABELS,
        head=standardised(Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_SUMSQ),
        signed=True,
        scale="symlog",
    ),
    Metric(
        key="head.shifted_rows",
        title="Shifted rows",
        help="Share of rows that a stabilised mode shifted.",
        bad="Zero while a stabilised mode is on: the rule touches nothing.",
        board="heads",
        unit="ratio",
        labels=HEAD_LABELS,
        head=share_of_looked_at(Slot.SHIFTED_ROWS),
        percent=True,
    ),
    Metric(
        key="head.nonfinite_rows",
        title="Non-finite rows",
        help="Rows with a NaN or infinite score, output or delta since the last sample.",
        bad="Anything above zero.",
        board="heads",
        labels=HEAD_LABELS,
        head=value(Slot.NONFINITE_ROWS),
        alerts=(
            Alert(
                name="ForeshockNonFiniteRows",
                expr="foreshock_layer_nonfinite_rows > 0",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: layer {{ $labels.layer }} computes NaN or infinite attention rows",
                description="{{ $value }} rows of its worst head were not finite in the last sample.",
                action="Stop or roll back the run: every weight is at risk. Look at the head's largest score.",
            ),
        ),
    ),
    Metric(
        key="head.query_norm",
        title="Spectral norm of W_Q",
        help="Largest singular value of a head's query projection.",
        bad="Keeps growing in a few heads after the others have settled; late, and it grows in healthy runs too.",
        board="run",
        labels=HEAD_LABELS,
        head=HeadReading(field="query_norm", now_and_then=True),
        chart=7,
    ),
    Metric(
        key="head.key_norm",
        title="Spectral norm of W_K",
        help="Largest singular value of a head's key projection.",
        bad="Keeps growing in a few heads after the others have settled.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(field="key_norm", now_and_then=True),
    ),
    Metric(
        key="head.query_key_norm",
        title="Spectral norm of W_Q W_K^T",
        help="Largest singular value of a head's score form W_Q W_K^T.",
        bad="Keeps growing in a few heads after the others have settled.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(field="query_key_norm", now_and_then=True),
    ),
    Metric(
        key="head.risk",
        title="Risk",
        help="How near a warning a head is, from 0 to 1, as the agent's detectors see it.",
        bad="Near 1; at 1 the head is warned about.",
        board="overview",
        unit="ratio",
        labels=HEAD_LABELS,
        head=HeadReading(field="risk"),
        levels=Levels(watch=0.5, alarm=1.0),
        chart=8,
    ),
    Metric(
        key="head.mode",
        title="Mode",
        help="Mode flags of a head: 0 plain, "
        + ", ".join(f"{mode.flag:d} {mode.name}" for mode in MODES)
        + ", added together.",
        bad="Not the mode you asked for.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(field="modes"),
        across_ranks="min",
        chart=None,
    ),
)

RUN_METRICS: Final = (
    Metric(
        key="run.active",
        title="Active",
        help="1 while a run sends samples and has not finished.",
        bad="1 on a run that no longer steps.",
        board="overview",
    ),
    Metric(
        key="run.step",
        title="Step",
        help="Last optimizer step that the service has seen of a run.",
        bad="Stands still.",
        board="overview",
    ),
    Metric(
        key="run.last_heard",
        title="Last heard of",
        help="When the service last heard of the run, be it a heartbeat (Unix time).",
        bad="Minutes ago while the run is active.",
        board="overview",
        unit="timestamp_seconds",
        levels=Levels(alarm=SILENT_SECONDS),
        alerts=(
            Alert(
                name="ForeshockRunUnreachable",
                expr=f"time() - {{m}} > {SILENT_SECONDS:g} and on (run) foreshock_run_active == 1",
                for_="1m",
                keep_firing_for="2m",
                severity="warning",
                summary="Run {{ $labels.run }} has sent nothing for {{ $value | humanizeDuration }}",
                description="Not even heartbeats come: the training process is gone, or cannot reach the service.",
                action="Look whether the training process lives; if it does, `foreshock doctor` on its machine.",
            ),
        ),
    ),
    Metric(
        key="run.last_step",
        title="Last step",
        help="When the run's newest step came, or its process started (Unix time).",
        bad="Many step times ago while the run is active.",
        board="overview",
        unit="timestamp_seconds",
        levels=Levels(alarm=HUNG_SECONDS),
        alerts=(
            Alert(
                name="ForeshockRunHung",
                expr="time() - {m} > on (run) "
                f"(clamp_min({HUNG_STEPS} * foreshock_run_step_time_seconds, {HUNG_SECONDS:g}) "
                f"or on (run) foreshock_run_active * {FIRST_STEP_SECONDS:g}) "
                f"and on (run) time() - foreshock_run_last_heard_timestamp_seconds <= {SILENT_SECONDS:g} "
                "and on (run) foreshock_run_active == 1",
                for_="1m",
                severity="warning",
                summary="Run {{ $labels.run }} is alive and has ended no step for {{ $value | humanizeDuration }}",
                description="Its heartbeats arrive, so the process and the way to the service are sound: the training "
                "itself stands still, or is at something long beside its steps.",
                action="Take the stacks of the training processes (`py-spy dump --pid PID`) before anything is killed.",
            ),
        ),
    ),
    Metric(
        key="run.loss",
        title="Loss",
        help="Mean raw training loss of the last sample.",
        bad="Jumps away from its own past. By then the warning should be old.",
        board="run",
        sample="loss",
        across_ranks="mean",
        chart=3,
        alerts=(
            Alert(
                name="ForeshockLossNotFinite",
                expr="{m} != {m} or abs({m}) == Inf",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: the loss is not finite",
                description="The raw loss of the last sample is NaN or infinite.",
                action="Stop the run and resume from a checkpoint before the first warning. If its cause was rounding, "
                "resume with every head switched. Otherwise leave out the batches that led here, or lower the "
                "learning rate.",
            ),
            Alert(
                name="ForeshockLossJumped",
                expr=f"avg_over_time({{m}}[2m]) > {JUMP_RATIO} * ({_LOWEST_LOSS} > 0) "
                f"and avg_over_time({{m}}[2m]) - {_LOWEST_LOSS} > {JUMP_NATS}",
                for_="1m",
                keep_firing_for="5m",
                severity="critical",
                summary="Run {{ $labels.run }}: the loss has jumped to {{ $value | humanize }}",
                description=f"The loss of the last two minutes is more than {JUMP_RATIO} times, and by {JUMP_NATS} "
                "higher than, the lowest that it held for two minutes in the last six hours.",
                action="Look at the run's warnings. If rounding was warned about, resume from a checkpoint before the "
                "warning with every head switched. Otherwise look at the data and the learning rate.",
            ),
        ),
    ),
    Metric(
        key="run.grad_norm",
        title="Gradient norm",
        help="Largest gradient norm, before clipping, since the last sample.",
        bad="Bursts above its own past.",
        board="run",
        sample="grad_norm",
        scale="log",
        chart=4,
    ),
    Metric(
        key="run.learning_rate",
        title="Learning rate",
        help="Learning rate of the last sample.",
        bad="Not the schedule you meant.",
        board="run",
        sample="learning_rate",
        across_ranks="mean",
    ),
    Metric(
        key="run.step_time",
        title="Step time",
        help="Mean wall time of a training step.",
        bad="Grows when foreshock is attached.",
        board="run",
        unit="seconds",
        sample="step_seconds",
    ),
    Metric(
        key="run.agent_time",
        title="Agent time per step",
        help="Mean host time that the agent spends in a training step.",
        bad="More than 200 microseconds.",
        board="run",
        unit="seconds",
        sample="agent_seconds",
    ),
    Metric(
        key="run.nonfinite_steps",
        title="Steps with a non-finite loss",
        help="Steps whose loss was NaN or infinite; where no loss is told, whose gradient norm was.",
        bad="Anything that grows.",
        board="run",
        kind="counter",
        alerts=(
            Alert(
                name="ForeshockNonFiniteSteps",
                expr="increase({m}[10m]) > 0 or ({m} > 0 unless {m} offset 10m)",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: steps with a non-finite loss",
                description="{{ $value | humanize }} such steps in the last ten minutes.",
                action="Treat it as a failure in progress: a step that a loss scaler skips has a finite loss.",
            ),
        ),
    ),
    Metric(
        key="run.worst_risk",
        title="Worst risk",
        help="Highest risk of any head of a run, from 0 to 1.",
        bad="Near 1.",
        board="overview",
        unit="ratio",
        worst_of="head.risk",
        levels=Levels(watch=0.5, alarm=1.0),
        chart=None,
    ),
    *INCIDENT_METRICS,
    Metric(
        key="warning.active",
        title="Active warnings",
        help="1 for every warning that is raised and not cleared.",
        bad="Any.",
        board="overview",
        labels=("run", "layer", "head", "cause", "signal", "severity"),
        levels=Levels(alarm=1.0),
    ),
    Metric(
        key="warning.forecast",
        title="Time left",
        help="Forecast: steps until the warned head's largest |score| reaches 512.",
        bad="Fewer steps than you need to react.",
        board="overview",
        unit="steps",
        labels=("run", "layer", "head"),
        levels=Levels(alarm=1000.0, below=True),
        scale="log",
    ),
    Metric(
        key="warning.raised",
        title="Warnings raised",
        help="Warnings raised since the run began.",
        bad="Many in a run that turns out healthy.",
        board="overview",
        kind="counter",
        labels=("run", "cause"),
    ),
    Metric(
        key="switch.outcomes",
        title="Switches",
        help="Switch decisions and commands by outcome.",
        bad="Refused or expired ones.",
        board="overview",
        kind="counter",
        labels=("run", "mode", "outcome"),
    ),
    Metric(
        key="switch.not_arrested",
        title="Switches that did not help",
        help="Switches that stand although their heads' signals grew on after them, as the verification found.",
        bad="Any: the head needs a stronger mode, or the cause is another.",
        board="overview",
        levels=Levels(alarm=1.0),
        alerts=(
            Alert(
                name="ForeshockSwitchNotArrested",
                expr="{m} > 0",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: a switch did not stop what it was made for",
                description="Applied switches that were verified and did not help, as scores or offsets of their heads "
                "grew on: {{ $value }}.",
                action="Approve the stronger mode that the service has proposed. If it proposed none, lower the "
                "learning rate or resume from a checkpoint before the first warning.",
            ),
        ),
    ),
    Metric(
        key="agent.dropped",
        title="Events dropped by agents",
        help="Events that an agent lost, by reason.",
        bad="Anything that grows.",
        board="service",
        kind="counter",
        labels=("run", "reason"),
        alerts=(
            Alert(
                name="ForeshockAgentDropping",
                expr="increase({m}[10m]) > 0 or ({m} > 0 unless {m} offset 10m)",
                for_="0s",
                severity="warning",
                summary="Run {{ $labels.run }}: the agent drops events ({{ $labels.reason }})",
                description="{{ $value | humanize }} events were lost in ten minutes. Detection goes on.",
                action="Check the service's address, the spool's disk and the network.",
            ),
        ),
    ),
    Metric(
        key="agent.faults",
        title="Contained agent faults",
        help="Faults of the agent that were contained, by component.",
        bad="Anything that grows.",
        board="service",
        kind="counter",
        labels=("run", "component"),
        alerts=(
            Alert(
                name="ForeshockAgentFault",
                expr="increase({m}[10m]) > 0 or ({m} > 0 unless {m} offset 10m)",
                for_="0s",
                severity="warning",
                summary="Run {{ $labels.run }}: the agent contained a fault in {{ $labels.component }}",
                description="{{ $value | humanize }} faults in ten minutes. Training goes on; watching may have gaps.",
                action="Run `foreshock doctor` on the training machine and read the training log for the first fault.",
            ),
        ),
    ),
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

METRICS: Final = (*HEAD_METRICS, *RUN_METRICS, *SERVICE_METRICS)
BY_KEY: Final = {metric.key: metric for metric in METRICS}


def read(key: str, words: Words | ReadOnce) -> Floats:
    """A counted metric of each head, [...], from state words [..., SLOT_COUNT]; NaN where nothing was counted.

    The one place where a statistic becomes a number: agent, laboratory and service read it here. Raises ValueError for
    a metric that is not counted.
    """
    reading = BY_KEY[key].head
    if reading is None or reading.read is None:
        raise ValueError(f"{key} is not read from what a head counted")
    return reading.read(words)


WATCHDOG: Final = Alert(
    name="ForeshockWatchdog",
    expr="vector(1)",
    for_="0s",
    severity="none",
    summary="Always firing: proves that alerts travel",
    description="If this alert stops arriving, the alert path is broken.",
    action="Check Prometheus and Alertmanager.",
)
SERVICE_DOWN: Final = Alert(
    name="ForeshockServiceDown",
    expr='up{job="foreshock"} == 0 or absent(up{job="foreshock"})',
    for_="2m",
    severity="critical",
    summary="The foreshock service cannot be scraped",
    description="Agents keep detecting and, under policy auto, switching; nothing new is shown or sent.",
    action="Restart the service; agents replay what they spooled.",
)
EXTRA_ALERTS: Final = (WATCHDOG, SERVICE_DOWN)
"""Alerts that belong to no metric of ours."""
