"""Rows chosen in every entry of the batch and computed again: chosen evenly; the same counts in parts."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.probing import EVERY_ROW, probed, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, new_state
from foreshock.monitor.attention.probe import Sampling, new_ticks, probe_rows, start_sampling, stop_sampling
from foreshock.monitor.attention.probed_rows import HELD_BYTES, chosen_rows, drawn, sizes


@pytest.mark.parametrize(
    ("count", "batch", "queries", "chosen"),
    [
        (4096, 32, 256, (32, 128)),  # as many of each entry
        (4096, 16, 100, (16, 100)),  # all there are
        (4096, 2000, 49, (256, 16)),  # entries that are too many take turns
        (5, 3, 24, (1, 5)),
        (5, 3, 4, (2, 4)),
        (1, 1, 1, (1, 1)),
        (100, 3, 1000, (3, 34)),
    ],
)
def test_rows_are_spread_over_the_batch_with_enough_of_each_entry(
    count: int, batch: int, queries: int, chosen: tuple[int, int]
) -> None:
    assert sizes(count, batch, queries) == chosen


@pytest.mark.parametrize(("count", "batch", "queries"), [(20, 3, 24), (70, 3, 24), (33, 7, 5), (40, 5, 30)])
def test_every_row_has_an_equal_chance_and_each_stretch_of_a_sequence_gives_one(
    count: int, batch: int, queries: int
) -> None:
    entries, of_each = sizes(count, batch, queries)
    ticks, seen = 3000, np.zeros((batch, queries))
    tick = new_ticks(3, torch.device("cpu"))[2]
    for _ in range(ticks):
        entry, row = (x.numpy() for x in chosen_rows(tick, count, batch, queries))
        assert len(set(entry)) == entries
        stretch = np.arange(of_each) * queries / of_each
        assert (row >= np.floor(stretch)).all()
        assert (row < np.ceil(stretch + queries / of_each)).all()
        np.add.at(seen, (entry[:, None], row), 1)
        tick += 1
    expected = ticks * entries * of_each / (batch * queries)
    spread = np.abs(seen - expected) / np.sqrt(expected)
    assert spread.max() < 4.5
    assert (seen.sum(1) - expected * queries).max() <= 6 * np.sqrt(ticks) * of_each


def test_all_rows_are_all_rows_once() -> None:
    entry, row = chosen_rows(torch.tensor([7]), 60, 3, 20)
    assert entry.tolist() == [0, 1, 2]
    assert row.tolist() == [list(range(20))] * 3


def test_no_two_layers_and_no_two_steps_draw_the_same_numbers() -> None:
    index = torch.arange(64)
    draws = [drawn(tick * 64 + index) for first in new_ticks(2, torch.device("cpu")) for tick in (first, first + 1)]
    numbers = torch.cat(draws).tolist()
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("rows", [20, 40, EVERY_ROW])
@pytest.mark.parametrize("held", [4 * 24 * 4 * 7, 4 * 24 * 4 * 40, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 4, {"causal": "top_left"}),
        (6, 2, {"window": (7, 3)}),
        (3, 1, {"causal": "bottom_right", "scale": 0.3, "softcap": 12.0}),
    ],
)
def test_rows_are_measured_a_part_at_a_time_to_the_same_counts(
    monkeypatch: pytest.MonkeyPatch, held: int, rows: int, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    arguments = tensors(torch.float64, heads=heads, kv_heads=kv_heads, seed=rows, offset=0.0)
    sampling = Sampling(rows, strict=True)
    whole = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", held)
    parts = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    assert slot_values(whole, Slot.ROWS).min() > 0
    for slot in Slot:
        np.testing.assert_allclose(
            slot_values(parts, slot), slot_values(whole, slot), rtol=1e-11, atol=1e-11, err_msg=slot.name
        )


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that an operation gave."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if isinstance(given, Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, given.nbytes)
        return given


@pytest.mark.parametrize(("dtype", "numerics"), [(torch.bfloat16, "kernel"), (torch.float32, "float32")])
def test_what_is_held_is_bounded_however_many_rows_are_asked_for(dtype: torch.dtype, numerics: Any) -> None:
    query, key, value, grad = (x[:2].repeat(1, 1, 90, 1) for x in tensors(dtype, heads=4, kv_heads=2))  # 2160 tokens
    state, tick = new_state(4), new_ticks(1, query.device)[0]
    number = start_sampling(Sampling(EVERY_ROW, strict=True))
    spec = AttentionSpec(0.25, "top_left", numerics=numerics).text
    try:
        with Largest() as largest:  # type: ignore[no-untyped-call]
            probe_rows(grad, grad, query, key, value, None, None, None, state, tick, None, number, spec)
    finally:
        stop_sampling(number)
    assert slot_values(state.numpy(), Slot.ROWS).tolist() == [2 * 2160] * 4
    assert largest.nbytes <= HELD_BYTES
