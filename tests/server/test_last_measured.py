"""/metrics shows what is measured now and then at every scrape, as it was measured last."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text

from foreshock.contract.slots import Slot, identity_row
from foreshock.contract.wire import Array, Sample
from foreshock.server.runs.newest import with_sample
from foreshock.server.testing import FakeRank

NORMS = ("query_norm", "key_norm", "query_key_norm")
RARE = (*NORMS, "clip_factor", "clipped_steps", "entropy", "grad_norm", "learning_rate", "states", "gradient_error")


def sample(rank: FakeRank, step: int, *rare: str, of: float | None = None) -> Sample:
    """A sample of a step that measured these; each is the step, or `of`. Without states no row of any head was seen."""
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


async def shown(service: Any, run: str = "run-1") -> dict[str, set[float]]:
    """By metric the values of a run's series."""
    text = (await service.client.get("/metrics")).text
    found: dict[str, set[float]] = {}
    for family in parse_text(text):
        for one in family.samples:
            if one.labels.get("run") == run:
                found.setdefault(one.name, set()).add(one.value)
    return found


@pytest.mark.promise("S25")
async def test_what_was_measured_once_is_in_every_scrape_from_then_on(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), sample(rank, 1))
    unmeasured = before = await shown(service)
    for step, rare in enumerate(sorted(RARE, key=lambda name: name != "states"), 2):  # each in a sample of its own,
        of_rows = ("states",) if rare in ("entropy", "gradient_error") else ()  # or with the rows that it is of
        await service.store(rank, sample(rank, step, rare, *of_rows))
        now = await shown(service)
        changed = {name for name in now if "_run_" not in name and now[name] != before.get(name)}
        assert any(rare in name for name in now.keys() - before.keys()) or (changed and rare == "states"), rare
        before = now
    new = before.keys() - unmeasured.keys()
    for step in range(20, 40):
        await service.store(rank, sample(rank, step))
        now = await shown(service)
        assert now["foreshock_run_step"] == {step}
        assert {name: now.get(name) for name in new} == {name: before[name] for name in new}
    await service.store(rank, sample(rank, 40, *RARE))
    again = await shown(service)
    of_rare = {name for rare in RARE for name in new if rare in name}
    assert of_rare
    assert all(again[name] != before[name] for name in of_rare)


@given(st.lists(st.sets(st.sampled_from(RARE)), min_size=1, max_size=5))
def test_which_samples_measured_what_does_not_depend_on_their_order_of_arrival(measured: list[set[str]]) -> None:
    rank = FakeRank(layers=1, heads=(0,))
    sent = [sample(rank, step, *rare) for step, rare in enumerate(measured, 1)]
    left = set()
    for order in itertools.permutations(sent):
        known: str | None = None
        for one in order:
            known = with_sample(known, one)
        steps = json.loads(known or "")
        newest, always, heads = steps.pop("")
        assert heads == 1
        left.add((newest, frozenset(always), frozenset(steps.items())))
        for name in RARE:
            last = max((step for step, rare in enumerate(measured, 1) if name in rare), default=None)
            assert (newest if name in always else steps.get(name)) == last
    assert len(left) == 1
