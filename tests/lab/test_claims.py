"""The paper's claims, put to runs whose answers are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.contract.slots import Floats
from foreshock.lab.diagnosis.claims import CLAIMS, Run, evaluate, gather, markdown
from foreshock.lab.recording.history import READ, History
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.training.arm import find_arm
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training, train

STEPS = np.linspace(50.0, 10000.0, 200, dtype=np.float64)


def planted(
    arm: str,
    seed: str,
    *,
    drift: float,
    ties_from: float = np.inf,
    bias: float = 0.0,
    norm: float = 1.0,
    exact: bool = False,
) -> Run:
    """A run of two heads, the first of which drifts by `drift` nats in 1000 steps from step 2000 on."""

    def pair(values: Floats) -> Floats:
        return np.stack([values, np.zeros_like(values)], 1)

    noise = np.random.default_rng(int(seed)).normal(0, 0.01, len(STEPS))
    values = {key: np.zeros((len(STEPS), 2)) for key in READ}
    values["head.score_offset"] = pair(np.maximum(STEPS - 2000, 0) / 1000 * drift)
    values["head.tied_rows_bf16"] = pair(np.where(ties_from <= STEPS, 0.5, 0.001))
    values["head.delta_bias"] = pair(noise + bias)
    values["head.query_norm"] = np.stack([np.full(len(STEPS), norm), np.ones(len(STEPS))], 1)
    numerics = "float32" if arm == "control" else "kernel"
    return Run("planted", arm, seed, History(arm, numerics, [(0, 0), (0, 1)], STEPS, values, []), exact)


def cells(runs: list[Run], arm: str) -> dict[str, tuple[int, list[float]]]:
    """What the cells of an arm say, by the claim's number."""
    return {claim.number: (cell.met, cell.values) for claim, cell in zip(CLAIMS, evaluate(runs)[arm], strict=True)}


def number(words: str) -> str:
    [found] = [claim.number for claim in CLAIMS if words in claim.number]
    return found


@pytest.fixture
def runs() -> list[Run]:
    made = []
    for seed, first_ties in (("1", 1000.0), ("2", 5000.0)):
        made.append(planted("control", seed, drift=0.0))
        made.append(planted("untreated", seed, drift=4.0, ties_from=first_ties, bias=0.02, norm=3.0))
    made.append(planted("exact-delta", "1", drift=1.0, exact=True))
    return made


def test_substitution_is_measured_against_the_exact_run_of_the_same_seed(runs: list[Run]) -> None:
    met, values = cells(runs, "untreated")[number("with exact delta from step 1")]
    assert values == pytest.approx([0.75])  # of seed 1 alone: seed 2 has no run with exact delta
    assert met == 1
    assert cells(runs, "exact-delta")[number("with exact delta from step 1")][1] == []


def test_a_branch_is_no_run_from_the_first_step(runs: list[Run]) -> None:
    branch = planted("offset-removed", "2", drift=1.0)
    branch.branched = True
    assert cells([*runs, branch], "offset-removed")[number("with exact delta from step 1")][1] == []


def test_runs_of_different_length_are_compared_where_both_were(runs: list[Run]) -> None:
    exact = runs[-1]
    assert exact.history is not None
    kept = STEPS <= 6000
    values = {key: array[kept] for key, array in exact.history.values.items()}
    exact.history = replace(exact.history, steps=STEPS[kept], values=values)
    _, [share] = cells(runs, "untreated")[number("with exact delta from step 1")]
    assert share == pytest.approx(0.75, abs=0.03)  # blocks are shorter in the shorter run; over all steps 0.87


def test_what_left_its_twin_first_is_told_from_what_followed(runs: list[Run]) -> None:
    met, values = cells(runs, "untreated")[number("steps from rows with several bf16 maxima")]
    # |offset| is 2 nats above its twin from step 2500 on; ties begin at 1000 in seed 1 and at 5000 in seed 2
    assert values == pytest.approx([1500.0, -2500.0], abs=200)
    assert met == 1


def test_ties_that_never_come_do_not_lead(runs: list[Run]) -> None:
    silent = [*runs, planted("paper", "1", drift=4.0)]
    met, values = cells(silent, "paper")[number("steps from rows with several bf16 maxima")]
    assert values == [-np.inf]
    assert met == 0
    assert "0 of 1: never" in markdown(silent)


def test_a_one_signed_bias_is_met_only_upwards_and_beyond_chance(runs: list[Run]) -> None:
    downwards = [*runs, planted("paper", "1", drift=4.0, bias=-0.02)]
    assert cells(downwards, "untreated")[number("over the run, standard errors")][0] == 2
    assert cells(downwards, "control")[number("over the run, standard errors")][0] == 0
    met, values = cells(downwards, "paper")[number("over the run, standard errors")]
    assert met == 0
    assert values[0] < -3


def test_norms_are_compared_with_the_other_heads_and_with_the_twin(runs: list[Run]) -> None:
    of_arm = cells(runs, "untreated")
    assert of_arm[number("over the median of the other heads")] == (2, [3.0, 3.0])
    assert of_arm[number("W_Q's norm leaves its float32 twin")][0] == 2
    assert cells(runs, "control")[number("W_Q's norm leaves its float32 twin")][1] == []


def test_an_arm_without_a_control_has_no_number_where_a_twin_is_needed() -> None:
    alone = cells([planted("untreated", "1", drift=4.0)], "untreated")
    assert alone[number("steps from rows with several bf16 maxima")][1] == []
    assert alone[number("over the median of the other heads")][1] == [1.0]


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no run was given"):
        markdown([])


@pytest.mark.full
def test_the_command_joins_a_trace_and_checkpoints_of_one_run(tmp_path: Path) -> None:
    tiny = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)
    training = Training(replace(tiny, sample_every_steps=1), find_arm("paper"), 1)
    paths = [tmp_path / "run.jsonl.gz", tmp_path / "step2.pt", tmp_path / "step4.pt"]

    def keep(step: int, loss: object) -> None:
        if step in (2, 4):
            torch.save(training.checkpoint(), tmp_path / f"step{step}.pt")

    with TraceWriter(paths[0], {"recipe": tiny.name, "arm": "paper", "seed": 1}) as writer:
        train(training, 5, sinks=(writer,), on_step=keep)
    [run] = gather(paths, 2)
    assert (run.recipe, run.arm, run.seed) == ("key-bias-small", "paper", "1")
    assert run.history is not None
    assert not run.exact
    assert {each.origin for each in run.examined[0]} == {"step 2", "step 4"}
    assert {each.numerics for each in run.examined[0]} == {"paper"}
    report = tmp_path / "claims.json"
    said = CliRunner().invoke(app, ["lab", "claims", *map(str, paths), "--batches", "2", "--report", str(report)])
    assert said.exit_code == 0, said.output
    lines = said.output.strip().splitlines()
    assert lines[0] == "| claim | number | met when | paper (1 runs) |"
    assert len(lines) == len(CLAIMS) + 2
    assert {line.count("|") for line in lines} == {5}
    rows = json.loads(report.read_text())["claims"]
    assert len(rows) == len(CLAIMS)
    by_number = {row["number"]: row["values"] for row in rows}
    assert len(by_number[number("dW_Q's squared error that is gone")]) == 1
    assert by_number[number("with exact delta from step 1")] == []
