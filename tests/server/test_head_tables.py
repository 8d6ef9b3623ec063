"""The tables of a run are what its heads say one by one, and prometheus_client would write /metrics as we do."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.slots import identity_row
from foreshock.server.http.exposition import Line, encoder, head_tables, line
from foreshock.server.readings import Axis, MergedSteps
from foreshock.server.testing import FakeRank

Reading = tuple[str, Axis, MergedSteps]
pytestmark = pytest.mark.promise("S15")
BY_RISK = ("head.risk", "head.row_max_abs")


def reading(run: str, layers: int, heads: int, random: np.random.Generator) -> Reading:
    """Some heads of which were not counted, with risks that are equal, missing and infinite."""
    rank = FakeRank(run=run, layers=layers, heads=range(heads))
    count = rank.count
    axis = Axis(tuple((layer, head) for layer in range(layers) for head in range(heads)), {"t": np.arange(count)})
    counted = random.random((1, count)) < 0.7
    words = np.where(counted[0][:, np.newaxis], rank.words(int(random.integers(1000))), identity_row())
    some = np.array([0.25, 0.5, -np.inf, np.inf, np.nan])
    fields: dict[str, Any] = {
        metric.head.field: random.choice(some, (1, count))
        for metric in HEAD_METRICS
        if metric.head is not None and metric.head.field
    }
    return run, axis, MergedSteps(np.array([7]), words[np.newaxis], counted, fields, [])


def tables_of(reading: Reading, worst: int) -> tuple[set[Line], list[Line]]:
    """One run's layers and worst heads, one by one."""
    run, axis, own = reading
    values = {metric.key: own.head_values(metric)[-1].tolist() for metric in HEAD_METRICS}
    layers = set()
    for metric in HEAD_METRICS:
        of, bad = values[metric.key], metric.badness(np.array(values[metric.key])).tolist()
        for layer in axis.layers:
            there = [i for i, ref in enumerate(axis.heads) if ref[0] == layer and not math.isnan(of[i])]
            if there:
                layers.add(line(metric.layer_name, (run, str(layer)), of[max(there, key=bad.__getitem__)]))
    ranked = [[-1.0 if math.isnan(x) else x for x in values[key]] for key in ("head.risk", "head.row_max_abs")]
    told = [i for i in range(len(axis.heads)) if any(not math.isnan(values[k][i]) for k in BY_RISK)]
    first = sorted(told, key=lambda i: (-ranked[0][i], -ranked[1][i], i))[:worst]
    where = [(run, *map(str, axis.heads[i])) for i in first]
    every = [(m.name, labels, values[m.key][i]) for i, labels in zip(first, where, strict=True) for m in HEAD_METRICS]
    return layers, [line(*entry) for entry in every if not math.isnan(entry[2])]


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    heads=st.integers(1, 5),
    worst=st.sampled_from([0, 1, 3, 100]),
)
def test_the_worst_head_stands_for_its_layer_and_the_worst_of_all_are_shown_one_by_one(
    seed: int, layers: int, heads: int, worst: int
) -> None:
    own = reading("run-1", layers, heads, np.random.default_rng(seed))
    of_layers, of_heads = head_tables(*own, worst)
    assert (set(of_layers.lines), of_heads.lines) == tables_of(own, worst)
    assert (len(of_layers), len(of_heads)) == (len(of_layers.lines), len(of_heads.lines))


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
