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


def test_everything_that_a_long_run_left_comes_back_to_the_bit() -> None:
    detectors, told = play(explosion, until=6000, bias=0.6, learning_rate=1e-3)
    detectors.update(reading(6050, explosion, loss=math.nan, nonfinite_rows=np.full(N, 2.0), suspect_step=6007))
    state = detectors.run
    assert told
    assert RUN in state.alarms
    assert state.non_finite.suspect_step == 6007
    found = RunState.begin(HEADS, CONFIG).loaded(json.loads(json.dumps(detectors.state_dict())))
    for block in state.past.blocks:
        block.means.clear()
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(state))


def test_a_state_is_strict_json() -> None:
    for detectors in (play(line, until=3000, bias=0.6)[0], Detectors(HEADS)):
        json.dumps(detectors.state_dict(), allow_nan=False)


def test_a_state_of_another_model_is_refused() -> None:
    for heads in ([(0, 0)], [(layer + 1, head) for layer, head in HEADS]):
        with pytest.raises(ValueError, match=r"other heads, .* resume with the same model"):
            Detectors(heads).load_state_dict(Detectors(HEADS).state_dict())


@pytest.mark.parametrize("other", [{"window_steps": 9000}, {"block_steps": 200}, {"persist_blocks": 4}])
def test_a_state_of_other_blocks_or_another_window_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="resume with the same model and detector configuration"):
        Detectors(HEADS, DetectorConfig(**other)).load_state_dict(Detectors(HEADS).state_dict())


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("layout", LAYOUT + 1, f"have layout {LAYOUT + 1}, this version reads layout {LAYOUT}"),
        ("last_step", "yesterday", "are damaged: last_step: Input should be a valid integer"),
        (
            "warning_ratios",
            {"dtype": "<f8", "shape": [16], "data": "AAAA"},
            "are damaged: warning_ratios: .*needs 128 bytes",
        ),
        ("warning_ratios", {"dtype": "<f8", "shape": [0], "data": ""}, "other heads, other blocks or another window"),
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


@pytest.mark.parametrize("mode", [Mode.EXACT_DELTA, Mode.ROW_CORRECTED])
def test_the_evidence_of_a_head_begins_anew_with_its_mode_in_the_middle_of_a_block_too(mode: Mode) -> None:
    state = after(*range(EVERY, 1001, EVERY), bias=3.0)
    state.add(reading(1010, since_step=1000, bias=3.0))
    assert state.bias.pending[0, 0].all()
    assert state.bias.of(np.ones(N))[SICK] > 5
    modes = np.zeros(N, dtype=np.int32)
    modes[SICK] = int(mode)
    changed = reading(1020, since_step=1010, modes=modes)
    state.add(changed)
    assert state.bias.pending[0, 0, SICK] == changed.delta_bias_sum[SICK]
    assert (state.bias.capital[..., SICK] == 1.0).all()
    assert not state.can_round()[SICK]
    assert state.can_round()[SICK + 1]
    state.add(reading(1150, rounds=False))
    assert not state.can_round().any()


def test_a_mode_that_ends_no_rounding_leaves_the_delta_bias_applied() -> None:
    assert after(EVERY, mode=Mode.PAPER_SOFTMAX).can_round().all()


def test_one_sample_without_a_delta_bias_leaves_the_evidence_of_the_others() -> None:
    whole, gap = (RunState.begin(HEADS, CONFIG) for _ in range(2))
    for step in range(EVERY, 3001, EVERY):
        whole.add(reading(step, bias=0.6))
        unknown: dict[str, Any] = {"delta_bias_sum": np.full(N, np.nan)} if step == 1500 else {}
        gap.add(reading(step, bias=0.6, **unknown))
    assert np.isfinite(gap.bias.capital).all()
    assert gap.bias.of(np.ones(N))[SICK] > whole.bias.of(np.ones(N))[SICK] / 4


def test_a_run_that_is_set_back_forgets_its_ratios_and_the_open_bet_and_overlapping_samples_count_once() -> None:
    state = after(*range(EVERY, 5001, EVERY))
    state.add(reading(5010, since_step=5000))
    state.warning_ratios[:] = 1.0
    assert state.bias.open_samples
    state.set_back(5000)
    assert not state.warning_ratios.any()
    assert not state.bias.open_samples
    assert not state.bias.pending.any()
    late = after(EVERY)
    late.add(reading(2 * EVERY, since_step=0))
    assert late.past.held == 2 * EVERY
