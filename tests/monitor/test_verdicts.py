"""What a verdict says: why a head is warned about, how long it stands, and never more than people can read."""

from tests.monitor.courses import (
    EVERY,
    HEADS,
    HOWEVER_FAR,
    SICK,
    creep,
    explosion,
    healthy,
    line,
    noise,
    play,
    raised,
    reading,
)

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors


def test_where_nothing_rounds_no_head_fails_by_rounding() -> None:
    assert play(creep, bias=0.6, rounds=False, detectors=Detectors(HEADS, HOWEVER_FAR))[1] == []
    _, told = play(explosion, until=9700, bias=0.6, rounds=False)
    assert raised(told) == [HEADS[SICK]]
    assert {verdict.cause for verdict in told} == {"score growth"}


def test_a_loss_that_comes_and_goes_names_no_other_cause_and_parts_no_failure_in_two() -> None:
    detectors, told = Detectors(HEADS), []
    for step in range(EVERY, 6001, EVERY):
        loss = 3.0 - 1e-4 * step + (0.9 if step % 700 < 300 else 0.0)
        told += detectors.update(reading(step, line, bias=0.6, loss=loss))
    assert raised(told) == [HEADS[SICK]]
    assert {verdict.cause for verdict in told} == {"rounding"}


def test_a_head_in_exact_delta_mode_is_not_said_to_fail_from_rounding() -> None:
    exact = Detectors(HEADS, HOWEVER_FAR)
    assert play(creep, mode=Mode.EXACT_DELTA, bias=0.6, detectors=exact)[1] == []  # its bias is not applied
    _, told = play(explosion, until=9700, mode=Mode.EXACT_DELTA, bias=0.6)
    assert raised(told) == [HEADS[SICK]]
    assert told[0].cause == "score growth"


def test_score_growth_without_a_shift_of_all_scores_is_named_so() -> None:
    def spreading(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        score[SICK] = 20 * 2 ** (max(0, step - 2500) / 900)
        return offset, score

    _, told = play(spreading, until=7500)
    assert raised(told) == [HEADS[SICK]]
    assert told[0].signal == "score"
    assert told[0].evidence["score"] > 256
    assert told[0].cause == "score growth"


def test_a_verdict_is_latched_until_the_head_was_quiet_and_the_head_may_warn_again() -> None:
    def stopping(step: int) -> tuple[Floats, Floats]:
        offset, score = healthy(step)
        drift = 0.04 * (max(0, min(step, 5500) - 2000) + max(0, step - 14_000))
        offset[SICK] = drift + 0.05 * noise(step)[SICK]
        score[SICK] += drift
        return offset, score

    detectors, told = play(stopping, until=18_000, bias=0.6)
    states = [(v.state, v.id) for v in told if v.state != "updated"]
    assert [state for state, _ in states] == ["raised", "cleared", "raised"]
    assert states[0][1] == states[1][1] != states[2][1]
    quiet = next(v for v in told if v.state == "cleared")
    assert quiet.step >= 5500 + DetectorConfig().quiet_steps
    met = quiet.step - DetectorConfig().quiet_steps
    assert quiet.sentence == f"Layer 0 head 2 has met no condition of a warning for {quiet.step - met:,} steps."
    updates = [v for v in told if v.state == "updated" and met < v.step < quiet.step]
    since = f"No condition of a warning has been met since step {met:,}."
    assert updates
    assert all(v.sentence.endswith(since) for v in updates), "a reader can join what drifts and what is quiet"
    assert detectors.risk[SICK] == 1.0
