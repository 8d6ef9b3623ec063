"""The courses of the detectors' benchmark: one is quiet, and in the other a whole layer is told about."""

import numpy as np

from foreshock.benchmarks.detectors import EVERY, HEADS, LAYERS, course
from foreshock.monitor.detect.detectors import Detectors, Readings


def told(*, drifting: bool) -> set[tuple[int | None, int | None]]:
    """The heads that were warned about in a course."""
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    detectors, modes = Detectors(heads), np.zeros(len(heads), dtype=np.int32)
    found = set()
    for start, words, norms in course(drifting=drifting):
        for step in range(start - 100 + EVERY, start + 1, EVERY):
            seen = Readings.from_words(step=step, since_step=step - EVERY, words=words, modes=modes, query_norm=norms)
            found |= {(verdict.layer, verdict.head) for verdict in detectors.update(seen)}
    return found


def test_healthy_heads_are_not_warned_about() -> None:
    assert told(drifting=False) == set()


def test_of_the_layer_that_drifts_every_head_is_warned_about_and_no_other() -> None:
    assert told(drifting=True) == {(0, head) for head in range(HEADS)}
