"""The fields of a catalogue entry, and the readings that compute per-head metrics.

Words from agents that become labels are closed sets; other words are shown as "other".
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

    A counter first appears with its first event, which `increase` does not count: rules on counters add `or ({m} > 0
    unless {m} offset 10m)`.
    """

    name: str
    expr: str
    for_: str = "0s"
    """How long the expression must be true before the alert fires."""
    severity: Literal["info", "warning", "critical", "none"]
    summary: str
    description: str
    action: str = ""
    """The action for the person on call; also the first paragraph of the runbook."""
    done: str = ""
    """A template for the actions so far."""
    to_do: str = ""
    """A template for the next action; by default `action`."""
    keep_firing_for: str = "3m"
    """How long it keeps firing afterwards, so that a lost scrape or a restart of the service does not resolve it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadReading:
    """How a head's value is computed: from its state words, or from a named array of the sample."""

    read: Callable[[Words], Floats] | None = None
    field: str | None = None
    """One of `wire.PER_HEAD`."""
    now_and_then: bool = False
    """Whether only some samples contain it; then the newest known value is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The levels from which a value is marked, on boards and on the page."""

    alarm: float
    watch: float | None = None
    below: bool = False
    """Whether small values are bad: they are marked below `alarm`."""


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
    """The field of a sample with the value of a run-level metric."""
    worst_of: str | None = None
    """For a run-level metric that shows the worst head: the key of the per-head metric."""
    across_ranks: AcrossRanks = "max"
    """The reduction across ranks. Counted statistics merge slot by slot instead."""
    signed: bool = False
    """Whether both signs may be bad: the worst head has the largest size, and the colour scale is symmetric to zero."""
    scale: Scale = "linear"
    """The axis on which it is drawn, on boards, charts and heat maps."""
    levels: Levels | None = None
    percent: bool = False
    """Whether it is a share, shown in percent."""
    chart: int | None = MORE_CHARTS
    """Position among the page's charts: below MORE_CHARTS always shown, else on demand; None: shown elsewhere."""
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
        """The Prometheus name of a per-head metric's value per layer. Raises ValueError for other metrics."""
        if self.head is None:
            raise ValueError(f"{self.key} is not a per-head metric, so it does not have a value per layer")
        return self.name.replace("foreshock_head_", "foreshock_layer_", 1)

    @property
    def has_series(self) -> bool:
        """Whether the service can draw it by step."""
        return bool(self.head or self.sample or self.worst_of)

    def badness(self, values: Floats) -> Floats:
        """Return the quantity that is largest for the worst head: the absolute value if `signed`, the negated value if
        small values are bad, else the value."""
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
    """One slot over the sum of others, by default over ROWS; NaN if that sum is zero."""

    def read(words: Words) -> Floats:
        first, *rest = whole or (Slot.ROWS,)
        return ratio(slot_values(words, part), sum((slot_values(words, x) for x in rest), slot_values(words, first)))

    return HeadReading(read=read)


def share_of_looked_at(part: Slot) -> HeadReading:
    """One slot over the rows that were not skipped; NaN if all were skipped."""
    return HeadReading(read=lambda words: ratio(slot_values(words, part), looked_at(words)))


def root_mean_square(squares: Slot) -> HeadReading:
    """The root of a sum of squares over the rows; NaN if no row was counted."""
    return HeadReading(read=lambda words: np.sqrt(ratio(slot_values(words, squares), slot_values(words, Slot.ROWS))))


def standardised(total: Slot, squares: Slot) -> HeadReading:
    """A sum in units of the standard deviation that it would have if the rows were independent and unbiased."""
    return HeadReading(read=lambda words: ratio(slot_values(words, total), np.sqrt(slot_values(words, squares))))


def value(slot: Slot) -> HeadReading:
    """The value of a slot; NaN for a maximum of zero rows."""

    def read(words: Words) -> Floats:
        values = slot_values(words, slot)
        if values.min(initial=np.inf) > -np.inf:
            return values
        return np.where(np.isneginf(values), np.nan, values)

    return HeadReading(read=read)


def ratio(part: Floats | Words, whole: Floats) -> Floats:
    """Return part / whole; NaN where `whole` is zero."""
    if whole.min(initial=np.inf) > 0:  # a division without a mask takes a third of the time
        return part / whole
    result: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)
    return result


OTHER: Final = "other"
SIGNALS: Final = ("offset", "score", "nonfinite", "kernel", "level")
"""Signals that raise warnings (wire.Verdict.signal)."""
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
"""Parts of an agent that each run under their own guard."""
FAULT_COMPONENTS: Final = (*GUARDED, "probe", "spool")
"""Parts of an agent that contain their faults (wire.AgentHealth.faults)."""


def known(word: str, words: Collection[str]) -> str:
    """Return the word if it is in `words`, else "other"."""
    return word if word in words else OTHER
