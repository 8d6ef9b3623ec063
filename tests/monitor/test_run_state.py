"""The detectors' state of a run: how samples change it, and how it is saved, restored or rejected."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from tests.monitor.synthetic_heads import FAILING, HEADS, INTERVAL, N, explosion, linear_drift, play, reading

from foreshock.contract.modes import Mode
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.non_finite import RUN
from foreshock.monitor.detect.run_state import LAYOUT, RunState

CONFIG = DetectorConfig()


def state_after(*steps: int, **fields: Any) -> RunState:
    """The state after samples at the given steps."""
    state = RunState.begin(HEADS, CONFIG)
    for step in steps:
        state.add(reading(step, **fields))
    return state


def test_state_of_a_long_run_is_restored_bit_for_bit() -> None:
    detectors, verdicts = play(explosion, until=6000, bias=0.6, learning_rate=1e-3)
    detectors.update(reading(6050, explosion, loss=math.nan, nonfinite_rows=np.full(N, 2.0), suspect_step=6007))
    state = detectors.run
    assert verdicts
    assert RUN in state.alarms
    assert state.non_finite.suspect_step == 6007
    restored = RunState.begin(HEADS, CONFIG).loaded(json.loads(json.dumps(detectors.state_dict())))
    for block in state.past.blocks:
        block.means.clear()
    np.testing.assert_equal(dataclasses.asdict(restored), dataclasses.asdict(state))


def test_state_is_strict_json() -> None:
    for detectors in (play(linear_drift, until=3000, bias=0.6)[0], Detectors(HEADS)):
        json.dumps(detectors.state_dict(), allow_nan=False)


def test_state_of_another_model_is_rejected() -> None:
    for heads in ([(0, 0)], [(layer + 1, head) for layer, head in HEADS]):
        with pytest.raises(ValueError, match=r"other heads, .* resume with the same model"):
            Detectors(heads).load_state_dict(Detectors(HEADS).state_dict())


@pytest.mark.parametrize("other", [{"window_steps": 9000}, {"block_steps": 200}, {"persist_blocks": 4}])
def test_state_with_other_blocks_or_window_is_rejected(other: dict[str, Any]) -> None:
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
def test_damaged_state_is_rejected_and_the_detectors_are_unchanged(name: str, value: object, sentence: str) -> None:
    detectors, _ = play(linear_drift, until=3000, bias=0.6)
    before = detectors.state_dict()
    with pytest.raises(ValueError, match=f"the saved detectors .*{sentence}"):
        detectors.load_state_dict({**before, name: value})
    assert detectors.state_dict() == before


@pytest.mark.parametrize("mode", [Mode.EXACT_DELTA, Mode.ROW_CORRECTED])
def test_mode_change_resets_the_evidence_of_its_head_within_a_block(mode: Mode) -> None:
    state = state_after(*range(INTERVAL, 1001, INTERVAL), bias=3.0)
    state.add(reading(1010, since_step=1000, bias=3.0))
    assert state.bias.pending[0, 0].all()
    assert state.bias.of(np.ones(N))[FAILING] > 5
    modes = np.zeros(N, dtype=np.int32)
    modes[FAILING] = int(mode)
    changed = reading(1020, since_step=1010, modes=modes)
    state.add(changed)
    assert state.bias.pending[0, 0, FAILING] == changed.delta_bias_sum[FAILING]
    assert (state.bias.capital[..., FAILING] == 1.0).all()
    assert not state.can_round()[FAILING]
    assert state.can_round()[FAILING + 1]
    state.add(reading(1150, rounds=False))
    assert not state.can_round().any()


def test_mode_that_keeps_delta_rounding_can_still_round() -> None:
    assert state_after(INTERVAL, mode=Mode.PAPER_SOFTMAX).can_round().all()


def test_sample_without_a_delta_bias_keeps_earlier_evidence() -> None:
    whole, gap = (RunState.begin(HEADS, CONFIG) for _ in range(2))
    for step in range(INTERVAL, 3001, INTERVAL):
        whole.add(reading(step, bias=0.6))
        unknown: dict[str, Any] = {"delta_bias_sum": np.full(N, np.nan)} if step == 1500 else {}
        gap.add(reading(step, bias=0.6, **unknown))
    assert np.isfinite(gap.bias.capital).all()
    assert gap.bias.of(np.ones(N))[FAILING] > whole.bias.of(np.ones(N))[FAILING] / 4


def test_rewind_resets_ratios_and_open_bet_and_overlapping_steps_count_once() -> None:
    state = state_after(*range(INTERVAL, 5001, INTERVAL))
    state.add(reading(5010, since_step=5000))
    state.warning_ratios[:] = 1.0
    assert state.bias.open_samples
    state.set_back(5000)
    assert not state.warning_ratios.any()
    assert not state.bias.open_samples
    assert not state.bias.pending.any()
    late = state_after(INTERVAL)
    late.add(reading(2 * INTERVAL, since_step=0))
    assert late.past.held == 2 * INTERVAL
