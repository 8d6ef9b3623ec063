"""Levels that no healthy recorded run reached are warnings in the first sample that passes them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.test_clipping import EVERY, changed, two_layers

from foreshock.contract import wire
from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.contract.slots import Slot, Words, identity_row, slot_values
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.monitor import attach
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.levels import ENTROPY, FIRST_SCORE, HEALTHY_SCORE, LEVEL, OFFSET, SCORE, wrong_rows
from foreshock.monitor.detect.readings import Readings, head_readings

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"
HEALTHY = [
    *sorted(TRACES.glob("healthy-small*.trace.xz")),
    *(
        path
        for kind in ("text-", "gpt2-small", "llama-small", "long-")
        for path in (TRACES / "real-text").glob(f"{kind}*.xz")
    ),
    *(TRACES / "vendor" / "healthy").glob("*.xz"),
]
HEADS = [(layer, head) for layer in range(2) for head in range(2)]


def sample(
    score: float = 12.0, offset: float = 0.1, entropy: float = 2.0, row: int = 1, keys: float | None = 1024.0
) -> Words:
    """A sample of four heads, one of which has these values; all have the entropy. keys: None if unknown."""
    words = np.tile(identity_row(), (4, 1))
    floats = words.view(np.float64)
    words[:, Slot.ROWS] = words[:, Slot.ENTROPY_ROWS] = 10
    floats[:, [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]] = 12.0
    floats[:, Slot.ENTROPY_SUM] = 10 * entropy
    floats[:, Slot.MOST_ENTROPY_SUM] = 0.0 if keys is None else 10 * math.log(keys)
    floats[row, Slot.SCORE_MAX], floats[row, Slot.ROW_MAX_ABS] = score, abs(score)
    floats[row, Slot.SCORE_OFFSET_SUM] = 10 * offset
    return words


class Sampled(Detectors):
    """Returns what the detectors say of levels."""

    def __init__(self, quiet_steps: int = 2000) -> None:
        super().__init__(HEADS, DetectorConfig(quiet_steps=quiet_steps), {0: 64, 1: 64})

    def say(self, step: int, words: Words) -> list[wire.Verdict]:
        modes = np.zeros(len(HEADS), dtype=np.int32)
        seen = Readings(step=step, since_step=step - 1, modes=modes, **head_readings(words))
        assert (seen.largest is not None) == np.isfinite(words.view(np.float64)[:, Slot.ROW_MAX_ABS]).all()
        told = self.update(seen)
        return [verdict for verdict in told if verdict.signal == LEVEL]


def raised(words: Words, *, step: int = 1) -> list[wire.Verdict]:
    return Sampled().say(step, words)


@pytest.mark.parametrize("step", [1, 90_000])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (sample(score=SCORE), "Layer 0 head 1: its largest |score| is 1,024"),
        (sample(score=-22539.0), "its largest |score| is 22,539"),
        (sample(offset=-120.0), "its scores are shifted by 120 nats"),
        (sample(entropy=0.15 * math.log(1024)), "All 4 measured heads look at about one key each"),
        (sample(entropy=0.9 * ENTROPY, keys=None), "All 4 measured heads look at about one key each"),
    ],
)
def test_a_level_is_a_warning_in_the_first_sample_by_size_and_not_by_sign(step: int, words: Words, said: str) -> None:
    [found] = raised(words, step=step)
    assert said in found.sentence
    assert (found.state, found.severity, found.layer) == ("raised", "warning", None)
    [incident] = incidents([Warned(0, step, found)], RunContext("row_corrected"))
    assert incident.sentence == found.sentence


def test_what_a_level_means_for_16_bits_follows_from_its_size() -> None:
    [found] = raised(sample(score=22539.0))
    assert "bfloat16 rounds scores of this size in steps of 128, float16 in 16." in found.sentence
    assert "before it scales overflows" in found.sentence
    assert "overflows" not in raised(sample(score=SCORE))[0].sentence


def test_scores_that_rise_within_the_first_hundred_steps_are_reported_and_those_of_a_loaded_model_are_not() -> None:
    rising, loaded, late = Sampled(), Sampled(), Sampled()
    assert not rising.say(1, sample())
    assert not loaded.say(1, sample(FIRST_SCORE))
    assert not loaded.say(10, sample(FIRST_SCORE))
    [found] = rising.say(10, sample(FIRST_SCORE))
    assert "rose to 128 from 12 within the first 100 steps" in found.sentence
    faster = Sampled()
    assert not faster.say(1, sample())
    assert [verdict.id for verdict in faster.say(10, sample(SCORE))] == ["level-score-10"]
    late.say(1, sample())
    assert not late.say(200, sample(FIRST_SCORE))


def test_a_level_is_said_once_and_cleared_when_no_head_has_passed_it_for_long() -> None:
    detectors = Sampled(100)
    [first] = detectors.say(1, sample(offset=OFFSET))
    assert detectors.active == [first]
    assert not detectors.say(50, sample(offset=OFFSET))
    assert not detectors.say(149, sample())
    [last] = detectors.say(150, sample())
    assert (last.id, last.state) == (first.id, "cleared")


def test_a_resumed_agent_repeats_no_level() -> None:
    def trained(saved: str | None) -> tuple[list[wire.Verdict], str]:
        listener, model = Listener(), two_layers()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "c_attn.weight" in name:
                    parameter[:32].mul_(60)
        with attach(model, **EVERY) as agent:
            if saved is not None:
                agent.load_state_dict(json.loads(saved))
            agent.subscribe(listener)
            changed(agent, model, 4)
            state = json.dumps(agent.state_dict())
        return listener.of(wire.Verdict), state

    told, state = trained(None)
    assert {verdict.step for verdict in told if verdict.signal == LEVEL} == {1}
    assert not [verdict for verdict in trained(state)[0] if verdict.signal == LEVEL]


def test_a_head_that_was_warned_about_before_needs_no_level() -> None:
    detectors = Sampled()
    assert not detectors.say(1, sample(0.9 * SCORE))
    assert [(verdict.layer, verdict.head) for verdict in detectors.active] == [(0, 1)]
    assert not detectors.say(2, sample(SCORE))
    assert detectors.say(3, sample(SCORE, row=2))


def blunt(scores: tuple[float, ...], measured: tuple[int, ...] = (0, 1, 2, 3)) -> Words:
    """A low entropy of heads with these largest scores, of which some are measured."""
    words = sample(entropy=0.1)
    words.view(np.float64)[:, [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]] = np.array(scores)[:, None]
    words[np.setdiff1d(range(4), measured), Slot.ENTROPY_ROWS] = 0
    return words


@pytest.mark.parametrize(
    "words",
    [
        sample(math.inf),
        *(sample(entropy=entropy, keys=keys) for entropy, keys in ((0.0, 1.0), (0.0, None), (0.35, 2.0), (0.3, 3.0))),
        blunt((1.0,) * 4),
        blunt((1.0, 2.0, 12.0, 12.0), (1, 2, 3)),
        blunt((12.0,) * 4, (1,)),
    ],
    ids=[
        "infinite",
        "one key",
        "no keys known",
        "two keys",
        "three keys",
        "no head is sharp",
        "one is not",
        "a single",
    ],
)
def test_no_level_is_passed_by_an_infinite_score_few_keys_or_heads_that_are_not_all_sharp(words: Words) -> None:
    assert not raised(words)


def test_wrong_rows_are_reported_by_layer_with_its_worst_head_and_an_output_before_its_gradients() -> None:
    words = sample()
    words[:, Slot.CHECKED_ROWS] = 10, 100, 10, 10
    words[:, Slot.WRONG_ROWS] = 5, 6, 0, 0
    words[:, Slot.WRONG_GRADIENT_ROWS] = 9, 9, 0, 3
    words.view(np.float64)[0, Slot.OUTPUT_ERROR_MAX] = math.inf
    output, gradient = wrong_rows(words, HEADS, 7).values()
    assert (output.layer, output.head, output.severity) == (0, 0, "critical")
    assert "5 of 10 compared rows of its attention output are wrong" in output.sentence
    assert "2 of 2 heads of the layer have such rows" in output.sentence
    assert output.evidence == {"heads": 2.0, "output_error": np.finfo(np.float64).max, "wrong_share": 0.5}
    assert (gradient.layer, gradient.head, gradient.evidence["heads"]) == (1, 1, 1.0)
    assert "3 of the compared rows of its gradients" in gradient.sentence


def _quiet(path: Path) -> float:
    trace, largest = read_trace(path), 0.0
    detectors = Detectors(trace.heads)
    for seen in readings(trace):
        found = detectors._pass_levels(seen)
        assert not found, (path.name, found)
        assert seen.words is not None
        largest = max(largest, float(slot_values(seen.words, Slot.SCORE_MAX).max()))
    return largest


@pytest.mark.parametrize("path", HEALTHY[:1] + HEALTHY[-1:], ids=lambda path: path.name)
def test_a_healthy_recorded_run_passes_no_level(path: Path) -> None:
    _quiet(path)


@pytest.mark.full
def test_no_healthy_recorded_run_passes_a_level_and_the_note_says_how_far_they_came() -> None:
    assert len(HEALTHY) == 133
    assert max(map(_quiet, HEALTHY)) == pytest.approx(HEALTHY_SCORE, abs=1.0)
