"""Every metric, once. The Prometheus name, the panel, the rule, the documentation row and the page derive from here.

Per-head metrics are read from a merged sample by `HeadReading`. Prometheus gets, under a series budget, the worst heads
of each run (`foreshock_head_*`) and one value per layer (`foreshock_layer_*`, the value of its worst head); every head
of every sample goes to the service's own store (house decision 9).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from foreshock.contract.modes import DEFAULT_MITIGATION, MODES
from foreshock.contract.slots import Slot, Words, slot_values

Floats = npt.NDArray[np.float64]
Board = Literal["overview", "run", "heads", "service"]
Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A Prometheus rule. `{m}` in `expr` stands for the metric's own name.

    A counter is born with its first event, which `increase` cannot see: rules on counters add `or ({m} > 0 unless {m}
    offset 10m)`.
    """

    name: str
    expr: str
    for_: str
    severity: Literal["info", "warning", "critical", "none"]
    summary: str
    description: str
    action: str = ""
    """What the person who is woken should do; becomes the runbook's first paragraph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadReading:
    """How a head's value is read: from its state words, or from a named array of the sample."""

    read: Callable[[Words], Floats] | None = None
    field: Literal["query_norm", "key_norm", "query_key_norm", "risk", "modes"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measured quantity. `key` is its name in the API and on the page."""

    key: str
    title: str
    help: str
    bad: str
    """One sentence on what bad looks like."""
    board: Board
    kind: Kind = "gauge"
    unit: Literal["", "seconds", "ratio", "bytes", "steps", "timestamp_seconds"] = ""
    labels: tuple[str, ...] = ("run",)
    head: HeadReading | None = None
    alerts: tuple[Alert, ...] = ()

    @property
    def name(self) -> str:
        """The Prometheus name; for a per-head metric, the name of the worst heads' series."""
        parts = ["foreshock", *self.key.split(".")]
        if self.unit:
            parts.append(self.unit)
        if self.kind == "counter":
            parts.append("total")
        return "_".join(parts)

    @property
    def layer_name(self) -> str:
        """The Prometheus name of a per-head metric's value for each layer. Raises ValueError for other metrics."""
        if self.head is None:
            raise ValueError(f"{self.key} is not a per-head metric; it has no value per layer")
        return self.name.replace("foreshock_head_", "foreshock_layer_", 1)


def _share(part: Slot, whole: Slot = Slot.ROWS) -> Callable[[Words], Floats]:
    def read(words: Words) -> Floats:
        return ratio(slot_values(words, part), slot_values(words, whole))

    return read


def ratio(part: Floats, whole: Floats) -> Floats:
    """part / whole, NaN where nothing was counted."""
    result: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)
    return result


def _value(slot: Slot) -> Callable[[Words], Floats]:
    def read(words: Words) -> Floats:
        values = slot_values(words, slot)
        return np.where(np.isneginf(values), np.nan, values)

    return read


def _score_offset_rms(words: Words) -> Floats:
    return np.sqrt(_share(Slot.SCORE_OFFSET_SUMSQ)(words))


def _delta_bias_z(words: Words) -> Floats:
    """Sum of delta_lp - delta_hp in units of its standard deviation if the rows were independent and unbiased."""
    return ratio(slot_values(words, Slot.DELTA_BIAS_SUM), np.sqrt(slot_values(words, Slot.DELTA_BIAS_SUMSQ)))


HEAD_LABELS: Final = ("run", "layer", "head")

HEAD_METRICS: Final = (
    Metric(
        key="head.score_offset",
        title="Score offset",
        help="Mean of lse - log n over a head's rows (nats): how far its scores have drifted as a whole.",
        bad="One head's offset leaves its peers and keeps growing; softmax cannot see it, rounding can.",
        board="run",
        labels=HEAD_LABELS,
        head=HeadReading(read=_share(Slot.SCORE_OFFSET_SUM)),
    ),
    Metric(
        key="head.score_offset_rms",
        title="Score offset, root mean square",
        help="Root mean square of lse - log n over a head's rows (nats); also sees offsets of both signs.",
        bad="Keeps doubling in one head.",
        board="run",
        labels=HEAD_LABELS,
        head=HeadReading(read=_score_offset_rms),
    ),
    Metric(
        key="head.score_max",
        title="Largest score",
        help="Largest scaled attention score of a head since the last sample.",
        bad="Grows by a constant factor every thousand steps; at 512, rounding q and k to bf16 moves it by about 1.",
        board="run",
        labels=HEAD_LABELS,
        head=HeadReading(read=_value(Slot.SCORE_MAX)),
    ),
    Metric(
        key="head.row_max_abs",
        title="Largest |row maximum|",
        help="Largest absolute value of a row's maximum score; grows whichever way the scores drift.",
        bad="Grows by a constant factor every thousand steps.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(read=_value(Slot.ROW_MAX_ABS)),
    ),
    Metric(
        key="head.tied_rows_bf16",
        title="Rows with several maxima (bf16 scores)",
        help="Share of rows whose bf16-rounded scores have several maxima (paper, section 3.3.2).",
        bad="Rises from percents to most rows; it may fall again while the failure goes on.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=HeadReading(read=_share(Slot.TIED_ROWS_BF16)),
    ),
    Metric(
        key="head.tied_rows_one",
        title="Rows with several P = 1",
        help="Share of rows with several entries exp(S - max) that round to 1 in the operand's dtype.",
        bad="Rises from well under a percent to a large share.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=HeadReading(read=_share(Slot.TIED_ROWS_ONE)),
    ),
    Metric(
        key="head.delta_bias",
        title="Delta bias",
        help="Sum of delta_lp - delta_hp over the sum of its absolute values, in [-1, 1] (paper, section 3.3.1).",
        bad="Stays on one side of zero in one head, sample after sample.",
        board="run",
        unit="ratio",
        labels=HEAD_LABELS,
        head=HeadReading(read=_share(Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS)),
    ),
    Metric(
        key="head.delta_bias_z",
        title="Delta bias, standardised",
        help="Sum of delta_lp - delta_hp over the root of its sum of squares.",
        bad="Beyond 4 with the same sign again and again.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(read=_delta_bias_z),
    ),
    Metric(
        key="head.shifted_rows",
        title="Shifted rows",
        help="Share of rows that a stabilised mode shifted.",
        bad="Zero while a stabilised mode is on: the rule touches nothing.",
        board="heads",
        unit="ratio",
        labels=HEAD_LABELS,
        head=HeadReading(read=_share(Slot.SHIFTED_ROWS)),
    ),
    Metric(
        key="head.nonfinite_rows",
        title="Non-finite rows",
        help="Rows with a NaN or infinite score, output or delta since the last sample.",
        bad="Anything above zero.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(read=_value(Slot.NONFINITE_ROWS)),
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
        head=HeadReading(field="query_norm"),
    ),
    Metric(
        key="head.key_norm",
        title="Spectral norm of W_K",
        help="Largest singular value of a head's key projection.",
        bad="Keeps growing in a few heads after the others have settled.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(field="key_norm"),
    ),
    Metric(
        key="head.query_key_norm",
        title="Spectral norm of W_Q W_K^T",
        help="Largest singular value of a head's score form W_Q W_K^T.",
        bad="Keeps growing in a few heads after the others have settled.",
        board="heads",
        labels=HEAD_LABELS,
        head=HeadReading(field="query_key_norm"),
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
        key="run.last_sample",
        title="Last sample",
        help="When the service stored the run's last sample (Unix time).",
        bad="Minutes ago while the run is active.",
        board="overview",
        unit="timestamp_seconds",
        alerts=(
            Alert(
                name="ForeshockRunStalled",
                expr="time() - {m} > 300 and on (run) foreshock_run_active == 1",
                for_="1m",
                severity="warning",
                summary="Run {{ $labels.run }} has sent nothing for {{ $value | humanizeDuration }}",
                description="The training process hangs, was killed, or cannot reach the service.",
                action="Look whether the training process lives; if it does, `foreshock doctor` on its machine.",
            ),
        ),
    ),
    Metric(
        key="run.loss",
        title="Loss",
        help="Mean raw training loss of the last sample.",
        bad="Jumps away from its own past. By then the warning should be old.",
        board="run",
        alerts=(
            Alert(
                name="ForeshockLossNotFinite",
                expr="{m} != {m} or abs({m}) == Inf",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: the loss is not finite",
                description="The raw loss of the last sample is NaN or infinite.",
                action="Stop the run and resume from a checkpoint before the first warning, with the switched mode on.",
            ),
        ),
    ),
    Metric(
        key="run.grad_norm",
        title="Gradient norm",
        help="Largest gradient norm, before clipping, since the last sample.",
        bad="Bursts above its own past.",
        board="run",
    ),
    Metric(
        key="run.learning_rate",
        title="Learning rate",
        help="Learning rate of the last sample.",
        bad="Not the schedule you meant.",
        board="run",
    ),
    Metric(
        key="run.step_time",
        title="Step time",
        help="Mean wall time of a training step.",
        bad="Grows when foreshock is attached.",
        board="run",
        unit="seconds",
    ),
    Metric(
        key="run.agent_time",
        title="Agent time per step",
        help="Mean host time that the agent spends in a training step.",
        bad="More than 200 microseconds.",
        board="run",
        unit="seconds",
    ),
    Metric(
        key="run.nonfinite_steps",
        title="Steps with a non-finite loss or gradient",
        help="Steps whose loss or gradient norm was NaN or infinite.",
        bad="Anything that grows.",
        board="run",
        kind="counter",
        alerts=(
            Alert(
                name="ForeshockNonFiniteSteps",
                expr="increase({m}[10m]) > 0 or ({m} > 0 unless {m} offset 10m)",
                for_="0s",
                severity="critical",
                summary="Run {{ $labels.run }}: steps with a non-finite loss or gradient",
                description="{{ $value | humanize }} such steps in the last ten minutes.",
                action="With a loss scaler a few are normal at the start; otherwise treat as a failure in progress.",
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
    ),
    Metric(
        key="warning.active",
        title="Active warnings",
        help="1 for every warning that is raised and not cleared.",
        bad="Any.",
        board="overview",
        labels=("run", "layer", "head", "cause", "signal", "severity"),
        alerts=(
            Alert(
                name="ForeshockHeadFailing",
                expr='{m}{severity=~"warning|critical"} == 1',
                for_="0s",
                severity="warning",
                summary="Run {{ $labels.run }}: {{ if $labels.head }}layer {{ $labels.layer }} head {{ $labels.head }}"
                "{{ else }}the model as a whole{{ end }} is on its way to a loss explosion ({{ $labels.cause }})",
                description="The signal {{ $labels.signal }} tripped. Score offset "
                '{{ with printf "foreshock_head_score_offset{run=%q,layer=%q,head=%q}" $labels.run $labels.layer '
                "$labels.head | query }}{{ . | first | value | humanize }}{{ else }}on the page{{ end }}, largest "
                'score {{ with printf "foreshock_head_score_max{run=%q,layer=%q,head=%q}" $labels.run $labels.layer '
                "$labels.head | query }}{{ . | first | value | humanize }}{{ else }}on the page{{ end }}. "
                'Largest |score| reaches 512 in about {{ with printf "foreshock_warning_forecast_steps{run=%q,layer=%q,'
                'head=%q}" $labels.run $labels.layer $labels.head | query }}{{ . | first | value | humanize }}'
                "{{ else }}an unknown number of{{ end }} steps.",
                action=f"Switch the head to {DEFAULT_MITIGATION}, or let policy auto do it, "
                "and watch its offset stop growing.",
            ),
        ),
    ),
    Metric(
        key="warning.forecast",
        title="Time left",
        help="Forecast: steps until the warned head's largest |score| reaches 512.",
        bad="Fewer steps than you need to react.",
        board="overview",
        unit="steps",
        labels=("run", "layer", "head"),
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
        help="Batches received, by result: stored, duplicate, refused as malformed, busy (429: sent again later).",
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
                description="{{ $value }} commands have waited for five minutes on a run that is active.",
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


def read(key: str, words: Words) -> Floats:
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
