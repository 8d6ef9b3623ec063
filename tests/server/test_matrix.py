"""The heads of a run side by side at one step."""

import time
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from foreshock.contract.slots import Slot
from foreshock.server.testing import FakeRank


async def test_the_steps_of_a_run_of_months_are_listed_quickly(service: Any) -> None:
    count = 600_000
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(
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


async def test_a_matrix_of_layers_with_other_head_numbers_each_is_sent_in_windows(service: Any) -> None:
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
