"""The list of signals: what a saved state of other signals means, and a state that was saved before they had names."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract import wire
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors, Readings
from foreshock.monitor.detect.signals import SIGNAL_NAMES, SIGNALS, by_name

SAVED = json.loads((Path(__file__).parent / "golden" / "detectors_of_0_1.json").read_text())
HEADS = [(0, 0), (3, 1), (3, 2)]
CONFIG = DetectorConfig(window_steps=400, block_steps=20, earliest_steps=100, settle_steps=200)


def reading(step: int) -> Readings:
    """What the detectors saw that saved the golden state at step 408, and those of 0.1.0 that went on from there."""
    random = np.random.default_rng(step)
    grown = np.array([0.1, 1.0, 0.0]) * 4 * 1.012**step / (1.012**200)
    return Readings(
        step=step,
        since_step=step - 4,
        rows=np.full(3, 64.0),
        largest_score=10 + grown * 3 + random.normal(size=3),
        nonfinite_rows=np.zeros(3),
        query_norm=np.full(3, 2.0) + step / 1000 if step % 40 == 0 else None,
        modes=np.zeros(3, np.int32),
        loss=3.0 - step / 1000,
        learning_rate=1e-3,
        score_offset=grown + 0.05 * random.normal(size=3),
        tied_rows=np.full(3, 0.1),
        delta_bias_sum=grown + random.normal(size=3),
    )


def without_what_is_newer(verdict: dict[str, Any], known: Set[str]) -> dict[str, Any]:
    """The verdict with the evidence of those signals that there were, and no forecast, which is another one since."""
    newer = ("sentence", "corrected_from", "corrected_step", "harm_in_sight")
    kept = {name: x for name, x in verdict.items() if not name.startswith("forecast") and name not in newer}
    return {**kept, "evidence": {name: x for name, x in verdict["evidence"].items() if name in known}}


def test_a_state_that_0_1_saved_goes_on_in_the_middle_of_a_block_as_0_1_itself_did() -> None:
    detectors = Detectors(HEADS, CONFIG)
    detectors.load_state_dict(SAVED["state"])
    told = [v.model_dump(mode="json") for step in range(412, 904, 4) for v in detectors.update(reading(step))]
    known = SAVED["verdicts"][0]["evidence"].keys() - {"delta_bias_z"}  # 0.1 took every sample for a draw
    assert [without_what_is_newer(v, known) for v in told] == [
        without_what_is_newer(v, known) for v in SAVED["verdicts"]
    ]
    assert [verdict["state"] for verdict in told] == ["raised", "updated", "updated"]


def test_a_state_saved_with_signals_in_another_order_and_one_fewer_goes_on() -> None:
    whole = Detectors(HEADS, CONFIG)
    for step in range(4, 410, 4):
        whole.update(reading(step))
    state = whole.state_dict()
    names = ["norm", "score", "offset"]  # of an agent that knew no ties
    rows = [SIGNAL_NAMES.index(name) for name in names]
    for part, keys in (
        (state, ("_recent", "_pressure")),
        (state["history"], ("_values", "_jitter", "_open", "_weight", "_anew")),
    ):
        part["signals"] = names
        for key in keys:
            saved = wire.Array.model_validate(part[key]).numpy()
            part[key] = wire.Array.of(saved[..., rows, :]).model_dump()
    resumed = Detectors(HEADS, CONFIG)
    resumed.load_state_dict(state)
    there, here = ([v for step in range(412, 904, 4) for v in each.update(reading(step))] for each in (whole, resumed))
    shared = here[0].evidence.keys() - {"tied_share"}
    sides = [[without_what_is_newer(v.model_dump(), shared) for v in side] for side in (there, here)]
    assert sides[0] == sides[1]
    assert len(here) == 3


@given(st.permutations(["offset", "score", "ties", "norm", "of_tomorrow"]), st.integers(0, 5))
def test_rows_of_a_saved_state_find_their_signal_by_name(order: list[str], told: int) -> None:
    names, empty = order[:told], np.full((2, len(SIGNALS), 3), -1.0)
    saved = np.arange(2 * told * 3, dtype=np.float64).reshape(2, told, 3)
    placed = by_name(saved, names, empty)
    for row, name in enumerate(SIGNAL_NAMES):
        expected = saved[:, names.index(name)] if name in names else empty[:, row]
        np.testing.assert_array_equal(placed[:, row], expected)
    with pytest.raises(ValueError, match="resume with the same heads"):
        by_name(np.zeros((2, 4, 2)), None, empty)


def test_every_signal_is_said_with_evidence_that_no_other_shows() -> None:
    shown = [name for info in SIGNALS.values() for name in info.evidence]
    assert len(shown) == len(set(shown))
