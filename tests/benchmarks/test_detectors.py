"""The courses of the detectors' benchmark: one is quiet, and in the other a whole layer is told about."""

from foreshock.benchmarks.detectors import HEADS, judged


def told(*, drifting: bool) -> set[tuple[int | None, int | None]]:
    """The heads that were warned about in a course."""
    return {(verdict.layer, verdict.head) for _, told in judged(drifting=drifting) for verdict in told}


def test_healthy_heads_are_not_warned_about() -> None:
    assert told(drifting=False) == set()


def test_of_the_layer_that_drifts_every_head_is_warned_about_and_no_other() -> None:
    assert told(drifting=True) == {(0, head) for head in range(HEADS)}
