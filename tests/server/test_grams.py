"""Gram matrices of spread inputs: the service adds them up; truth is the SVD of the whole weight of each head."""

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import func, select
from tests.server.replaying import seen_after

from foreshock.contract.wire import MAX_GRAM_DIM, Array, Batch, Grams
from foreshock.server.ingest import grams
from foreshock.server.store.schema import grams as waiting
from foreshock.server.testing import FakeRank

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 24
CUTS = ((0, 10), (10, 17), (17, WIDTH))
NORMS = ("head.query_norm", "head.key_norm", "head.query_key_norm")
LAYERS = 2


def weights(step: int, layer: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """W_Q [HEADS, DIM, WIDTH] and W_K of the key heads."""
    drawn = np.random.default_rng([step, layer]).normal(size=(HEADS + KV_HEADS, DIM, WIDTH)).astype(np.float32)
    return drawn[:HEADS], drawn[HEADS:]


def true_norms(step: int, layer: int = 0) -> np.ndarray[Any, Any]:
    """By SVD: [3, HEADS]."""
    query, key = weights(step, layer)
    key = np.repeat(key, HEADS // KV_HEADS, axis=0)
    both = query.astype(np.float64).transpose(0, 2, 1) @ key
    return np.stack([np.linalg.svd(w, compute_uv=False)[:, 0] for w in (query, key, both)])


def triangles(rows: np.ndarray[Any, Any]) -> Array:
    upper = np.triu_indices(rows.shape[1])
    return Array.of((rows @ rows.transpose(0, 2, 1))[:, upper[0], upper[1]].astype(np.float32))


def part(step: int, rank: int, *, layer: int = 0, began: int = 0, scale: float = 1.0, **changes: Any) -> Grams:
    """What the rank sends of its part of the inputs."""
    start, stop = CUTS[rank]
    query, key = (scale * w[:, :, start:stop] for w in weights(step, layer))
    fields: dict[str, Any] = {
        "step": step,
        "began_step": began,
        "layer": layer,
        "heads": tuple(range(HEADS)),
        "head_dim": DIM,
        "inputs": (start, stop),
        "all_inputs": WIDTH,
        "query": triangles(query),
        "key": triangles(key),
    }
    return Grams(**{**fields, **changes})


def ranks(boot: str = "b1") -> list[FakeRank]:
    return [FakeRank(rank=rank, boot=boot, layers=LAYERS, heads=range(HEADS)) for rank in range(len(CUTS))]


async def added_up(service: Any) -> None:
    """Wait until nothing is left to be added up."""
    async with asyncio.timeout(60):
        while not service.app.state.adder.idle:
            await asyncio.sleep(0.01)


async def shown(service: Any, step: int | None = None) -> np.ndarray[Any, Any]:
    """The norms in the service, [3, layers, heads]."""
    await added_up(service)
    query = {} if step is None else {"step": step}
    found = [await service.get("/v1/runs/run-1/matrix", metric=key, **query) for key in NORMS]
    return np.array([one["values"] for one in found], dtype=float)


async def parts_waiting(service: Any) -> int:
    await added_up(service)
    async with service.app.state.store.read() as connection:
        count: int = (await connection.execute(select(func.count()).select_from(waiting))).scalar_one()
    return count


def test_parts_add_up_to_the_norms_of_the_whole_weights_in_every_view(play: Any) -> None:
    async def story(service: Any) -> None:
        senders = ranks()
        for number, rank in enumerate(senders):
            if number:
                assert np.isnan(await shown(service)).all()
            await service.store(rank, rank.started(), rank.sample(10), *(part(10, number, layer=n) for n in range(2)))
        measured = await shown(service)
        for layer in range(LAYERS):
            np.testing.assert_allclose(measured[:, layer], true_norms(10, layer), rtol=1e-6)
        assert await parts_waiting(service) == 0
        [line] = (await service.get("/v1/runs/run-1/series", metric=NORMS[0], layer=1, head=3))["lines"]
        assert (line["steps"], line["last"]) == ([10], [measured[0, 1, 3]])
        text = (await service.client.get("/metrics")).text
        assert f'foreshock_head_query_norm{{head="3",layer="1",run="run-1"}} {float(measured[0, 1, 3])!r}' in text
        assert (await service.get("/v1/runs/run-1"))["last_step"] == 10

    play(story)


def test_a_sum_that_lacks_a_part_shows_nothing_and_expires(play: Any) -> None:
    async def story(service: Any) -> None:
        for number, rank in enumerate(ranks()[:2]):
            await service.store(rank, rank.started(), rank.sample(10), part(10, number))
        assert np.isnan(await shown(service)).all()
        assert await parts_waiting(service) == 2
        received = (await _received(service))[0]
        await grams.expire(service.app.state.store, received + grams.KEPT_SECONDS - 1)
        assert await parts_waiting(service) == 2
        await grams.expire(service.app.state.store, received + grams.KEPT_SECONDS + 60)
        assert await parts_waiting(service) == 0

    play(story)


async def _received(service: Any) -> list[float]:
    async with service.app.state.store.read() as connection:
        return list((await connection.execute(select(waiting.c.received))).scalars())


def test_norms_of_a_wide_layer_are_made_some_heads_at_a_time_and_are_the_same(play: Any) -> None:
    wide, dim = 24, 4
    drawn = np.random.default_rng(3).normal(size=(wide + wide // 2, dim, 6)).astype(np.float32)
    matrices = [triangles(rows) for rows in (drawn[:wide], drawn[wide:])]
    whole = grams.spectral_norms([b"".join(array.numpy().tobytes() for array in matrices)], wide, dim)

    async def story(service: Any) -> None:
        rank = FakeRank(layers=1, heads=range(wide))
        fields: dict[str, Any] = {"heads": tuple(range(wide)), "head_dim": dim, "inputs": (0, WIDTH)}
        await service.store(
            rank, rank.started(), rank.sample(10), part(10, 0, **fields, query=matrices[0], key=matrices[1])
        )
        assert (await shown(service, 10))[:, 0].tolist() == whole.astype(float).tolist()

    play(story)


def test_batches_are_stored_while_norms_are_added_up_and_what_a_stop_interrupts_is_done_at_the_next_start(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = ranks()
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*_: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        raise OSError("the service stops in the middle of it")

    async def story(service: Any) -> None:
        for number, rank in enumerate(senders):
            await service.store(rank, rank.started(), rank.sample(10), *(part(10, number, layer=n) for n in range(2)))
        assert await asyncio.to_thread(begun.wait, 60)
        async with asyncio.timeout(60):
            assert (await service.store(senders[0], senders[0].sample(20))).acknowledged == 2
        go_on.set()

    async def later(service: Any) -> None:
        np.testing.assert_allclose((await shown(service, 10))[:, 1], true_norms(10, 1), rtol=1e-6)
        assert await parts_waiting(service) == 0

    with monkeypatch.context() as wide:
        wide.setattr(grams, "spectral_norms", slowly)
        play(story)
    play(later)


def test_no_more_than_so_many_bytes_of_parts_wait_and_the_oldest_steps_go(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = (HEADS + KV_HEADS) * DIM * (DIM + 1) // 2 * 4
    monkeypatch.setattr(grams, "MAX_BYTES", 3 * each)

    async def story(service: Any) -> None:
        first, second, third = ranks()
        await service.store(first, first.started(), *(part(step, 0) for step in (10, 20, 30, 40, 50)))
        assert await parts_waiting(service) == 3
        await service.store(second, second.started(), part(50, 1), part(10, 1))
        await service.store(third, third.started(), part(50, 2), part(10, 2))
        np.testing.assert_allclose((await shown(service, 50))[:, 0], true_norms(50), rtol=1e-6)
        assert (await shown(service, 10)).size == 0 or np.isnan(await shown(service, 10)).all()

    play(story)


def test_a_head_with_a_gram_matrix_that_is_not_finite_has_no_norm_and_spoils_no_other() -> None:
    query, key = weights(1)
    query[1, 0, 0] = np.inf
    key[1, 2, 3] = np.nan
    with np.errstate(invalid="ignore"):
        parts = [
            np.concatenate([triangles(w[:, :, start:stop]).numpy() for w in (query, key)]).tobytes()
            for start, stop in CUTS
        ]
    norms = grams.spectral_norms(parts, HEADS, DIM)
    expected = true_norms(1)
    expected[0, 1] = expected[2, 1] = np.nan
    expected[1:, 2:] = np.nan
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


def test_norms_keep_their_value_where_their_gram_matrices_nearly_leave_float32() -> None:
    scale = 1e18
    parts = [
        np.concatenate([triangles(np.float32(scale) * w[:, :, a:b]).numpy() for w in weights(2)]).tobytes()
        for a, b in CUTS
    ]
    norms = grams.spectral_norms(parts, HEADS, DIM).astype(np.float64)
    np.testing.assert_allclose(norms[:2] / scale, true_norms(2)[:2], rtol=1e-6)
    np.testing.assert_allclose(norms[2] / scale**2, true_norms(2)[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inputs": (10, 10)}, "do not lie within"),
        ({"inputs": (0, WIDTH + 1)}, "do not lie within"),
        ({"heads": (0, 1, 2)}, "query and key must be float32"),
        ({"head_dim": DIM + 1}, "query and key must be float32"),
        ({"key": triangles(np.ones((3, DIM, 4), dtype=np.float32))}, "a divisor of 4"),
        ({"query": Array.of(np.zeros((HEADS, DIM * (DIM + 1) // 2)))}, "query and key must be float32"),
        ({"head_dim": MAX_GRAM_DIM + 1}, "less than or equal to 256"),
    ],
)
def test_a_part_that_cannot_be_one_is_refused_with_a_sentence(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        part(10, 0, **changes)


def a_run_that_restarts() -> list[Batch]:
    """Three ranks measure at 10, 20 and 30; rank 2 dies before it sends its part of 30; all go on from 20."""
    batches = []
    for number, rank in enumerate(ranks()):
        batches.append(rank.batch(rank.started()))
        for step in (10, 20, 30):
            batches.append(rank.batch(rank.sample(step, since=step - 10)))
            if (number, step) != (2, 30):
                batches += [rank.batch(part(step, number, layer=layer)) for layer in range(LAYERS)]
    for number, rank in enumerate(ranks("b2")):
        batches.append(rank.batch(rank.started(step=20)))
        for step in (30, 40):
            batches.append(rank.batch(rank.sample(step, since=step - 10)))
            batches += [rank.batch(part(step, number, layer=layer, began=20, scale=2.0)) for layer in range(LAYERS)]
    return batches


async def everything(service: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {f"matrix {step}": (await shown(service, step)).tolist() for step in (10, 20, 30, 40)}
    for key in NORMS:
        seen[key] = await service.get("/v1/runs/run-1/series", metric=key, layer=1)
    return seen


def played(player: Any, batches: list[Batch], at_once: int = 1) -> dict[str, Any]:
    return seen_after(player, batches, everything, at_once)


@pytest.fixture(scope="module")
def in_order() -> dict[str, Any]:
    return {}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), repeats=st.integers(0, 20), at_once=st.integers(1, 8))
def test_any_order_and_repetition_of_the_parts_gives_the_same_norms(
    player: Any, in_order: dict[str, Any], seed: int, repeats: int, at_once: int
) -> None:
    batches = a_run_that_restarts()
    if not in_order:
        in_order.update(played(player, batches))
        for step, scale in ((10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)):
            expected = np.stack([true_norms(step, layer) for layer in range(LAYERS)], axis=1)
            expected *= np.array([scale, scale, scale**2])[:, None, None]
            np.testing.assert_allclose(in_order[f"matrix {step}"], expected, rtol=1e-6)
    shuffled = random.Random(seed)
    mixed = batches + shuffled.choices(batches, k=repeats)
    shuffled.shuffle(mixed)
    got = played(player, mixed, at_once)
    assert json.dumps(got) == json.dumps(in_order)


def test_two_replicas_of_one_store_add_up_the_parts_between_them(player: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    senders = ranks()

    async def with_both(first: Any) -> None:
        async def story(second: Any) -> None:
            for number, rank in enumerate(senders):
                replica = (first, second)[number % 2]
                await replica.store(rank, rank.started(), rank.sample(10), part(10, number))
            await added_up(second)
            for replica in (first, second):
                np.testing.assert_allclose((await shown(replica))[:, 0], true_norms(10), rtol=1e-6)

        await player(url, story)

    asyncio.run(player(url, with_both))
