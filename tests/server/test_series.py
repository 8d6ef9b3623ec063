import itertools
import time
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from foreshock.contract.catalog import BY_KEY
from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array
from foreshock.server.curves.rollups import build
from foreshock.server.testing import FakeRank


async def store_run(service: Any, steps: range) -> FakeRank:
    rank = FakeRank()
    await service.store(rank, rank.started())
    events = [rank.sample(step, since=step - steps.step, loss=float(step % 97)) for step in steps]
    for i in range(0, len(events), 400):
        await service.store(rank, *events[i : i + 400])
    return rank


def test_a_series_keeps_every_minimum_and_maximum(play: Any) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(1, 1001))
        [line] = (await service.get("/v1/runs/run-1/series", metric="run.loss", max_points=7))["lines"]
        assert len(line["steps"]) == 7
        values = np.arange(1, 1001) % 97
        bounds = [0, *line["steps"]]
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            assert (line["low"][i], line["high"][i]) == (values[begin:end].min(), values[begin:end].max())
            assert line["last"][i] == values[end - 1]

    play(story)


def test_a_head_a_layers_worst_head_and_every_layer_can_be_asked_for(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = await store_run(service, range(1, 4))
        for key in ("head.score_offset", "head.score_max"):
            metric = BY_KEY[key]
            assert metric.head is not None
            assert metric.head.read is not None
            truth = np.stack([metric.head.read(rank.words(step)) for step in (1, 2, 3)])
            [own] = (await service.get("/v1/runs/run-1/series", metric=key, layer=1, head=2))["lines"]
            assert own["last"] == truth[:, 5].tolist()
            lines = (await service.get("/v1/runs/run-1/series", metric=key))["lines"]
            assert [line["layer"] for line in lines] == [0, 1]
            worst = np.argmax(metric.badness(truth[:, 3:]), axis=1)
            assert lines[1]["worst_head"] == worst.tolist()
            assert lines[1]["last"] == [truth[i, 3 + head] for i, head in enumerate(worst)]

    play(story)


@pytest.mark.parametrize("metric", ["run.loss", "head.score_max", "head.score_offset", "run.worst_risk"])
def test_rolled_up_spans_say_what_the_samples_say(play: Any, metric: str) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(4, 9000, 4))
        query = {"metric": metric, "max_points": 8, "from_step": 0}
        if metric.startswith("head."):
            query |= {"layer": 1, "head": 2}
        before = await service.get("/v1/runs/run-1/series", **query)
        for span in range(8):
            assert await build(service.app.state.store, 1, span)
        async with service.app.state.store.read() as connection:
            count = (await connection.execute(text("SELECT count(*) FROM rollups"))).scalar()
        assert count > 0
        after = await service.get("/v1/runs/run-1/series", **query)
        for old, new in zip(before["lines"], after["lines"], strict=True):
            # A span of 1024 steps counts where it ends, so compare where both series hold all that came before.
            for key, pick in (("low", min), ("high", max)):
                assert pick(old[key]) == pytest.approx(pick(new[key]), rel=1e-6)
            assert old["steps"][-1] == new["steps"][-1]
            assert old["last"][-1] == pytest.approx(new["last"][-1], rel=1e-6)

    play(story)


def test_many_curves_at_once_say_what_each_says_alone(play: Any) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(4, 9000, 4))
        for span in range(8):
            assert await build(service.app.state.store, 1, span)
        names = [
            "run.loss",
            "run.worst_risk",
            "head.score_max:1:2",
            "head.score_max:0",
            "head.score_offset:1",
            "head.risk:9",
        ]
        for query in ({"max_points": 8}, {"max_points": 500, "from_step": 2000, "to_step": 3000}):
            found = (await service.get("/v1/runs/run-1/curves", line=names, **query))["lines"]
            assert [line["metric"] for line in found] == [name.split(":")[0] for name in names]
            assert found.pop()["steps"] == []  # the run has no layer 9
            for name, line in zip(names, found, strict=False):
                metric, *where = name.split(":")
                alone = dict(zip(("layer", "head"), where, strict=False))
                [same] = (await service.get("/v1/runs/run-1/series", metric=metric, **alone, **query))["lines"]
                assert {key: line[key] for key in same} == same
                assert len(same["steps"]) > 5

    play(story)


def test_what_would_fill_the_memory_is_drawn_in_fewer_points(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(1, 101))
        query = {"line": ["run.loss", "head.score_max:0", "head.score_max:1:2"], "max_points": 50}
        whole = (await service.get("/v1/runs/run-1/curves", **query))["lines"]
        monkeypatch.setattr("foreshock.server.curves.series._VALUES", 10 * (3 * 32 + 3 + 1))
        some = (await service.get("/v1/runs/run-1/curves", **query))["lines"]
        assert [len(line["steps"]) for line in whole] == [50] * 3
        assert [len(line["steps"]) for line in some] == [10] * 3
        assert [max(line["high"]) for line in some] == [max(line["high"]) for line in whole]

    play(story)


def test_a_wide_runs_few_samples_are_drawn_from_its_roll_ups(play: Any) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(1000, 9000, 1000))
        query = {"line": ["head.score_max:1:2", "head.score_max:0", "run.loss"], "max_points": 50}
        before = await service.get("/v1/runs/run-1/curves", **query)
        for span in range(8):
            assert await build(service.app.state.store, 1, span)
        async with service.app.state.store.write() as connection:
            await connection.execute(text("UPDATE samples SET arrays = NULL"))
        after = await service.get("/v1/runs/run-1/curves", **query)
        for old, new in zip(before["lines"], after["lines"], strict=True):
            assert new["steps"] == old["steps"]
            for key in ("low", "high", "last"):
                assert new[key] == pytest.approx(old[key], rel=1e-6)

    play(story)


@pytest.mark.parametrize("rolled", [False, True], ids=["from samples", "from roll-ups"])
def test_a_metric_that_is_measured_now_and_then_is_shown_as_it_was_last_measured(play: Any, rolled: bool) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started())
        norms = {40: 7.0, 4000: 8.0}
        for step in range(20, 6000, 20):
            sample = rank.sample(step, since=step - 20)
            if step in norms:
                own = Array.of(np.full(rank.count, norms[step], dtype=np.float32))
                sample = sample.model_copy(update={"query_norm": own})
            await service.store(rank, sample)
        for span in range(5 if rolled else 0):
            assert await build(service.app.state.store, 1, span)
        expected = {
            20: (None, None),
            40: (40, 7.0),
            2000: (40, 7.0),
            3980: (40, 7.0),
            4000: (4000, 8.0),
            5980: (4000, 8.0),
        }
        if not rolled:
            del expected[3980]  # further back than samples are looked through
        for step, (measured, value) in expected.items():
            found = await service.get("/v1/runs/run-1/matrix", metric="head.query_norm", step=step)
            assert found["step"] == step
            assert {each for row in found["values"] for each in row} == {value}
            if measured is None:
                assert found["measured_step"] is None
            else:
                assert measured <= found["measured_step"] < measured + 128

    play(story)


def test_a_late_sample_throws_its_roll_up_away(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = await store_run(service, range(1, 2200))
        for span in (0, 1):
            assert await build(service.app.state.store, 1, span)
        late = FakeRank(rank=1)
        await service.store(late, late.started(), late.sample(500, loss=-500.0))
        lines = (await service.get("/v1/runs/run-1/series", metric="run.loss", max_points=4))["lines"]
        assert min(lines[0]["low"]) == (-500.0 + 500 % 97) / 2
        assert rank.sequence > 1

    play(story)


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/v1/runs/nobody/series?metric=run.loss", 404, "no run"),
        ("/v1/runs/run-1/series?metric=run.unknown", 422, "allowed are"),
        ("/v1/runs/run-1/matrix?metric=run.loss", 422, "allowed are"),
        ("/v1/runs/run-1/series?metric=head.score_max&layer=9", 404, "no layer 9"),
        ("/v1/runs/run-1/series?metric=head.score_max&layer=0&head=9", 404, "no layer 0 head 9"),
        ("/v1/runs/run-1/series?metric=head.score_max&head=1", 422, "head needs layer"),
        ("/v1/runs/run-1/series?metric=run.loss&max_points=0", 422, "wrong"),
        ("/v1/runs/run-1/curves", 422, "wrong"),
        ("/v1/runs/run-1/curves?line=run.loss:0", 422, "METRIC"),
        ("/v1/runs/run-1/curves?line=head.score_max", 422, "METRIC:LAYER"),
        ("/v1/runs/run-1/curves?line=head.score_max:0:1:2", 422, "METRIC"),
        ("/v1/runs/run-1/curves?line=head.score_max:-1", 422, "METRIC"),
        ("/v1/runs/run-1/curves?line=run.unknown", 422, "allowed are"),
        ("/v1/runs/nobody", 404, "no run"),
        ("/v1/commands/nothing", 404, "no command"),
    ],
)
def test_wrong_questions_get_a_clear_sentence(play: Any, path: str, status: int, word: str) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        answer = await service.client.get(path)
        assert answer.status_code == status
        assert word in answer.json()["detail"]
        assert answer.headers["content-type"] == "application/problem+json"

    play(story)


def test_a_run_name_may_hold_slashes_dots_and_colons(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank(run="team/../a:b.c/x")
        await service.store(rank, rank.started(), rank.sample(1))
        for tail in ("", "/series", "/matrix", "/events", "/commands"):
            path = f"/v1/runs/team/%2E%2E/a:b.c/x{tail}"
            answer = await service.client.get(path, params={"metric": "head.score_max"})
            assert answer.status_code == 200, path

    play(story)


def test_runs_are_listed_page_by_page(play: Any) -> None:
    async def story(service: Any) -> None:
        for number in range(5):
            rank = FakeRank(run=f"run-{number}")
            await service.store(rank, rank.started(), rank.sample(1))
        seen: list[str] = []
        cursor = None
        while True:
            page = await service.get("/v1/runs", limit=2, **({"cursor": cursor} if cursor else {}))
            seen += [run["run"] for run in page["runs"]]
            if (cursor := page["next_cursor"]) is None:
                break
        assert seen == [f"run-{number}" for number in (4, 3, 2, 1, 0)]

    play(story)


def test_a_matrix_of_one_step_among_many_is_quick(play: Any) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(1, 3000))
        times = []
        for _ in range(5):
            began = time.process_time()  # of every thread; what else the machine does is not the service's fault
            await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=1500)
            times.append(time.process_time() - began)
        assert min(times) < 0.05

    play(story)


def test_the_steps_of_a_run_of_months_are_listed_quickly(play: Any) -> None:
    count = 600_000

    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        async with service.app.state.store.write() as connection:
            await connection.execute(
                text(
                    "WITH RECURSIVE n(step) AS (SELECT 2 UNION ALL SELECT step + 1 FROM n WHERE step < :count) "
                    "INSERT INTO samples (run_id, boot_id, sequence, position, step, since_step, unix_seconds, "
                    "nan_columns, loss_nonfinite_steps, grad_norm_nonfinite_steps) "
                    "SELECT 1, 1, step, 0, step, step - 1, step, 0, 0, 0 FROM n"
                ),
                {"count": count},
            )
        times = []
        for _ in range(5):
            began = time.process_time()
            found = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=1, max_steps=500)
            times.append(time.process_time() - began)
        assert min(times) < 0.05
        steps = found["steps"]
        assert (steps[0], steps[-1]) == (1, count)
        assert 490 <= len(steps) <= 500
        assert max(np.diff(steps)) < 2 * count / 490

    play(story)


def test_the_catalogue_is_served_with_all_that_is_needed_to_draw(play: Any) -> None:
    async def story(service: Any) -> None:
        served = {entry["key"]: entry for entry in (await service.get("/v1/catalog"))["metrics"]}
        assert set(served) == {metric.key for metric in BY_KEY.values() if metric.has_series}
        for key, entry in served.items():
            metric = BY_KEY[key]
            assert (entry["signed"], entry["scale"], entry["percent"]) == (metric.signed, metric.scale, metric.percent)
            assert (entry["levels"] is None) == (metric.levels is None)
        assert served["head.score_max"]["levels"] == {"alarm": 512.0, "watch": 100.0, "below": False}
        assert served["head.mode"]["chart"] is None
        first = [key for key, entry in served.items() if entry["chart"] == "first"]
        assert first[:2] == ["head.score_offset", "head.score_max"]
        assert first == sorted(first, key=lambda key: BY_KEY[key].chart or 0)

    play(story)


def test_a_matrix_of_layers_with_other_head_numbers_each_is_sent_in_windows(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank(layers=1000, heads=(0,))
        rank.layers = tuple(layer.model_copy(update={"heads": (layer.layer,)}) for layer in rank.layers)
        await service.store(rank, rank.started(), rank.sample(1))
        seen: dict[int, float] = {}
        asked = 0
        while True:
            answer = await service.client.get(f"/v1/runs/run-1/matrix?metric=head.score_max&from_layer={asked}")
            assert answer.status_code == 200
            assert len(answer.content) < 4 * 2**20
            said = answer.json()
            for layer, row in zip(said["layers"], said["values"], strict=True):
                [value] = [value for value in row if value is not None]
                assert row[said["heads"].index(layer)] == value
                seen[layer] = value
            if said["next_layer"] is None:
                break
            assert said["next_layer"] == said["layers"][-1] + 1
            asked = said["next_layer"]
        words = rank.words(1).view(np.float64)
        assert [seen[layer] for layer in range(1000)] == pytest.approx(words[:, Slot.SCORE_MAX])

    play(story)


@pytest.mark.promise("S5")
@pytest.mark.parametrize("power", ["999", "1024", "\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT ZERO}"])
@pytest.mark.parametrize("last", ["1", "9999999999999999999", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_a_cursor_that_the_service_never_gave_is_refused(play: Any, power: str, last: str) -> None:
    async def story(service: Any) -> None:
        answer = await service.client.get("/v1/runs", params={"cursor": f"0x1.fffffffffffffp+{power}-{last}"})
        assert answer.status_code == 422

    play(story)
