"""What a cure did to runs: read from traces, beside the same numbers counted by hand."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, identity_row
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.cure import as_json, cured_runs, fisher, table
from foreshock.lab.training.arm import RESCUED
from foreshock.monitor.detect.detectors import Detectors

RECORDED = Path(__file__).parents[2] / "lab" / "traces"


def sample(step: int, score: float, offset: float) -> wire.Sample:
    """Two heads, ten rows each; the second has the largest score and a negative offset."""
    words = np.tile(identity_row(), (2, 1))
    assert words.shape == (2, SLOT_COUNT)
    words[:, Slot.ROWS] = 10
    floats = words.view(np.float64)
    floats[:, Slot.ROW_MAX_ABS] = [score / 2, score]
    floats[:, Slot.SCORE_OFFSET_SUM] = [1.0, -10 * offset]
    return wire.Sample(step=step, since_step=step - 100, unix_seconds=0.0, states=wire.Array.of(words))


def write(
    folder: Path, arm: str, losses: list[float], scores: list[float], *, switch: int | None = None, **header: object
) -> Path:
    """A run of blocks of 100 steps: a loss and a largest score each."""
    path = folder / f"{arm}.jsonl.gz"
    known = {"recipe": "made-up", "arm": arm, "seed": 5, "truth": "rounding", "nature": "natural", "split": "tuning"}
    with TraceWriter(path, known | header) as writer:
        layer = wire.Layer(layer=0, name="a", heads=(0, 1), kv_heads=2, head_dim=8, served_by="reference")
        writer(wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel"))
        for block, (loss, score) in enumerate(zip(losses, scores, strict=True)):
            if switch == 100 * block:
                writer(
                    wire.Switched(
                        id="s",
                        step=switch,
                        outcome="applied",
                        heads=((0, 1),),
                        before=("plain",),
                        after=("exact_delta",),
                        reason="test",
                    )
                )
            writer(sample(100 * (block + 1), score, offset=score / 10))
            writer.steps(100 * block, np.full(100, loss), np.full(100, 0.5))
            if block % 2:  # the heads' offsets are 0.1 and -score / 10 nats
                common = {"common_mean": np.array([0.5, -score / 40]), "key_bias_norm": np.array([0.25, 8.0 + block])}
                writer.probe(100 * (block + 1), common)
    return path


def test_a_run_is_measured_beside_its_control_and_after_its_switch(tmp_path: Path) -> None:
    blocks = 20
    control = [2.0] * blocks
    harmed = [2.0] * 10 + [2.2] * 10
    scores = [40.0] * 10 + [900.0] + [30.0] * 9
    paths = [
        write(tmp_path, "control", control, [20.0] * blocks),
        write(tmp_path, "untreated", harmed, scores),
        write(tmp_path, "cured", [2.0] * 15 + [1.9] * 5, scores, switch=1100, when="harm"),
        write(
            tmp_path, "rescued", control, scores, switch=1000,
            policy="auto", mitigation=RESCUED.mitigation, switch_scope=RESCUED.switch_scope,
        ),
        write(tmp_path, "more", control, scores, switch=0, policy="auto", mitigation="other", switch_scope="model"),
    ]  # fmt: skip
    found = {run.arm: run for run in cured_runs(paths)}
    assert found["control"].excess is None
    assert found["untreated"].excess == pytest.approx(0.1)
    assert (found["untreated"].harm_step, found["untreated"].when) == (1001, "never")
    assert (found["untreated"].switch_step, found["untreated"].score_after) == (None, 900.0)
    assert found["cured"].excess == pytest.approx(-0.025, abs=1e-3)
    assert (found["cured"].switch_step, found["cured"].when) == (1100, "harm")
    assert (found["cured"].score_after, found["cured"].offset_end) == (30.0, 3.0)
    assert (found["rescued"].policy, found["rescued"].when, found["rescued"].score_after) == (
        "shipped",
        "by the agent",
        900.0,
    )
    assert (found["more"].policy, found["more"].when, found["more"].score_after) == ("auto", "start", 900.0)
    assert found["untreated"].common_share == pytest.approx(0.25)
    assert found["untreated"].key_bias == 27.0
    rows = {row.arm: row for row in table(list(found.values()))}
    assert (rows["untreated"].harmed, rows["untreated"].dangerous, rows["cured"].dangerous) == (1, 1, 0)
    assert (rows["untreated"].failed, rows["cured"].failed, rows["rescued"].failed) == (1, 0, 1)
    assert [rows[arm].chance for arm in ("untreated", "control", "cured")] == [None, None, None]
    assert rows["rescued"].chance == 1.0


@given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_the_chance_is_counted_over_every_way_to_deal_the_failures(runs: int, others: int, data: st.DataObject) -> None:
    failed, other_failed = (data.draw(st.integers(0, size)) for size in (runs, others))
    dealt = list(itertools.combinations(range(runs + others), failed + other_failed))
    few = sum(sum(place < runs for place in ways) <= failed for ways in dealt)
    assert fisher(failed, runs, other_failed, others) == pytest.approx(few / len(dealt))


def test_what_went_wrong_before_the_switch_is_not_held_against_the_cure(tmp_path: Path) -> None:
    control, scores = [2.0] * 20, [20.0] * 20
    early, late = [2.9] * 8 + [2.0] * 12, [2.9] * 8 + [2.0] * 6 + [2.2] * 6
    paths = [
        write(tmp_path, "control", control, scores),
        write(tmp_path, "untreated", early, scores),
        write(tmp_path, "cured", early, scores, switch=1000),
        write(tmp_path, "late", late, scores, switch=1000),
    ]
    found = {run.arm: run.harm_step for run in cured_runs(paths)}
    assert found == {"control": None, "untreated": 1, "cured": None, "late": 1401}


def test_a_loss_within_what_equal_controls_differ_by_is_no_harm(tmp_path: Path) -> None:
    control, scores = [2.0] * 20, [20.0] * 20
    paths = [
        write(tmp_path, "control", control, scores),
        write(tmp_path, "control-again", [2.0] * 10 + [2.08] * 10, scores),
        write(tmp_path, "untreated", [2.0] * 10 + [2.1] * 10, scores),
        write(tmp_path, "cured", [2.0] * 10 + [2.14] * 10, scores),
    ]
    without = {run.arm: run.harm_step for run in cured_runs([path for path in paths if "again" not in path.name])}
    beside = {run.arm: run.harm_step for run in cured_runs(paths)}
    assert (without["untreated"], beside["untreated"], beside["cured"]) == (1001, None, 1001)


def test_ten_of_twenty_against_none_is_proof() -> None:
    assert fisher(0, 20, 10, 20) < 1e-3
    assert fisher(0, 3, 1, 3) == pytest.approx(0.5)


def test_two_traces_of_one_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    paths = [write(folder, "untreated", [2.0] * 3, [1.0] * 3) for folder in (tmp_path, tmp_path / "again")]
    with pytest.raises(ValueError, match="made-up, arm untreated, seed 5 is given twice"):
        cured_runs(paths)


def test_recorded_runs_of_an_explosion_give_the_numbers_of_their_traces(tmp_path: Path) -> None:
    paths = [RECORDED / f"shared-values_{arm}_seed2.jsonl.gz" for arm in ("untreated", "control", "rescued")]
    found = {run.arm: run for run in cured_runs(paths)}
    untreated, control, rescued = (read_trace(path) for path in paths)
    last = int(control.steps.step[-1])
    window = [slice(last - 1000, last)] * 2
    mine, theirs = (t.steps.loss[w].mean() for t, w in zip((untreated, control), window, strict=True))
    assert found["untreated"].excess == pytest.approx(mine / theirs - 1)
    assert found["untreated"].harm_step == 6401
    switched = next(e.step for e in rescued.events if isinstance(e, wire.Switched))
    after = [s.words() for s in rescued.samples if s.since_step >= switched]
    expected = max(float(w.view(np.float64)[:, Slot.ROW_MAX_ABS].max()) for w in after if w is not None)
    assert found["rescued"].score_after == expected
    assert found["rescued"].switch_step == switched
    assert found["rescued"].common_share is None  # recorded before it was measured


def test_the_command_writes_what_the_table_was_made_of(tmp_path: Path) -> None:
    paths = [str(RECORDED / f"key-bias-small_{arm}_seed41.jsonl.gz") for arm in ("untreated", "control", "exact-delta")]
    target = tmp_path / "cure.json"
    result = CliRunner().invoke(app, ["lab", "cure", *paths, "--json", str(target)])
    assert result.exit_code == 0, result.output
    written = json.loads(target.read_text())
    assert written == json.loads(json.dumps(as_json(cured_runs(map(Path, paths)))))
    names = {
        "recipe",
        "seed",
        "arm",
        "policy",
        "switch_step",
        "when",
        "excess",
        "harm_step",
        "offset_end",
        "score_after",
    }
    assert all(names <= run.keys() for run in written["runs"])
    assert [run["arm"] for run in written["runs"]] == ["control", "exact-delta", "untreated"]


@pytest.mark.parametrize("name", ["kb256b128_rescued-all-centred-keys_seed1", "kb256_rescued-all-centred-keys_seed2"])
def test_a_recorded_run_that_was_switched_is_not_warned_about_for_what_the_switch_does_to_its_statistics(
    name: str,
) -> None:
    """Centred, the largest score of a healthy head of the first went from 18 to 53 at once: no growth."""
    trace = read_trace(RECORDED / "cure" / f"{name}.jsonl.gz")
    detectors = Detectors(trace.heads)
    raised = [v.step for sample in readings(trace) for v in detectors.update(sample) if v.state == "raised"]
    switched = next(event.step for event in trace.events if isinstance(event, wire.Switched))
    assert len(raised) == 1
    assert raised[0] <= switched  # today's detectors warn of one of them some steps before those that switched it
