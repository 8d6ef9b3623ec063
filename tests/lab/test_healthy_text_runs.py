"""The healthy runs on real text that are published: the seal holds of them, and the notebook's steps are theirs."""

import json
from pathlib import Path

import pytest

from foreshock.lab.recording.packed import PACKED, RECORDED
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.score import score_traces
from foreshock.lab.scoring.sealed import sealed, text_hash
from foreshock.lab.training.real_text_split import real_text_split
from foreshock.monitor.detect.detectors import DetectorConfig

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"
HEALTHY = ("text-gpt-muon_untreated_seed1", "text-narrow-no-bias_untreated_seed1", "text-gpt_untreated_seed1")
FAILING = ("kb256_untreated_seed1", "kb256_untreated_seed2", "kb256b128_untreated_seed1", "kb256b128_untreated_seed2")


def first_warnings(folder: str, names: tuple[str, ...], config: DetectorConfig) -> list[int | None]:
    traces = [read_trace(TRACES / folder / f"{name}.trace.xz") for name in names]
    return [score.first_warning_step for score in score_traces(traces, config)]


@pytest.mark.full
def test_the_seals_name_every_held_out_run_that_is_published_as_it_was_scored_and_no_run_twice() -> None:
    folder = TRACES / "real-text"
    seals = [json.loads(path.read_text())["runs"] for path in sorted(folder.glob("held-out*.json"))]
    runs = {name: told for seal in seals for name, told in seal.items()}
    assert len(runs) == sum(map(len, seals))
    assert runs
    packed = {name: folder / name.replace(RECORDED, PACKED) for name in runs}
    assert runs == {name: text_hash(path) for name, path in packed.items()}
    assert set(sealed(sorted(folder.glob("*.xz")))) <= set(packed.values())
    scored = {(name.split("_")[0], name.split("_seed")[1].removesuffix(".jsonl.gz")) for name in runs}
    spent = {(recipe, str(seed)) for recipe, halves in real_text_split().items() for seed in halves.get("spent", ())}
    assert spent <= scored  # what detectors may be tuned on now was scored first


@pytest.mark.full
def test_the_horizon_silences_the_healthy_text_runs_and_no_failing_one() -> None:
    however_far = DetectorConfig(horizon_windows=None)
    assert first_warnings("real-text", HEALTHY, DetectorConfig()) == [None, None, None]
    assert first_warnings("real-text", HEALTHY, however_far) == [2450, 8175, None]
    assert first_warnings("cure", FAILING, DetectorConfig()) == [4475, 4875, 2825, 3275]
    assert first_warnings("cure", FAILING, however_far) == [4375, 4875, 2225, 1250]
