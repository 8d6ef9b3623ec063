"""What one run showed, kept small: points of some length, and their summary."""

import numpy as np
import pytest

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row
from foreshock.lab.recording.record import Record


def sample(step: int, since: int, score: float, loss: float) -> wire.Sample:
    words = np.tile(identity_row(), (1, 1))
    words[0, Slot.ROWS] = 2
    words.view(np.float64)[0, Slot.ROW_MAX_ABS] = score
    return wire.Sample(step=step, since_step=since, unix_seconds=0.0, states=wire.Array.of(words), loss=loss)


def record(scores: list[float]) -> Record:
    filled = Record()
    for number, score in enumerate(scores, start=1):
        filled.add(sample(100 * number, 100 * (number - 1), score, 2.0 / number))
    return filled


def test_a_record_sums_up_the_largest_score_and_the_losses_of_the_last_five_hundred_steps() -> None:
    summary = record([7.0, 3.0]).summary()
    assert summary == {"steps": 200, "final_loss": 1.5, "largest_score": 7.0, "warnings": 0}
    assert record([1.0] * 9).summary()["final_loss"] == pytest.approx(np.mean([2.0 / n for n in range(5, 10)]))
    assert np.isnan(Record().summary()["final_loss"])


def test_samples_of_single_steps_become_one_point() -> None:
    filled = Record()
    for step in range(1, 61):
        filled.add(sample(step, step - 1, float(step), float(step)))
    filled.add(wire.Finished(step=60, unix_seconds=0.0, status="completed"))
    assert filled.steps == [25, 50, 60]
    assert [float(score[0]) for score in filled.scores] == [25.0, 50.0, 60.0]
    assert filled.losses == [13.0, 38.0, 55.5]
