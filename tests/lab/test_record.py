"""What one run showed, kept small: points of some length, and their summary."""

import numpy as np
import pytest

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row
from foreshock.lab.recording.record import Record


def record(offsets: list[float], score: float = 3.0) -> Record:
    filled = Record()
    layer = wire.Layer(layer=0, name="h.0", heads=(0,), kv_heads=1, head_dim=8, served_by="reference")
    filled.add(wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel"))
    for number, offset in enumerate(offsets, start=1):
        words = np.tile(identity_row(), (1, 1))
        words[0, Slot.ROWS] = 2
        floats = words.view(np.float64)
        floats[0, Slot.SCORE_OFFSET_SUM], floats[0, Slot.ROW_MAX_ABS] = 2 * offset, score
        filled.add(
            wire.Sample(
                step=100 * number,
                since_step=100 * (number - 1),
                unix_seconds=0.0,
                states=wire.Array.of(words),
                loss=2.0 / number,
            )
        )
    return filled


def test_a_record_sums_up_offsets_by_step_the_largest_score_and_the_last_losses() -> None:
    summary = record([0.5, 1.5], score=7.0).summary()
    assert summary["offset_by_step"] == {"100": [0.5], "200": [1.5]}
    assert summary["largest_score"] == 7.0
    assert summary["final_loss"] == pytest.approx(1.5)
    assert summary["steps"] == 200


def test_a_final_loss_is_the_mean_of_the_last_five_hundred_steps() -> None:
    filled = record([0.0] * 9)  # a loss of 2 / n at step 100 n
    assert filled.final_loss == pytest.approx(np.mean([2.0 / n for n in range(5, 10)]))
    assert np.isnan(Record().final_loss)


def test_samples_of_single_steps_become_one_point() -> None:
    filled = record([])
    words = np.tile(identity_row(), (1, 1))
    for step in range(1, 61):
        words[0, Slot.ROWS] = 1
        words.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = step
        filled.add(
            wire.Sample(step=step, since_step=step - 1, unix_seconds=0.0, states=wire.Array.of(words), loss=float(step))
        )
    filled.add(wire.Finished(step=60, unix_seconds=0.0, status="completed"))
    assert filled.steps == [25, 50, 60]
    assert [float(offset[0]) for offset in filled.offsets] == [13.0, 38.0, 55.5]
    assert filled.losses == [13.0, 38.0, 55.5]
