"""What is held out is refused, opened once, and then only to the same detectors and the same runs."""

import gzip
import json
from pathlib import Path

import pytest
from tests.lab.made_up import record

from foreshock.lab.scoring.report import lab_score
from foreshock.lab.scoring.sealed import break_seal, fingerprint, sealed
from foreshock.monitor.detect.detectors import DetectorConfig

SHIPPED = DetectorConfig()


def a_trace(folder: Path, recipe: str, seed: int, **more: str) -> Path:
    path = folder / f"{recipe}_{seed}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"foreshock_trace": 1, "recipe": recipe, "seed": seed, **more}) + "\n")
    return path


def test_held_out_runs_are_known_by_recipe_and_seed_whatever_their_header_or_name_says(tmp_path: Path) -> None:
    tuning, held_out = a_trace(tmp_path, "kb256", 2), a_trace(tmp_path, "kb256", 11, split="tuning", arm="control")
    other = a_trace(tmp_path, "key-bias-small", 11, split="held-out")
    junk = tmp_path / "junk.gz"
    junk.write_bytes(b"no trace")
    assert sealed([tuning, held_out, other, junk]) == [held_out]


def test_held_out_runs_are_refused_and_named_until_the_seal_is_broken(tmp_path: Path) -> None:
    runs = [a_trace(tmp_path, "kb256", seed) for seed in (2, 11, 12, 13, 14)]
    with pytest.raises(
        ValueError, match=r"kb256_11.*kb256_13\.jsonl\.gz and 1 more are held out: they are scored once"
    ):
        break_seal(runs, SHIPPED, None)
    break_seal(runs[:1], SHIPPED, None)
    seal = tmp_path / "seal.json"
    break_seal(runs, SHIPPED, seal)
    told = json.loads(seal.read_text())
    assert set(told["runs"]) == {run.name for run in runs[1:]}
    assert told["detectors"] == fingerprint(SHIPPED)
    break_seal(list(reversed(runs)), SHIPPED, seal)  # the same again says nothing new


def test_a_seal_that_was_broken_admits_no_other_detectors_and_no_other_runs(tmp_path: Path) -> None:
    first, second = a_trace(tmp_path, "text-gpt", 11), a_trace(tmp_path, "text-gpt", 12)
    seal = tmp_path / "seal.json"
    break_seal([first], SHIPPED, seal)
    with pytest.raises(ValueError, match="with other detectors"):
        break_seal([first], DetectorConfig(offset_level=3.5), seal)
    with pytest.raises(ValueError, match="with other runs"):
        break_seal([first, second], SHIPPED, seal)
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(ValueError, match="with other runs"):
        break_seal([first], SHIPPED, seal)


def test_the_score_command_refuses_them_before_it_looks(tmp_path: Path) -> None:
    run = record(tmp_path / "run.jsonl.gz", fails=True, recipe="kb256b64", seed=12)
    with pytest.raises(ValueError, match="held out"):
        lab_score([run])
    [score], _ = lab_score([run], seal=tmp_path / "seal.json")
    assert score.split == "held-out"
    again = record(tmp_path / "again.jsonl.gz", fails=True, recipe="kb256", seed=1)
    [score], _ = lab_score([again])
    assert score.split == "tuning"
