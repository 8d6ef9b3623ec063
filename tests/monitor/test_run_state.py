"""What is remembered of a run: how each sample changes it, and that it comes back to the bit or is refused whole."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from tests.monitor.courses import EVERY, HEADS, SICK, N, explosion, line, play, reading

from foreshock.contract.modes import Mode
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.non_finite import RUN
from foreshock.monitor.detect.run_state import LAYOUT, RunState

CONFIG = DetectorConfig()


def after(*steps: int, **fields: Any) -> RunState:
    """The state after samples at these steps."""
    state = RunState.begin(HEADS, CONFIG)
    for step in steps:
        state.add(reading(step, **fields))
    return state


def at_rates(**rates: float) -> RunState:
    """The state after samples at steps of these names, each with its learning rate."""
    state = RunState.begin(HEADS, CONFIG)
    for name, rate in rates.items():
        state.add(reading(int(name.removeprefix("at_")), learning_rate=rate))
    return state


def test_everything_that_a_long_run_left_comes_back_to_the_bit() -> None:
    detectors, told = play(explosion, until=6000, bias=0.6, learning_rate=1e-3)
    detectors.update(reading(6050, explosion, loss=math.nan, nonfinite_rows=np.full(N, 2.0), suspect_step=6007))
    state = detectors.run
    assert told
    assert RUN in state.alarms
    assert state.non_finite.suspect_step == 6007
    found = RunState.begin(HEADS, CONFIG).loaded(json.loads(json.dumps(state.saved())))
    for own, other in ((state, found), (state.past, found.past)):
        for each in dataclasses.fields(own):
            if each.name != "past":
                np.testing.assert_array_equal(getattr(own, each.name), getattr(other, each.name), each.name)


def test_a_state_is_strict_json() -> None:
    whole = play(line, until=3000, bias=0.6)[0].run.saved()
    json.dumps([whole, RunState.begin(HEADS, CONFIG).saved()], allow_nan=False)


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="watched 16 heads, this run has 1 or others; resume with the same model"):
        Detectors([(0, 0)]).load_state_dict(Detectors(HEADS).state_dict())


@pytest.mark.parametrize("other", [{"window_steps": 9000}, {"block_steps": 200}, {"persist_blocks": 4}])
def test_a_state_of_other_blocks_or_another_window_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="resume with the same detector configuration"):
        Detectors(HEADS, DetectorConfig(**other)).load_state_dict(Detectors(HEADS).state_dict())


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("layout", LAYOUT + 1, f"have layout {LAYOUT + 1}, this version reads layout {LAYOUT}"),
        ("last_step", "yesterday", "are damaged: last_step: Input should be a valid integer"),
        ("bias_sum", {"dtype": "<f8", "shape": [16], "data": "AAAA"}, "are damaged: bias_sum: .*needs 128 bytes"),
        ("bias_sum", {"dtype": "<f8", "shape": [0], "data": ""}, "other blocks or another window"),
    ],
)
def test_a_damaged_state_is_refused_with_a_sentence_and_the_detectors_go_on_as_they_were(
    name: str, value: object, sentence: str
) -> None:
    detectors, _ = play(line, until=3000, bias=0.6)
    before = detectors.state_dict()
    with pytest.raises(ValueError, match=f"the saved detectors .*{sentence}"):
        detectors.load_state_dict({**before, name: value})
    assert detectors.state_dict() == before


def test_growth_is_judged_once_the_learning_rate_rises_no_more_and_never_before_the_earliest_step() -> None:
    assert not at_rates(at_100=1e-3, at_450=1e-3).past_warmup(500)
    assert at_rates(at_100=1e-3, at_500=1e-3).past_warmup(500)
    assert not at_rates(at_100=1e-4, at_900=1e-3).past_warmup(500)
    assert at_rates(at_100=1e-4, at_900=1e-3, at_950=1e-3).past_warmup(500)
    assert at_rates(at_100=1e-4, at_900=1e-3, at_950=9e-4).past_warmup(500)
    assert after(50, 500).past_warmup(500)  # no rate is told


def test_a_run_set_back_behind_its_highest_rate_has_its_warm_up_yet_to_come() -> None:
    state = at_rates(at_100=1e-4, at_900=1e-3).set_back(CONFIG)
    state.add(reading(500, learning_rate=1e-4))
    assert (state.peak_rate, state.peak_rate_step) == (1e-4, 500)


def test_a_run_set_back_forgets_its_past_and_keeps_its_verdicts_modes_and_learning_rate() -> None:
    detectors, _ = play(line, until=5000, bias=0.6, learning_rate=1e-3, mode=Mode.ROW_CORRECTED)
    before, after_it = detectors.run, detectors.run.set_back(CONFIG)
    assert after_it.past.closed == 0
    assert np.isnan(after_it.past.values).all()
    assert not after_it.bias_squares.any()
    assert (after_it.alarms, after_it.peak_rate_step) == (before.alarms, before.peak_rate_step)
    np.testing.assert_array_equal(after_it.modes, before.modes)


def test_the_delta_bias_is_standardised_by_its_blocks_whatever_samples_these_are_made_of() -> None:
    drawn = np.random.default_rng(3).normal(0.5, 1.0, (8, N))
    state = RunState.begin(HEADS, CONFIG)
    for place, draw in enumerate(drawn):  # a block of two samples: 50 steps each, from step 4000 on 100 a block
        step = 4000 + (place + 1) * EVERY
        assert state.add(reading(step, delta_bias_sum=draw)) == bool(place % 2)
    blocks = drawn.reshape(4, 2, N).sum(axis=1)
    np.testing.assert_allclose(state.delta_bias_z, blocks.sum(axis=0) / np.sqrt((blocks**2).sum(axis=0)))


def test_the_delta_bias_of_a_head_begins_anew_with_its_mode_and_is_none_where_it_is_not_applied() -> None:
    state = after(*range(EVERY, 1001, EVERY), bias=0.6)
    known = state.delta_bias_z
    assert np.isfinite(known).all()
    modes = np.zeros(N, dtype=np.int32)
    modes[SICK] = int(Mode.EXACT_DELTA)
    state.add(reading(1050, modes=modes))
    assert state.delta_bias_z[SICK] == 0.0
    assert not state.can_round(SICK)
    assert state.can_round(SICK + 1)
    state.add(reading(1100, bias=0.6))
    assert abs(state.delta_bias_z[SICK]) == pytest.approx(1.0)  # of one block
    state.add(reading(1150, rounds=False))
    assert not state.delta_bias_z.any()
    assert not state.can_round(SICK + 1)
