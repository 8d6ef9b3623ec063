"""What the history of a run says of one-signed errors."""

import re

import numpy as np
import pytest
from tests.lab.planted import planted_history

from foreshock.lab.diagnosis.examination import of_recording
from foreshock.lab.diagnosis.verdict import diagnose
from foreshock.lab.recording.history import History


def test_a_one_signed_error_is_called_so_and_noise_is_not() -> None:
    signed, noise = (of_recording(planted_history(bias)).heads[0] for bias in (0.02, 0.0))
    assert signed["delta z"] > 3
    assert abs(noise["delta z"]) < 3


def test_a_head_far_from_zero_is_a_finding_whatever_its_sign_and_warnings() -> None:
    history = planted_history(0.0)
    assert diagnose([of_recording(history)]).findings[0].kind == "quiet"
    history.values["head.score_offset"] = -12 * history.values["head.score_offset"]
    [found] = diagnose([of_recording(history)]).findings
    assert (found.kind, found.heads) == ("large", [(0, 0)])
    assert re.search(r"scores of layer 0 head 0 are far from zero. The first has an offset of -117.9 nats", found.words)


def test_samples_of_single_steps_weigh_no_more_than_their_steps() -> None:
    steps = np.concatenate(
        [np.arange(100.0, 1001.0, 100.0), np.arange(1001.0, 1101.0), np.arange(1200.0, 2001.0, 100.0)]
    )
    shares = np.where((steps > 1000) & (steps <= 1100), 1.0, 0.0)[:, None]
    history = History("dense", [(0, 0)], steps, {"head.delta_bias": shares}, [])
    ends, means = history.blocks("head.delta_bias", (0, 0))
    assert (means * np.diff(ends, prepend=0.0)).sum() == pytest.approx(100.0)
