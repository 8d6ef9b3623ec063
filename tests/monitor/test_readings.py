"""The detectors' readings, computed from the counters of a sample."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.contract.state_words import states
from tests.monitor.doubles import ScriptedDetectors
from tests.monitor.synthetic_heads import INTERVAL, reading
from tests.monitor.tiny_models import batch, tiny_gpt, train_step

from foreshock.contract.metrics import catalog
from foreshock.contract.slots import SLOT_COUNT, Slot, Words, identity_row, slot_values
from foreshock.monitor import attach
from foreshock.monitor.config import Numerics
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.readings import Readings, head_readings


def test_readings_are_means_and_nan_for_a_head_without_rows() -> None:
    words = np.tile(identity_row(), (2, 1))
    words[0, Slot.ROWS] = 4
    floats = words.view(np.float64)
    floats[0, Slot.SCORE_OFFSET_SUM], floats[0, Slot.ROW_MAX_ABS] = 8.0, 5.0
    seen = Readings(step=10, since_step=0, modes=np.zeros(2, dtype=np.int32), **head_readings(words))
    assert (seen.score_offset[0], seen.largest_score[0]) == (2.0, 5.0)
    assert np.isnan([seen.score_offset[1], seen.largest_score[1], seen.delta_bias_sum[1]]).all()
    assert words.shape == (2, SLOT_COUNT)


@settings(max_examples=60, deadline=None)
@given(words=states())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity over a count
def test_readings_equal_the_values_of_the_metric_catalogue(words: Words) -> None:
    words[:, Slot.SKIPPED_ROWS] %= words[:, Slot.ROWS] + 1  # at most all rows are skipped
    floats = words.view(np.float64)  # the largest score is at most the largest absolute score
    floats[:, Slot.SCORE_MAX] = np.fmin(floats[:, Slot.SCORE_MAX], floats[:, Slot.ROW_MAX_ABS])
    seen = Readings(step=10, since_step=0, modes=np.zeros(len(words), dtype=np.int32), **head_readings(words))
    catalogue_values = {key: catalog.read(f"head.{key}", words) for key in ("score_offset", "score_max", "row_max_abs")}
    bias = np.where(slot_values(words, Slot.ROWS) > 0, slot_values(words, Slot.DELTA_BIAS_SUM), np.nan)
    np.testing.assert_array_equal(seen.rows, slot_values(words, Slot.ROWS))
    np.testing.assert_array_equal(seen.score_offset, catalogue_values["score_offset"])
    np.testing.assert_array_equal(
        seen.largest_score, np.fmax(catalogue_values["row_max_abs"], catalogue_values["score_max"])
    )
    np.testing.assert_array_equal(seen.delta_bias_sum, bias)
    np.testing.assert_array_equal(seen.nonfinite_rows, slot_values(words, Slot.NONFINITE_ROWS))
    # A largest score that is taken from the slot of the oldest recordings is not summarised.
    known = np.isfinite([seen.score_offset, floats[:, Slot.ROW_MAX_ABS], seen.delta_bias_sum]).all()
    most = (np.abs(seen.score_offset).max(), seen.largest_score.max()) if known and len(words) else None
    assert seen.largest == most
    assert not any(np.shares_memory(array, words) for array in (seen.rows, seen.delta_bias_sum))


def test_delta_bias_sum_is_not_rescaled_by_skipped_rows() -> None:
    words = np.tile(identity_row(), (3, 1))
    words[:, Slot.ROWS], words[:, Slot.SKIPPED_ROWS] = 60, (40, 0, 60)
    words.view(np.float64)[:, Slot.DELTA_BIAS_SUM] = -1.5, 2.5, 0.0
    seen = Readings(step=10, since_step=0, modes=np.zeros(3, dtype=np.int32), **head_readings(words))
    np.testing.assert_array_equal(seen.delta_bias_sum, [-1.5, 2.5, 0.0])


def test_readings_of_another_head_count_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(16,\) were given to 2 heads"):
        Detectors([(0, 0), (0, 1)]).update(reading(INTERVAL))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("numerics", "autocast", "rounds"),
    [("auto", False, False), ("auto", True, True), ("float32", True, False), ("kernel", False, True)],
)
def test_readings_state_whether_attention_rounds(
    numerics: Numerics, autocast: bool, rounds: bool, compiled: bool
) -> None:
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, numerics=numerics, sample_every_steps=1, strict=True, quiet=True) as agent:
        detectors = agent.detectors = ScriptedDetectors(4)
        run = torch.compile(model, backend="eager") if compiled else model
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = train_step(run, optimizer, step)
            with torch.no_grad(), nullcontext() if autocast else torch.autocast("cpu", torch.bfloat16):
                run(batch(9))  # an evaluation says nothing about the training
            agent.step(loss)
    assert detectors.readings
    assert {reading.rounds for reading in detectors.readings} == {rounds}
