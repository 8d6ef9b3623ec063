"""/metrics is written as prometheus_client would write it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from foreshock.contract.metrics.catalog import METRICS
from foreshock.server.http.exposition import encoder, line

pytestmark = pytest.mark.promise("S15")
FORMATS: dict[str, Any] = {
    "text/plain; version=0.0.4": generate_latest,
    "application/openmetrics-text; version=1.0.0": generate_openmetrics,
}
texts = st.text(st.characters(codec="utf-8"), max_size=8)


@pytest.mark.parametrize("accept", FORMATS)
@given(data=st.data())
def test_every_label_and_number_is_written_as_the_client_library_writes_it(accept: str, data: Any) -> None:
    metric = data.draw(st.sampled_from(METRICS))
    rows = data.draw(st.dictionaries(st.tuples(*(texts for _ in metric.labels)), st.floats(), min_size=1, max_size=3))
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    for labels, value in rows.items():
        family.add_metric(labels, value)

    class One(Collector):
        def collect(self) -> Any:
            return [family]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(One())
    encode, _ = encoder(accept)
    written = encode({metric.name: [line(metric.name, labels, value)[1] for labels, value in rows.items()]})
    assert written == FORMATS[accept](registry)
