"""Rows drawn at random and computed again: drawn evenly; the same counts in parts, with copies or without."""

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
from foreshock.monitor.attention.probed_rows import drawn


def test_numbers_are_drawn_evenly_and_anew_at_every_tick() -> None:
    below, ticks = 24, 2000
    seen = np.zeros((4, below))
    tick = new_ticks(3, torch.device("cpu"))[2]
    for _ in range(ticks):
        numbers = drawn(tick, (4, 6), below)
        for head in range(4):
            seen[head] += np.bincount(numbers[head], minlength=below)
        tick += 1
    expected = ticks * 6 / below
    chi_square = ((seen - expected) ** 2 / expected).sum(1)
    assert (chi_square < 55).all()  # 23 degrees of freedom: 1 in 10,000
    assert (chi_square > 5).all()


def test_no_two_layers_draw_the_same_rows() -> None:
    first, second = (drawn(tick, (2, 64), 10**9) for tick in new_ticks(2, torch.device("cpu")))
    assert not set(first.flatten().tolist()) & set(second.flatten().tolist())


@pytest.mark.parametrize("copies", [False, True])
def test_rows_are_measured_a_part_at_a_time_to_the_same_counts(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    arguments = tensors(torch.bfloat16)
    whole = probed(*arguments, arguments[0], Sampling(EVERY_ROW, 0))
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows._copies", lambda device: copies)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", 4 * 24 * 4 * 7 * (16 if copies else 1))
    parts = probed(*arguments, arguments[0], Sampling(EVERY_ROW, 0))
    for slot in Slot:
        np.testing.assert_allclose(slot_values(parts, slot), slot_values(whole, slot), rtol=1e-12, err_msg=slot.name)


@pytest.mark.parametrize("rows", [3, 40, EVERY_ROW])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 4, {"causal": "top_left"}),
        (6, 2, {"window": (7, 3)}),
        (3, 1, {"causal": "bottom_right", "scale": 0.3, "softcap": 12.0}),
    ],
)
def test_a_cpu_measures_without_copies_what_a_gpu_measures_with_them(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    arguments = tensors(torch.float64, heads=heads, kv_heads=kv_heads, seed=rows, offset=0.0)
    sampling = Sampling(rows, 0, strict=True)
    without = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows._copies", lambda device: True)
    copied = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    assert slot_values(copied, Slot.ROWS).min() > 0
    for slot in Slot:
        np.testing.assert_allclose(
            slot_values(without, slot), slot_values(copied, slot), rtol=1e-11, atol=1e-11, err_msg=slot.name
        )


@pytest.mark.parametrize(("dtype", "numerics"), [(torch.bfloat16, "kernel"), (torch.float32, "float32")])
def test_a_cpu_copies_no_keys_for_the_rows_that_it_measures(dtype: torch.dtype, numerics: Any) -> None:
    query, key, value, grad = (x[:2].repeat(1, 1, 8, 1) for x in tensors(dtype, heads=2, kv_heads=2))
    largest = 0

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            given = func(*args, **(kwargs or {}))
            if isinstance(given, Tensor):
                largest = max(largest, given.numel())
            return given

    state, tick, number = new_state(2), new_ticks(1, query.device)[0], start_sampling(Sampling(64, 0, strict=True))
    spec = AttentionSpec(0.25, "top_left", numerics=numerics).text
    try:
        with Largest():  # type: ignore[no-untyped-call]
            probe_rows(grad, grad, query, key, value, None, None, None, state, tick, number, spec, False)
    finally:
        stop_sampling(number)
    assert slot_values(state.numpy(), Slot.ROWS).tolist() == [64, 64]
    rows_by_keys = 2 * 64 * key.shape[2]
    assert largest <= 2 * rows_by_keys < rows_by_keys * key.shape[3]
