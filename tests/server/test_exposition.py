"""/metrics: valid formats, the limit on series, and labels without free text."""

import asyncio
import itertools
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from sqlalchemy import event
from tests.server.scrapes import Shown, runs_of, series_of, shown

from foreshock.contract.metrics import metric as labels
from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.slots import Slot, identity_row
from foreshock.contract.wire import AgentHealth, Array, Finished, Sample, Switched
from foreshock.server.http.exposition import Line, encoder, head_tables, line
from foreshock.server.readings import Axis, MergedSteps
from foreshock.server.runs.current import with_sample
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank

OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


async def store_run(service: Any, run: str = "run-1", layers: int = 2) -> FakeRank:
    rank = FakeRank(run=run, layers=layers)
    await service.store(rank, rank.started(), rank.sample(1))
    health = AgentHealth(step=1, dropped={"queue_full": 3}, faults={"sender": 1})
    await service.store(rank, rank.verdict(1), health)
    return rank


@pytest.mark.promise("S15")
async def test_metrics_parse_in_both_formats_with_correct_content_type(service: Any) -> None:
    await store_run(service)
    plain = await service.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    openmetrics = await service.client.get("/metrics", headers=OPENMETRICS)
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = list(parse_openmetrics(openmetrics.text))  # type: ignore[no-untyped-call]
    known = {metric.name for metric in METRICS} | {m.layer_name for m in METRICS if m.head is not None}
    seen = {sample.name for family in families for sample in family.samples}
    assert seen <= known
    assert {"foreshock_head_score_max", "foreshock_layer_score_max", "foreshock_run_loss"} <= seen
    assert {(s[0], *s[1:]) for s in series_of(plain.text)} == {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))) for f in families for s in f.samples
    }


async def test_metrics_show_warning_forecast_and_dropped_events(service: Any) -> None:
    rank = await store_run(service)
    shown = series_of((await service.client.get("/metrics")).text)
    where = ("head=2", "layer=0", "run=run-1")
    assert shown["foreshock_warning_forecast_steps", *where] == 2100
    warning = ("cause=rounding", "head=2", "layer=0", "run=run-1", "severity=warning", "signal=offset")
    assert shown["foreshock_warning_active", *warning] == 1
    assert shown["foreshock_warning_raised_total", "cause=rounding", "run=run-1"] == 1
    assert shown["foreshock_agent_dropped_total", "reason=queue_full", "run=run-1"] == 3
    assert shown["foreshock_service_batches_total", "result=stored"] == 2
    await service.store(rank, rank.verdict(2, state="cleared"))
    after = series_of((await service.client.get("/metrics")).text)
    assert ("foreshock_warning_active", *warning) not in after
    assert after["foreshock_warning_raised_total", "cause=rounding", "run=run-1"] == 1


@pytest.mark.promise("S6")
async def test_unknown_methods_paths_and_names_create_no_series(service: Any) -> None:
    before = set(series_of((await service.client.get("/metrics")).text))
    for i in range(50):
        await service.client.request(f"M{i}", f"/p{i}?q{i}=1", headers={f"x-{i}": "1"})
        await service.client.post("/v1/batches", json={"run": f"r{i}"})
        await service.client.post("/v1/webhooks/alertmanager", json={"alerts": [{"status": f"s{i}"}]})
    after = set(series_of((await service.client.get("/metrics")).text))
    assert len(after - before) <= 2


@pytest.mark.settings(finished_run_seconds=3600.0)
async def test_finished_run_leaves_metrics_after_configured_time(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = await store_run(service)
    await service.store(rank, Finished(step=1, unix_seconds=1.0, status="completed"))
    shown = series_of((await service.client.get("/metrics")).text)
    assert shown["foreshock_run_active", "run=run-1"] == 0
    correct_time = time.time
    monkeypatch.setattr(time, "time", lambda: correct_time() + 3601.0)
    text = (await service.client.get("/metrics")).text
    assert "run-1" not in text


@pytest.mark.promise("S4")
@pytest.mark.settings(metrics_seconds=60.0)
async def test_concurrent_scrapes_share_one_snapshot(service: Any) -> None:
    exposer, taken = service.app.state.exposer, []
    take = exposer._take

    def counted(connection: Any, prefix: str) -> Any:
        taken.append(prefix)
        return take(connection, prefix)

    exposer._take = counted
    rank = await store_run(service)
    responses = await asyncio.gather(*(service.client.get("/metrics") for _ in range(20)))
    assert {response.status_code for response in responses} == {200}
    await service.store(rank, rank.sample(2))
    openmetrics = await service.client.get("/metrics", headers=OPENMETRICS)
    assert 'foreshock_run_step{run="run-1"} 1.0' in openmetrics.text
    assert taken == [""]


@pytest.mark.settings(silent_run_seconds=1000000000000.0)
async def test_heartbeat_updates_last_step_time_only_if_step_advances(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [5_000.0]
    monkeypatch.setattr("foreshock.server.recorder.time.time", lambda: clock[0])

    async def shown() -> list[float]:
        found = series_of((await service.client.get("/metrics")).text)
        return [found[f"foreshock_run_last_{what}_timestamp_seconds", "run=run-1"] for what in ("heard", "step")]

    rank, other = FakeRank(), FakeRank(rank=1)
    await service.store(rank, rank.started())
    assert await shown() == [5_000, 5_000], "the start of a run counts as a step"
    clock[0] = 5_010
    await service.store(rank, rank.sample(4))
    await service.store(other, other.started(), other.sample(4))
    clock[0] = 5_020
    await service.store(rank, AgentHealth(step=7))
    assert await shown() == [5_020, 5_020], "a heartbeat with a new step counts as a step"
    clock[0] = 9_000
    await service.store(rank, AgentHealth(step=7))
    await service.store(other, AgentHealth(step=4))
    assert await shown() == [9_000, 5_020], "heartbeats without a new step do not count as steps"
    clock[0] = 9_500
    resumed = FakeRank(boot="b2")
    await service.store(resumed, resumed.started(step=2), resumed.sample(3))
    assert await shown() == [9_500, 9_500], "a sample after a resume counts as a step despite its lower number"


@pytest.mark.promise("A11")
async def test_steps_skipped_by_loss_scaler_are_not_counted_as_nonfinite(service: Any) -> None:
    """A skipped step has nonfinite gradients and a finite loss. Without a loss, nonfinite gradients count."""
    changes_by_run: dict[str, dict[str, Any]] = {
        "skipped": {"loss": 2.5, "grad_norm": math.inf, "grad_norm_nonfinite_steps": 7},
        "broken": {"loss": math.nan, "loss_nonfinite_steps": 2, "grad_norm_nonfinite_steps": 5},
        "no loss": {"loss": None, "grad_norm_nonfinite_steps": 3},
        "healthy": {"loss": 2.5},
    }
    for name, changes in changes_by_run.items():
        rank = FakeRank(run=name.replace(" ", "-"))
        for step in (1, 2):
            sample = rank.sample(step).model_copy(update=changes if step == 1 else {})
            await service.store(rank, *([rank.started()] if step == 1 else []), sample)
    seen = series_of((await service.client.get("/metrics")).text)
    counted = {
        name: seen["foreshock_run_nonfinite_steps_total", f"run={name.replace(' ', '-')}"] for name in changes_by_run
    }
    assert counted == {"skipped": 0, "broken": 2, "no loss": 3, "healthy": 0}


NORMS = ("query_norm", "key_norm", "query_key_norm")
RARE = (*NORMS, "clip_factor", "clipped_steps", "entropy", "grad_norm", "learning_rate", "states", "gradient_error")


def sample(rank: FakeRank, step: int, *rare: str, of: float | None = None) -> Sample:
    """A sample in which the `rare` fields have the value `of` or the step. Without `states`, no row was counted."""
    value = float(step) if of is None else of
    words = rank.words(step) if "states" in rare else np.tile(identity_row(), (rank.count, 1))
    if "entropy" in rare:
        words[:, Slot.ENTROPY_ROWS] = 10
        words.view(np.float64)[:, Slot.ENTROPY_SUM] = 10 * value
    if "gradient_error" in rare:
        words.view(np.float64)[:, Slot.GRADIENT_ERROR_MAX] = value
    arrays = {name: Array.of(np.full(rank.count, value, np.float32)) for name in rare if name in (*NORMS, *RARE[3:5])}
    numbers = {name: value if name in rare else None for name in RARE[6:8]}
    return rank.sample(step).model_copy(update={"states": Array.of(words), **arrays, **numbers})


async def values_of(service: Any, run: str = "run-1") -> dict[str, set[float]]:
    """The values of the series of a run, by metric."""
    text = (await service.client.get("/metrics")).text
    found: dict[str, set[float]] = {}
    for family in parse_text(text):
        for one in family.samples:
            if one.labels.get("run") == run:
                found.setdefault(one.name, set()).add(one.value)
    return found


@pytest.mark.promise("S25")
async def test_value_measured_once_stays_in_every_later_scrape(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), sample(rank, 1))
    unmeasured = before = await values_of(service)
    for step, rare in enumerate(sorted(RARE, key=lambda name: name != "states"), 2):  # each field in its own sample,
        of_rows = ("states",) if rare in ("entropy", "gradient_error") else ()  # or together with the counted rows
        await service.store(rank, sample(rank, step, rare, *of_rows))
        now = await values_of(service)
        changed = {name for name in now if "_run_" not in name and now[name] != before.get(name)}
        assert any(rare in name for name in now.keys() - before.keys()) or (changed and rare == "states"), rare
        before = now
    new = before.keys() - unmeasured.keys()
    for step in range(20, 40):
        await service.store(rank, sample(rank, step))
        now = await values_of(service)
        assert now["foreshock_run_step"] == {step}
        assert {name: now.get(name) for name in new} == {name: before[name] for name in new}
    await service.store(rank, sample(rank, 40, *RARE))
    again = await values_of(service)
    of_rare = {name for rare in RARE for name in new if rare in name}
    assert of_rare
    assert all(again[name] != before[name] for name in of_rare)


@given(st.lists(st.sets(st.sampled_from(RARE)), min_size=1, max_size=5))
def test_last_measured_steps_do_not_depend_on_arrival_order(measured: list[set[str]]) -> None:
    rank = FakeRank(layers=1, heads=(0,))
    sent = [sample(rank, step, *rare) for step, rare in enumerate(measured, 1)]
    results = set()
    for order in itertools.permutations(sent):
        known: str | None = None
        for one in order:
            known = with_sample(known, one)
        steps = json.loads(known or "")
        newest, always, heads = steps.pop("")
        assert heads == 1
        results.add((newest, frozenset(always), frozenset(steps.items())))
        for name in RARE:
            last = max((step for step, rare in enumerate(measured, 1) if name in rare), default=None)
            assert (newest if name in always else steps.get(name)) == last
    assert len(results) == 1


@pytest.mark.promise("S15")
async def test_scrape_rereads_only_changed_runs(service: Any) -> None:
    ranks = [FakeRank(run=f"run-{number}") for number in range(6)]
    for rank in ranks:
        await service.store(rank, rank.started(), rank.sample(1))
    first = await shown(service)
    read: list[int] = []
    exposer = service.app.state.exposer
    read_changed = exposer.read_changed

    def counted(connection: Any, rows: Any) -> Any:
        read.extend(row.id for row in rows)
        return read_changed(connection, rows)

    exposer.read_changed = counted
    assert await shown(service) == first
    assert read == []
    await service.store(ranks[3], ranks[3].sample(2), ranks[3].verdict(2))
    text = (await service.client.get("/metrics")).text
    assert 'foreshock_run_step{run="run-3"} 2.0' in text
    assert "foreshock_warning_active{" in text
    assert len(read) == 1
    ended = Finished(step=3, unix_seconds=1.0, status="completed")
    await service.store(ranks[3], ended)
    deleted = await service.client.delete("/v1/runs/run-3", params={"who": "ann", "reason": "no longer needed"})
    assert deleted.status_code == 204
    assert "run-3" not in runs_of(await shown(service), "foreshock_run_step")
    assert len(exposer._made) == 5, "series of the deleted run are still in memory"


@pytest.mark.promise("S6")
def test_tenant_with_many_runs_does_not_displace_series_of_another(run_scenario: Any) -> None:
    crowd_secret, other_secret = "crowd-secret-of-one", "other-secret-of-two"
    tokens = (
        Token.of("crowd", crowd_secret, ("ingest",), "crowd/"),
        Token.of("other", other_secret, ("ingest", "read"), "other/"),
        Token.of("all", "all-secret-of-three", ("read",)),
    )

    async def scenario(service: Any) -> None:
        for number in range(60):
            service.client.headers["authorization"] = f"Bearer {crowd_secret}"
            noisy = FakeRank(run=f"crowd/{number:02}", layers=1)
            await service.store(noisy, noisy.started(), noisy.sample(1), noisy.verdict(1, layer=0))
        service.client.headers["authorization"] = f"Bearer {other_secret}"
        victim = FakeRank(run="other/victim")
        await service.store(victim, victim.started(), victim.sample(1), victim.verdict(1, severity="critical"))
        own = await shown(service)
        assert {dict(labels).get("run", "other/victim") for _, labels in own} == {"other/victim"}
        service.client.headers["authorization"] = "Bearer all-secret-of-three"
        found = await shown(service)
        for metric in ("warning_active", "run_active", "run_step"):
            assert "other/victim" in runs_of(found, f"foreshock_{metric}"), metric
        assert len(found) <= 100 + 2

    run_scenario(scenario, max_series=100, tokens=tokens)


@pytest.mark.promise("S4")
async def test_queries_per_scrape_do_not_grow_with_number_of_runs(service: Any) -> None:
    exposer, statements = service.app.state.exposer, list[str]()
    take = exposer._take

    def counted(connection: Any, prefix: str) -> Any:
        statements.clear()  # background work uses other connections
        event.listen(connection, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        return take(connection, prefix)

    exposer._take = counted

    async def queries() -> int:
        assert (await service.client.get("/metrics")).status_code == 200
        return len(statements)

    for number in range(3):
        await store_run(service, run=f"run-{number}")
    few = await queries()
    for number in range(3, 30):
        await store_run(service, run=f"run-{number}")
    assert await queries() == few
    assert 0 < few < 20


@pytest.mark.promise("S6")
def test_order_of_series_does_not_depend_on_arrival_order(run_scenario: Any) -> None:
    orders: list[list[tuple[str, str]]] = []

    async def scenario(service: Any) -> None:
        direction, rank = 1 - 2 * len(orders), FakeRank()
        switches = [
            Switched(
                id=one, step=1, outcome=one, heads=((0, 1),), before=("plain",), after=("exact_delta",), reason="x"
            )
            for one in ("applied", "refused")
        ]
        counts = [
            dict([(word, 1) for word in words][::direction]) for words in (labels.DROP_REASONS, labels.FAULT_COMPONENTS)
        ]
        await service.store(
            rank, rank.started(), rank.sample(1), AgentHealth(step=1, dropped=counts[0], faults=counts[1])
        )
        for one in [rank.verdict(1, name="w", cause="score growth"), rank.verdict(1), *switches][::direction]:
            await service.store(rank, one)
        await shown(service)
        [(_, series)] = service.app.state.exposer._made.values()
        orders.append([(name, text.partition("}")[0]) for own in (*series.urgent, series.whole) for name, text in own])

    for name in ("in order", "reversed"):
        run_scenario(scenario, name)
    assert orders[0] == orders[1]
    assert len(orders[0]) > 20


def series_of_runs(found: Shown) -> list[str]:
    return [name for name, own in found if "run" in dict(own)]


@pytest.mark.promise("S6")
@pytest.mark.settings(max_series=1100)
async def test_warning_state_and_step_of_every_run_precede_head_series(service: Any) -> None:
    names = {f"run-{number:03}" for number in range(40)}
    each = 0
    for name in sorted(names):
        rank = FakeRank(run=name, layers=4, heads=range(6))
        await service.store(rank, rank.started(), rank.sample(7), rank.verdict(7, layer=3, head=5, severity="critical"))
        each = each or len(series_of_runs(await shown(service)))
    found = await shown(service)
    for metric in ("warning_active", "warning_forecast_steps", "incident_active", "run_active", "run_step", "run_loss"):
        assert runs_of(found, f"foreshock_{metric}") == names, metric
    assert len(found) <= 1100 + 2  # plus the two counters of dropped series and log lines
    assert len(series_of_runs(found)) + service.app.state.counters.series_dropped == 40 * each
    assert runs_of(found, "foreshock_layer_risk_ratio")  # the rest of the limit is used for layers


@pytest.mark.promise("S6")
async def test_free_text_from_agent_never_becomes_a_label(service: Any) -> None:
    rank = FakeRank(run="noisy")
    await service.store(rank, rank.started(), rank.sample(1))
    before = len(await shown(service))
    for number in range(30):
        verdicts = [rank.verdict(1, name=f"w-{number}-{i}", signal=f"signal {number} {i}") for i in range(5)]
        switched = Switched(
            id=f"s-{number}",
            step=1,
            outcome="refused",
            heads=((0, 1),),
            before=("plain",),
            after=(f"mode_{number}",),
            reason="x",
        )
        health = AgentHealth(step=1, dropped={f"why-{number}-{i}": 1 for i in range(9)}, faults={f"who-{number}": 1})
        await service.store(rank, *verdicts, switched, health)
    found = await shown(service)
    assert len(found) - before <= 12
    known = {
        "signal": labels.SIGNALS,
        "reason": labels.DROP_REASONS,
        "component": labels.FAULT_COMPONENTS,
    }
    for _, labels_of_series in found:
        for label, value in labels_of_series:
            assert value in {*known.get(label, {value}), labels.OTHER}
    modes = {
        dict(labels_of_series)["mode"] for name, labels_of_series in found if name == "foreshock_switch_outcomes_total"
    }
    assert modes == {labels.OTHER}


@pytest.mark.promise("S6")
async def test_run_labels_are_limited_and_not_exported(service: Any, rank: FakeRank) -> None:
    started = rank.started().model_dump(mode="json")
    for invalid in ({f"l{i}": "x" for i in range(33)}, {"l": "x" * 257}, {"l l": "x"}, {"<b>": "x"}, {"l": 1}):
        body = {"wire": 1, "run": "run-1", "rank": 0, "boot": "b1", "sequence": 1}
        response = await service.client.post("/v1/batches", json={**body, "events": [{**started, "labels": invalid}]})
        assert response.status_code == 422, invalid
    series = []
    for number in range(2):
        own = FakeRank(run=f"run-{number}")
        long_labels = {f"label{number}-{i}": f"<script>{number}-{i}</script>" + "x" * 200 for i in range(32 * number)}
        await service.store(own, own.started().model_copy(update={"labels": long_labels}), own.sample(1))
        text = (await service.client.get("/metrics")).text
        assert "script" not in text
        assert "label1-" not in text
        series.append(sum(f'run="run-{number}"' in line for line in text.splitlines()))
    assert series[0] == series[1] > 0


Reading = tuple[str, Axis, MergedSteps]
BY_RISK = ("head.risk", "head.row_max_abs")


def reading(run: str, layers: int, heads: int, random: np.random.Generator) -> Reading:
    """A random reading: some heads without rows, and risks that are equal, missing or infinite."""
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
    """Reference implementation: the lines of the layers and of the worst heads of a run."""
    run, axis, own = reading
    values = {metric.key: own.head_values(metric)[-1].tolist() for metric in HEAD_METRICS}
    layers = set()
    for metric in HEAD_METRICS:
        of, badness = values[metric.key], metric.badness(np.array(values[metric.key])).tolist()
        for layer in axis.layers:
            there = [i for i, ref in enumerate(axis.heads) if ref[0] == layer and not math.isnan(of[i])]
            if there:
                layers.add(line(metric.layer_name, (run, str(layer)), of[max(there, key=badness.__getitem__)]))
    ranked = [[-1.0 if math.isnan(x) else x for x in values[key]] for key in ("head.risk", "head.row_max_abs")]
    counted = [i for i in range(len(axis.heads)) if any(not math.isnan(values[k][i]) for k in BY_RISK)]
    first = sorted(counted, key=lambda i: (-ranked[0][i], -ranked[1][i], i))[:worst]
    where = [(run, *map(str, axis.heads[i])) for i in first]
    every = [(m.name, place, values[m.key][i]) for i, place in zip(first, where, strict=True) for m in HEAD_METRICS]
    return layers, [line(*entry) for entry in every if not math.isnan(entry[2])]


@pytest.mark.promise("S15")
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    heads=st.integers(1, 5),
    worst=st.sampled_from([0, 1, 3, 100]),
)
def test_layer_series_show_worst_head_and_worst_heads_have_own_series(
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


@pytest.mark.promise("S15")
@pytest.mark.parametrize("accept", FORMATS)
@given(data=st.data())
def test_labels_and_numbers_are_formatted_like_prometheus_client(accept: str, data: Any) -> None:
    metric = data.draw(st.sampled_from(METRICS))
    rows = data.draw(st.dictionaries(st.tuples(*(texts for _ in metric.labels)), st.floats(), min_size=1, max_size=3))
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    for given_labels, value in rows.items():
        family.add_metric(given_labels, value)

    class One(Collector):
        def collect(self) -> Any:
            return [family]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(One())
    encode, _ = encoder(accept)
    written = encode({metric.name: [line(metric.name, texts, value)[1] for texts, value in rows.items()]})
    assert written == FORMATS[accept](registry)
