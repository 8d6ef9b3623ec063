"""What is held out is refused, opened once, and then only to the same detectors and the same runs."""

import gzip
import json
from pathlib import Path

import pytest
from tests.lab.made_up import record

from foreshock.lab.scoring.sealed import break_seal, sealed, verdicts_hash
from foreshock.lab.scoring.table import lab_score
from foreshock.lab.training.real_text_split import real_text_split
from foreshock.monitor.detect.detectors import DetectorConfig

SHIPPED = DetectorConfig()
RECIPE, SPLIT = max(real_text_split().items(), key=lambda named: len(named[1]["held-out"]))
HELD_OUT, TUNING = SPLIT["held-out"], [seed for half, seeds in SPLIT.items() if half != "held-out" for seed in seeds]
"""Seeds of the recipe with the most of them; those that were scored once are for tuning."""


def a_trace(folder: Path, recipe: str, seed: int, **more: str) -> Path:
    path = folder / f"{recipe}_{seed}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"foreshock_trace": 1, "recipe": recipe, "seed": seed, **more}) + "\n")
    return path


def a_run(folder: Path, seed: int, *, fails: bool = True) -> Path:
    return record(folder / f"{RECIPE}_{seed}.jsonl.gz", fails=fails, recipe=RECIPE, seed=seed)


def test_held_out_runs_are_known_by_recipe_and_seed_whatever_their_header_or_name_says(tmp_path: Path) -> None:
    tuning = [a_trace(tmp_path, RECIPE, seed) for seed in TUNING]
    held_out = a_trace(tmp_path, RECIPE, HELD_OUT[0], split="tuning", arm="control")
    other = a_trace(tmp_path, "key-bias-small", HELD_OUT[0], split="held-out")
    junk = tmp_path / "junk.gz"
    junk.write_bytes(b"no trace")
    assert sealed([*tuning, held_out, other, junk]) == [held_out]


def test_held_out_runs_are_refused_and_named_until_the_seal_is_broken(tmp_path: Path) -> None:
    first, second, third, *_ = HELD_OUT
    runs = [a_run(tmp_path, seed, fails=False) for seed in (TUNING[0], *HELD_OUT)]
    named = ", ".join(f"{RECIPE}_{seed}.jsonl.gz" for seed in (first, second, third))
    with pytest.raises(ValueError, match=f"{named} and {len(HELD_OUT) - 3} more are held out: they are scored once"):
        break_seal(runs, SHIPPED, None)
    break_seal(runs[:1], SHIPPED, None)
    seal = tmp_path / "seal.json"
    break_seal(runs, SHIPPED, seal)
    told = json.loads(seal.read_text())
    assert set(told["runs"]) == {run.name for run in runs[1:]}
    assert told["said"] == verdicts_hash(runs[1:], SHIPPED)
    break_seal(list(reversed(runs)), SHIPPED, seal)  # the same again says nothing new


def test_a_seal_that_was_broken_admits_no_other_detectors_and_no_other_runs(tmp_path: Path) -> None:
    first, second = (a_run(tmp_path, seed) for seed in HELD_OUT[:2])
    seal = tmp_path / "seal.json"
    break_seal([first], SHIPPED, seal)
    with pytest.raises(ValueError, match="with other detectors"):
        break_seal([first], DetectorConfig(offset_level=15.0), seal)
    with pytest.raises(ValueError, match="with other runs"):
        break_seal([first, second], SHIPPED, seal)
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(ValueError, match="with other runs"):
        break_seal([first], SHIPPED, seal)


def test_detectors_score_again_what_they_say_the_same_of_and_nothing_else(tmp_path: Path) -> None:
    run = a_run(tmp_path, HELD_OUT[0])
    seal = tmp_path / "seal.json"
    break_seal([run], SHIPPED, seal)
    break_seal([run], SHIPPED, seal)
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"said": "something else"}))
    with pytest.raises(ValueError, match="with other detectors"):
        break_seal([run], SHIPPED, seal)


def test_two_held_out_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    runs = [a_run(folder, HELD_OUT[0]) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(ValueError, match="two held-out runs are named"):
        break_seal(runs, SHIPPED, tmp_path / "seal.json")


def test_the_score_command_refuses_them_before_it_looks(tmp_path: Path) -> None:
    run = record(tmp_path / "run.jsonl.gz", fails=True, recipe=RECIPE, seed=HELD_OUT[0])
    with pytest.raises(ValueError, match="held out"):
        lab_score([run])
    [score], _ = lab_score([run], seal=tmp_path / "seal.json")
    assert score.split == "held-out"
    again = record(tmp_path / "again.jsonl.gz", fails=True, recipe=RECIPE, seed=TUNING[0])
    [score], _ = lab_score([again])
    assert score.split == "tuning"
