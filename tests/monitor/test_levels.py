"""Fixed levels, above all healthy recorded runs: the first sample that passes one raises a warning."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.test_clipping import SETTINGS, two_layers, weights_change

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
    """A sample of four heads. Head `row` has this score and offset; all have this entropy. keys: None if unknown."""
    words = np.tile(identity_row(), (4, 1))
    floats = words.view(np.float64)
    words[:, Slot.ROWS] = words[:, Slot.ENTROPY_ROWS] = 10
    floats[:, [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]] = 12.0
    floats[:, Slot.ENTROPY_SUM] = 10 * entropy
    floats[:, Slot.MOST_ENTROPY_SUM] = 0.0 if keys is None else 10 * math.log(keys)
    floats[row, Slot.SCORE_MAX], floats[row, Slot.ROW_MAX_ABS] = score, abs(score)
    floats[row, Slot.SCORE_OFFSET_SUM] = 10 * offset
    return words


class LevelDetectors(Detectors):
    """Detectors that return their verdicts about levels only."""

    def __init__(self, quiet_steps: int = 2000) -> None:
        super().__init__(HEADS, DetectorConfig(quiet_steps=quiet_steps), {0: 64, 1: 64})

    def level_verdicts(self, step: int, words: Words) -> list[wire.Verdict]:
        modes = np.zeros(len(HEADS), dtype=np.int32)
        sample_readings = Readings(step=step, since_step=step - 1, modes=modes, **head_readings(words))
        assert (sample_readings.largest is not None) == np.isfinite(words.view(np.float64)[:, Slot.ROW_MAX_ABS]).all()
        verdicts = self.update(sample_readings)
        return [verdict for verdict in verdicts if verdict.signal == LEVEL]


def raised(words: Words, *, step: int = 1) -> list[wire.Verdict]:
    return LevelDetectors().level_verdicts(step, words)


@pytest.mark.parametrize("step", [1, 90_000])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (sample(score=SCORE), "Layer 0 head 1: its largest |score| is 1,024"),
        (sample(score=-22539.0), "its largest |score| is 22,539"),
        (sample(offset=-120.0), "its scores are shifted by 120 nats"),
        (sample(entropy=0.15 * math.log(1024)), "All 4 measured heads look at about one key each"),
        (sample(entropy=0.9 * ENTROPY, keys=None), "All 4 measured heads look at about one key each"),
    ],
)
def test_first_sample_beyond_a_level_warns_regardless_of_sign(step: int, words: Words, message: str) -> None:
    [found] = raised(words, step=step)
    assert message in found.sentence
    assert (found.state, found.severity, found.layer) == ("raised", "warning", None)
    [incident] = incidents([Warned(0, step, found)], RunContext("row_corrected"))
    assert incident.sentence == found.sentence


def test_sentence_gives_the_16_bit_rounding_step_and_float16_overflow_of_the_score() -> None:
    [found] = raised(sample(score=22539.0))
    assert "bfloat16 rounds scores of this size in steps of 128, float16 in 16." in found.sentence
    assert "before it scales overflows" in found.sentence
    assert "overflows" not in raised(sample(score=SCORE))[0].sentence


def test_scores_that_rise_in_the_first_100_steps_warn_unless_they_start_high() -> None:
    rising, loaded, late = LevelDetectors(), LevelDetectors(), LevelDetectors()
    assert not rising.level_verdicts(1, sample())
    assert not loaded.level_verdicts(1, sample(FIRST_SCORE))
    assert not loaded.level_verdicts(10, sample(FIRST_SCORE))
    [found] = rising.level_verdicts(10, sample(FIRST_SCORE))
    assert "rose to 128 from 12 within the first 100 steps" in found.sentence
    faster = LevelDetectors()
    assert not faster.level_verdicts(1, sample())
    assert [verdict.id for verdict in faster.level_verdicts(10, sample(SCORE))] == ["level-score-10"]
    late.level_verdicts(1, sample())
    assert not late.level_verdicts(200, sample(FIRST_SCORE))


def test_level_warning_is_raised_once_and_cleared_after_quiet_steps() -> None:
    detectors = LevelDetectors(100)
    [first] = detectors.level_verdicts(1, sample(offset=OFFSET))
    assert detectors.active == [first]
    assert not detectors.level_verdicts(50, sample(offset=OFFSET))
    assert not detectors.level_verdicts(149, sample())
    [last] = detectors.level_verdicts(150, sample())
    assert (last.id, last.state) == (first.id, "cleared")


def test_resumed_agent_does_not_repeat_a_level_warning() -> None:
    def trained(saved: str | None) -> tuple[list[wire.Verdict], str]:
        listener, model = Listener(), two_layers()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "c_attn.weight" in name:
                    parameter[:32].mul_(60)
        with attach(model, **SETTINGS) as agent:
            if saved is not None:
                agent.load_state_dict(json.loads(saved))
            agent.subscribe(listener)
            weights_change(agent, model, 4)
            state = json.dumps(agent.state_dict())
        return listener.of(wire.Verdict), state

    verdicts, state = trained(None)
    assert {verdict.step for verdict in verdicts if verdict.signal == LEVEL} == {1}
    assert not [verdict for verdict in trained(state)[0] if verdict.signal == LEVEL]


def test_head_with_an_active_warning_raises_no_level_warning() -> None:
    detectors = LevelDetectors()
    assert not detectors.level_verdicts(1, sample(0.9 * SCORE))
    assert [(verdict.layer, verdict.head) for verdict in detectors.active] == [(0, 1)]
    assert not detectors.level_verdicts(2, sample(SCORE))
    assert detectors.level_verdicts(3, sample(SCORE, row=2))


def low_entropy(scores: tuple[float, ...], measured: tuple[int, ...] = (0, 1, 2, 3)) -> Words:
    """Four heads with low entropy and these largest scores; the entropy of some heads is measured."""
    words = sample(entropy=0.1)
    words.view(np.float64)[:, [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]] = np.array(scores)[:, None]
    words[np.setdiff1d(range(4), measured), Slot.ENTROPY_ROWS] = 0
    return words


@pytest.mark.parametrize(
    "words",
    [
        sample(math.inf),
        *(sample(entropy=entropy, keys=keys) for entropy, keys in ((0.0, 1.0), (0.0, None), (0.35, 2.0), (0.3, 3.0))),
        low_entropy((1.0,) * 4),
        low_entropy((1.0, 2.0, 12.0, 12.0), (1, 2, 3)),
        low_entropy((12.0,) * 4, (1,)),
    ],
    ids=[
        "infinite",
        "one key",
        "unknown keys",
        "two keys",
        "three keys",
        "all scores are small",
        "one score is small",
        "one measured head",
    ],
)
def test_infinite_scores_few_keys_or_small_scores_raise_no_level_warning(words: Words) -> None:
    assert not raised(words)


def test_wrong_rows_are_reported_per_layer_with_the_worst_head() -> None:
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


def _largest_score_without_warnings(path: Path) -> float:
    trace, largest = read_trace(path), 0.0
    detectors = Detectors(trace.heads)
    for sample_readings in readings(trace):
        found = detectors._pass_levels(sample_readings)
        assert not found, (path.name, found)
        assert sample_readings.words is not None
        largest = max(largest, float(slot_values(sample_readings.words, Slot.SCORE_MAX).max()))
    return largest


@pytest.mark.parametrize("path", HEALTHY[:1] + HEALTHY[-1:], ids=lambda path: path.name)
def test_healthy_recorded_run_stays_below_all_levels(path: Path) -> None:
    _largest_score_without_warnings(path)


@pytest.mark.full
def test_all_healthy_recorded_runs_stay_below_the_documented_score() -> None:
    assert len(HEALTHY) == 133
    assert max(map(_largest_score_without_warnings, HEALTHY)) == pytest.approx(HEALTHY_SCORE, abs=1.0)
