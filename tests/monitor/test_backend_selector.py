"""Who serves each layer, and which step is measured: by the settings, the modes and the checks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.config import AgentConfig


def layers_of(heads: list[int]) -> tuple[list[WatchedLayer], torch.Tensor]:
    state = torch.cat([new_state(count) for count in heads])
    modes = torch.zeros(state.shape[0], dtype=torch.int32)
    ends = np.cumsum(heads).tolist()
    made = [
        WatchedLayer(f"h.{i}", state[end - count : end], modes[end - count : end], "auto")
        for i, (end, count) in enumerate(zip(ends, heads, strict=True))
    ]
    return made, state


@pytest.fixture
def keep() -> Iterator[Callable[..., BackendSelector]]:
    """`keep([2, 3], attention="kernels")`: a BackendSelector of layers of so many heads; stopped after the test."""
    made: list[BackendSelector] = []

    def selector(heads: list[int], **settings: Any) -> BackendSelector:
        layers, state = layers_of(heads)
        made.append(BackendSelector(layers, state, AgentConfig(**settings)))
        return made[-1]

    yield selector
    for each in made:
        each.stop()


@given(
    heads=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    attention=st.sampled_from(["keep", "kernels"]),
    switched=st.sets(st.integers(0, 11)),
)
def test_a_layer_keeps_its_attention_unless_one_of_its_heads_is_switched_or_kernels_are_asked_for(
    heads: list[int], attention: Any, switched: set[int]
) -> None:
    """By each layer alone: what its peers do, and how many heads they have, changes nothing."""
    layers, state = layers_of(heads)
    selector = BackendSelector(layers, state, AgentConfig(attention=attention))
    try:
        modes = np.zeros(sum(heads), dtype=np.int32)
        modes[[row for row in switched if row < len(modes)]] = int(Mode.ROW_CORRECTED)
        selector.follow(modes)
        first = 0
        for layer, count in zip(layers, heads, strict=True):
            assert layer.keeps == (attention == "keep" and not modes[first : first + count].any())
            assert [selector.serves(row) for row in range(first, first + count)] == [attention == "kernels"] * count
            layer.served = True  # as a step shows
            assert all(selector.serves(row) for row in range(first, first + count))
            first += count
        selector.follow(np.zeros_like(modes))
        assert [layer.keeps for layer in layers] == [attention == "keep"] * len(heads)
    finally:
        selector.stop()


@pytest.mark.parametrize("every", [1, 3, 10])
def test_one_step_in_so_many_is_measured_and_every_one_while_a_warning_is_fresh(
    keep: Callable[..., BackendSelector], every: int
) -> None:
    selector = keep([2], attention="keep", sample_every_steps=every)
    due = []
    for step in range(1, 61):  # what runs now is `step`; after it the next one is planned
        due.append(selector._sampling.due)
        selector.plan(step, step + 1, watch_until=40 if 30 <= step < 40 else -1)
    quiet = [step for step in range(1, 31) if due[step - 1]]
    assert quiet == sorted({1, *range(every, 31, every)})
    assert all(due[30:40])
    later = [step for step in range(41, 61) if due[step - 1]]
    assert later == [step for step in range(41, 61) if step % every == 0]


def test_what_ran_before_a_layer_went_back_to_its_own_attention_says_nothing_of_the_next_switch(
    keep: Callable[..., BackendSelector],
) -> None:
    selector = keep([1])
    for _ in range(2):
        selector.follow(np.array([int(Mode.ROW_CORRECTED)], dtype=np.int32))
        assert not selector.serves(0)
        selector.layers[0].served = True
        selector.follow(np.array([int(Mode.EXACT_DELTA)], dtype=np.int32))
        assert selector.serves(0)
        selector.follow(np.zeros(1, dtype=np.int32))


def test_dropout_is_told_of_while_a_layer_keeps_it_in_three_sentences(keep: Callable[..., BackendSelector]) -> None:
    selector = keep([2, 1])
    selector.layers[1].dropout_p = 0.1
    assert selector.what_a_switch_meets() == [
        "1 of 2 layers use dropout. Their masks stay the model's own until a switch. A switched layer draws other "
        "masks, with the same probability."
    ]
    assert keep([2], attention="kernels").what_a_switch_meets() == []
