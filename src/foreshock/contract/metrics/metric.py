"""What an entry of the catalogue says of a metric, and the readings from which per-head metrics are made.

Words that agents send and that become labels are closed sets. What is not in them is shown as "other".
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from foreshock.contract.slots import Floats, Slot, Words, looked_at, slot_values

Board = Literal["overview", "run", "heads", "service"]
Kind = Literal["gauge", "counter"]
Scale = Literal["linear", "log", "symlog"]
"""symlog is linear between -1 and 1 and logarithmic beyond, on either side."""
AcrossRanks = Literal["mean", "max", "min"]
MORE_CHARTS: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A Prometheus rule. `{m}` in `expr` stands for the metric's own name.

    A counter is born with its first event, which `increase` cannot see: rules on counters add `or ({m} > 0 unless {m}
    offset 10m)`.
    """

    name: str
    expr: str
    for_: str = "0s"
    """How long the expression must hold before the alert fires."""
    severity: Literal["info", "warning", "critical", "none"]
    summary: str
    description: str
    action: str = ""
    """What the person who is woken should do; becomes the runbook's first paragraph."""
    done: str = ""
    """A template: what was done already."""
    to_do: str = ""
    """A template: what to do in this case; without it, `action`."""
    keep_firing_for: str = "3m"
    """How long it goes on firing afterwards: a lost scrape or a restart of the service resolves nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadReading:
    """How a head's value is read: from its state words, or from a named array of the sample."""

    read: Callable[[Words], Floats] | None = None
    field: str | None = None
    """One of `wire.PER_HEAD`."""
    now_and_then: bool = False
    """Not in every sample: the newest known value is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """From where on a value is marked, on boards and on the page."""

    alarm: float
    watch: float | None = None
    below: bool = False
    """Small values are the bad ones: marked below `alarm`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measured quantity. `key` is its name in the API and on the page."""

    key: str
    title: str
    help: str
    bad: str
    """One sentence on what bad looks like."""
    board: Board = "overview"
    kind: Kind = "gauge"
    unit: Literal["", "seconds", "ratio", "bytes", "steps", "timestamp_seconds"] = ""
    labels: tuple[str, ...] = ("run",)
    head: HeadReading | None = None
    sample: Literal["loss", "grad_norm", "learning_rate", "step_seconds", "agent_seconds"] | None = None
    """The number of a sample that a run-level metric is."""
    worst_of: str | None = None
    """Key of the per-head metric whose worst head a run-level metric is."""
    across_ranks: AcrossRanks = "max"
    """What several ranks' numbers become. Counted statistics merge slot by slot instead."""
    signed: bool = False
    """Either sign may be bad: the worst head is the largest in size, and colours run both ways from zero."""
    scale: Scale = "linear"
    """The axis on which it is drawn, on boards, charts and heat maps."""
    levels: Levels | None = None
    percent: bool = False
    """A share, read in percent."""
    chart: int | None = MORE_CHARTS
    """Place among the page's charts: before MORE_CHARTS at once, the others on demand; None: shown elsewhere."""
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

    @property
    def has_series(self) -> bool:
        """Whether the service can draw it against the step."""
        return bool(self.head or self.sample or self.worst_of)

    def badness(self, values: Floats) -> Floats:
        """By which the worst head is chosen: the size of what has a sign, the value itself, or how small it is where
        small values are the bad ones."""
        if self.levels is not None and self.levels.below:
            return -values
        return np.abs(values) if self.signed else values


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMetric(Metric):
    """A metric of every head."""

    board: Board = "heads"
    labels: tuple[str, ...] = ("run", "layer", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceMetric(Metric):
    """A metric of the service itself."""

    board: Board = "service"
    labels: tuple[str, ...] = ()


def share(part: Slot, *whole: Slot) -> HeadReading:
    """One slot over the sum of others, by default over ROWS; NaN where the others counted nothing."""

    def read(words: Words) -> Floats:
        first, *rest = whole or (Slot.ROWS,)
        return ratio(slot_values(words, part), sum((slot_values(words, x) for x in rest), slot_values(words, first)))

    return HeadReading(read=read)


def share_of_looked_at(part: Slot) -> HeadReading:
    """One slot over the rows that were not skipped, NaN where all were."""
    return HeadReading(read=lambda words: ratio(slot_values(words, part), looked_at(words)))


def root_mean_square(squares: Slot) -> HeadReading:
    """The root of a sum of squares over the rows, NaN where no row was counted."""
    return HeadReading(read=lambda words: np.sqrt(ratio(slot_values(words, squares), slot_values(words, Slot.ROWS))))


def standardised(total: Slot, squares: Slot) -> HeadReading:
    """A sum in units of its standard deviation if the rows were independent and unbiased."""
    return HeadReading(read=lambda words: ratio(slot_values(words, total), np.sqrt(slot_values(words, squares))))


def value(slot: Slot) -> HeadReading:
    """A slot as it is, NaN for the maximum of nothing."""

    def read(words: Words) -> Floats:
        values = slot_values(words, slot)
        if values.min(initial=np.inf) > -np.inf:
            return values
        return np.where(np.isneginf(values), np.nan, values)

    return HeadReading(read=read)


def ratio(part: Floats | Words, whole: Floats) -> Floats:
    """part / whole, NaN where nothing was counted."""
    if whole.min(initial=np.inf) > 0:  # a division that leaves nothing out takes a third of the time
        return part / whole
    result: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)
    return result


OTHER: Final = "other"
SIGNALS: Final = ("offset", "score", "nonfinite", "kernel", "level")
"""Signals that trip (wire.Verdict.signal)."""
DROP_REASONS: Final = (
    "queue_full",
    "sender_off",
    "spool_full",
    "spool_lost",
    "unbuilt",
    *(f"refused_{status}" for status in (400, 401, 403, 404, 405, 409, 413, 415, 422)),
)
"""Why an agent loses events (wire.AgentHealth.dropped)."""
GUARDED: Final = (
    "agent",
    "loss",
    "crisis",
    "collector",
    "sample",
    "detectors",
    "policy",
    "console",
    "switch",
    "answers",
    "norms",
    "qk_clip",
    "sinks",
    "sender",
    "checkpoints",
    "mirror",
    "tracker",
)
"""Parts of an agent that run under a guard of their own."""
FAULT_COMPONENTS: Final = (*GUARDED, "probe", "spool")
"""Parts of an agent that contain their faults (wire.AgentHealth.faults)."""


def known(word: str, words: Collection[str]) -> str:
    """The word itself if it is one of `words`, else "other"."""
    return word if word in words else OTHER
