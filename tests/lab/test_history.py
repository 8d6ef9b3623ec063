"""What the history of a run says of one-signed errors."""

import numpy as np
import pytest
from tests.lab.planted import planted_history

from foreshock.lab.diagnosis.examination import of_recording
from foreshock.lab.recording.history import History


def test_a_one_signed_error_is_called_so_and_noise_is_not() -> None:
    signed, noise = (of_recording(planted_history(bias)).heads[0] for bias in (0.02, 0.0))
    assert signed["delta z"] > 3
    assert abs(noise["delta z"]) < 3


def test_samples_of_single_steps_weigh_no_more_than_their_steps() -> None:
    steps = np.concatenate(
        [np.arange(100.0, 1001.0, 100.0), np.arange(1001.0, 1101.0), np.arange(1200.0, 2001.0, 100.0)]
    )
    shares = np.where((steps > 1000) & (steps <= 1100), 1.0, 0.0)[:, None]
    history = History("dense", "kernel", [(0, 0)], steps, {"head.delta_bias": shares}, [])
    ends, means = history.blocks("head.delta_bias", (0, 0))
    assert (means * np.diff(ends, prepend=0.0)).sum() == pytest.approx(100.0)
