"""The catalogue's metrics of runs: the training, its warnings and switches, and losses of its agents."""

from typing import Final

from foreshock.contract.metrics.metric import Alert, Levels, Metric
from foreshock.contract.metrics.service_metrics import INCIDENT_METRICS

SILENT_SECONDS: Final = 300.0
"""An active run from which nothing was received for longer is silent."""
HUNG_SECONDS: Final = 300.0
HUNG_STEPS: Final = 20
"""An active run that sends heartbeats is hung if no step ended for this many seconds and this many step times."""
FIRST_STEP_SECONDS: Final = 1800.0
"""The same limit for a run without a known step time, because compilation and the first batches are slow."""
JUMP_RATIO, JUMP_NATS = 1.5, 0.5
"""Both must be exceeded for the loss-jump alert, so that it does not fire for a small or a noisy loss."""
_LOWEST_LOSS: Final = "min_over_time(avg_over_time({m}[2m])[6h:2m])"
RUN_METRICS: Final = (
    Metric(
        key="run.active",
        title="Active",
        help="1 while a run sends samples and has not finished.",
        bad="1 on a run that no longer steps.",
    ),
    Metric(
        key="run.step",
        title="Step",
        help="Last optimizer step that the service has seen of a run.",
        bad="Does not increase.",
    ),
    Metric(
        key="run.norms_step",
        title="Step of the spectral norms",
        help="Optimizer step at which the spectral norms on show were measured: by default they come every 100 steps.",
        bad="Far behind the step of the run: the norms are no longer measured.",
        board="run",
    ),
    Metric(
        key="run.last_heard",
        title="Last heard of",
        help="When the service last received anything of the run, including heartbeats (Unix time).",
        bad="Minutes ago while the run is active.",
        unit="timestamp_seconds",
        levels=Levels(alarm=SILENT_SECONDS),
        alerts=(
            Alert(
                name="ForeshockRunUnreachable",
                expr=f"time() - {{m}} > {SILENT_SECONDS:g}",
                for_="1m",
                severity="warning",
                summary="Run {{ $labels.run }} has sent nothing for {{ $value | humanizeDuration }}",
                description="Not even heartbeats arrive: the training process is gone, or cannot reach the service.",
                action="Check whether the training process runs; if it does, run `foreshock doctor` on its machine.",
            ),
        ),
    ),
    Metric(
        key="run.last_step",
        title="Last step",
        help="When the run's newest step arrived, or its process started (Unix time).",
        bad="Many step times ago while the run is active.",
        unit="timestamp_seconds",
        levels=Levels(alarm=HUNG_SECONDS),
        alerts=(
            Alert(
                name="ForeshockRunHung",
                expr="time() - {m} > on (run) "
                f"(clamp_min({HUNG_STEPS} * foreshock_run_step_time_seconds, {HUNG_SECONDS:g}) "
                f"or on (run) foreshock_run_active * {FIRST_STEP_SECONDS:g}) "
                f"and on (run) time() - foreshock_run_last_heard_timestamp_seconds <= {SILENT_SECONDS:g}",
                for_="1m",
                severity="warning",
                summary="Run {{ $labels.run }} is hung: no step finished in {{ $value | humanizeDuration }}, but "
                "heartbeats arrive",
                description="The process runs and reaches the service, so the training itself has stopped, or does "
                "something long between its steps.",
                action="Take the stacks of the training processes (`py-spy dump --pid PID`) before anything is killed.",
            ),
        ),
    ),
    Metric(
        key="run.loss",
        title="Loss",
        help="Mean raw training loss of the last sample.",
        bad="Rises suddenly. foreshock should have warned earlier.",
        board="run",
        sample="loss",
        across_ranks="mean",
        chart=4,
        alerts=(
            Alert(
                name="ForeshockLossNotFinite",
                expr="{m} != {m} or abs({m}) == Inf",
                severity="critical",
                summary="Run {{ $labels.run }}: the loss is not finite",
                description="The raw loss of the last sample is NaN or infinite.",
                action="Read the incident on the run's page, or run `foreshock incidents RUN`: it names the place "
                "where the first such value appeared. Stop the run, unless the incident says that the weights are "
                "finite.",
            ),
            Alert(
                name="ForeshockLossJumped",
                expr=f"avg_over_time({{m}}[2m]) > {JUMP_RATIO} * ({_LOWEST_LOSS} > 0) "
                f"and avg_over_time({{m}}[2m]) - {_LOWEST_LOSS} > {JUMP_NATS}",
                for_="1m",
                keep_firing_for="5m",
                severity="critical",
                summary="Run {{ $labels.run }}: the loss has jumped to {{ $value | humanize }}",
                description=f"The mean loss of two minutes is more than {JUMP_RATIO} times and {JUMP_NATS} above "
                "the lowest one of the last six hours.",
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
        chart=5,
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
        help="Steps whose loss was NaN or infinite, or whose gradient norm was if no loss is given.",
        bad="Anything that grows.",
        board="run",
        kind="counter",
        alerts=(
            Alert(
                name="ForeshockNonFiniteSteps",
                expr="increase({m}[10m]) > 0 or ({m} > 0 unless {m} offset 10m)",
                severity="critical",
                summary="Run {{ $labels.run }}: steps with a non-finite loss",
                description="{{ $value | humanize }} steps in the last ten minutes.",
                action="Treat it as a failure in progress: a step that a loss scaler skips has a finite loss.",
            ),
        ),
    ),
    Metric(
        key="run.clipped_heads",
        title="QK-Clip: heads",
        help="Heads that QK-Clip scaled since the last sample; none while it is off.",
        bad="More and more of them.",
        board="run",
        chart=None,
    ),
    Metric(
        key="run.clips",
        title="QK-Clip: scalings",
        help="How often QK-Clip scaled a head of the run so far: heads times steps.",
        bad="Grows at a steady rate: the learning rate is too high.",
        board="run",
        kind="counter",
        chart=None,
    ),
    Metric(
        key="run.worst_risk",
        title="Worst risk",
        help="Highest risk of any head of a run, from 0 to 1.",
        bad="Near 1.",
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
        labels=("run", "layer", "head", "cause", "signal", "severity"),
        levels=Levels(alarm=1.0),
    ),
    Metric(
        key="warning.forecast",
        title="Time left",
        help="Forecast: steps until the warned head's largest |score| reaches 512.",
        bad="Fewer steps than you need to react.",
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
        kind="counter",
        labels=("run", "cause"),
    ),
    Metric(
        key="switch.outcomes",
        title="Switches",
        help="Switch decisions and commands by outcome.",
        bad="Refused or expired ones.",
        kind="counter",
        labels=("run", "mode", "outcome"),
    ),
    Metric(
        key="switch.not_arrested",
        title="Switches that did not help",
        help="Active switches after which the signals of their heads still grew, as the verification found.",
        bad="Any: the head needs a stronger mode, or the cause is another.",
        levels=Levels(alarm=1.0),
        alerts=(
            Alert(
                name="ForeshockSwitchNotArrested",
                expr="{m} > 0",
                severity="critical",
                summary="Run {{ $labels.run }}: a switch did not stop the growth",
                description="Applied switches after which scores or offsets of their heads continued to grow: "
                "{{ $value }}.",
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
                severity="warning",
                summary="Run {{ $labels.run }}: the agent drops events ({{ $labels.reason }})",
                description="{{ $value | humanize }} events were lost in ten minutes. Detection continues.",
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
                severity="warning",
                summary="Run {{ $labels.run }}: the agent contained a fault in {{ $labels.component }}",
                description="{{ $value | humanize }} errors in ten minutes. Training continues; samples may be lost.",
                action="Run `foreshock doctor` on the training machine and read the training log for the first fault.",
            ),
        ),
    ),
)
