"""The catalogue of all metrics: of heads, runs and the service. Prometheus names, panels, alert rules, documentation
and the page are derived from it.

Per-head metrics are read from a merged sample by `HeadReading`. Prometheus gets, under a series budget, the worst heads
of each run (`foreshock_head_*`) and one value per layer (`foreshock_layer_*`, the value of its worst head); every head
of every sample goes to the service's own store (docs/design.md, decision 9).
"""

from typing import Final

from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Alert
from foreshock.contract.metrics.run_metrics import RUN_METRICS
from foreshock.contract.metrics.service_metrics import SERVICE_METRICS
from foreshock.contract.slots import Floats, Words

METRICS: Final = (*HEAD_METRICS, *RUN_METRICS, *SERVICE_METRICS)
BY_KEY: Final = {metric.key: metric for metric in METRICS}


def read(key: str, words: Words) -> Floats:
    """Compute a counted metric of each head, [...], from state words [..., SLOT_COUNT]; NaN if nothing was counted.

    Agent, laboratory and service all use this function. Raises ValueError for a metric that is not counted.
    """
    reading = BY_KEY[key].head
    if reading is None or reading.read is None:
        raise ValueError(f"{key} is not computed from the statistics of a head")
    return reading.read(words)


WATCHDOG: Final = Alert(
    name="ForeshockWatchdog",
    expr="vector(1)",
    keep_firing_for="0s",
    severity="none",
    summary="Always firing: proves that alerts travel",
    description="If this alert stops arriving, the alert path is broken.",
    action="Check Prometheus and Alertmanager.",
)
SERVICE_DOWN: Final = Alert(
    name="ForeshockServiceDown",
    expr='up{job="foreshock"} == 0 or absent(up{job="foreshock"})',
    for_="2m",
    keep_firing_for="0s",
    severity="critical",
    summary="The foreshock service cannot be scraped",
    description="Agents keep detecting and, under policy auto, switching; nothing new is shown or sent.",
    action="Restart the service; the agents send their spooled batches again.",
)
EXTRA_ALERTS: Final = (WATCHDOG, SERVICE_DOWN)
"""Alerts that do not belong to a metric of the catalogue."""
