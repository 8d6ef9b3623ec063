"""Checkpoints, models and runs are examined, and what cannot be is refused with a sentence."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.planted import TINY, Attention, Model
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from foreshock.cli.main import app
from foreshock.lab.diagnosis.examination import Head, Source, of_checkpoint, of_factory
from foreshock.lab.diagnosis.verdict import diagnose
from foreshock.lab.training.long_run import Checkpoints, LongRun
from foreshock.lab.training.variant import CONTROL, UNTREATED, find_variant

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"


def checkpoint_of(run: LongRun) -> Path:
    """The last checkpoint of a run, which is trained."""
    run.train()
    path = Checkpoints(run.folder / "checkpoints").newest()
    assert path is not None
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    runs = (LongRun(recipe=TINY, variant=a, seed=1, folder=folder / a.name, steps=3) for a in (UNTREATED, CONTROL))
    return [checkpoint_of(run) for run in runs]


def test_a_checkpoint_of_the_laboratory_is_examined_in_every_layer(checkpoints: list[Path]) -> None:
    source = of_checkpoint(checkpoints[0], 2)
    assert source.name == "step 3"
    [column] = diagnose([source], [(1, 0)]).heads
    assert (column.layer, column.head) == (1, 0)
    assert math.isfinite(column["output error"])
    with pytest.raises(ValueError, match=r"step 3 has no head 7\.0; it has 0\.0 to 1\.1"):
        diagnose([source], [(7, 0)])


@pytest.mark.parametrize(("variant", "exact"), [("flash-untreated", False), ("control", True)])
def test_a_checkpoint_is_examined_with_the_attention_that_trained_it(variant: str, exact: bool, tmp_path: Path) -> None:
    recipe = replace(TINY, micro_batch=2, compiled=True)
    run = LongRun(recipe=recipe, variant=find_variant(variant), seed=1, folder=tmp_path, steps=3)
    source = of_checkpoint(checkpoint_of(run), 1)
    assert {head.layer for head in source.heads} == {0, 1}
    assert source.exact == exact


def own_model() -> tuple[nn.Module, Callable[[], Tensor]]:
    """What a person writes to have their own model diagnosed."""
    torch.manual_seed(0)
    model = Model(Attention())
    return model, lambda: model(torch.randint(32, (2, 12))).square().mean()


def test_any_model_with_its_loss_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, _ = own_model()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    source = of_factory("test_examination:own_model", tmp_path / "state.pt", 2)
    assert [(head.layer, head.head) for head in source.heads] == [(0, 0), (0, 1)]


def foreshock(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_command_joins_a_trace_and_a_checkpoint(tmp_path: Path, checkpoints: list[Path]) -> None:
    said = foreshock(
        "diagnose", str(TRACES / "key-bias_fa2_batch32.trace.xz"), str(checkpoints[0]), "--head", "0.0",
        "--batches", "2", "--json", str(tmp_path / "d.json"),
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    for words in ("warned at step", "output off float64", "foreshock switch RUN --mode row_corrected"):
        assert words in said.output
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["findings"][0]["kind"] == "rounding"
    assert [(head["source"], head["layer"], head["head"]) for head in found["heads"]] == [
        ("key-bias_fa2_batch32.trace.xz", 0, 0),
        ("step 3", 0, 0),
    ]
    assert found["heads"][0]["cells"]["warned"].endswith(", rounding")


def test_a_healthy_trace_gets_no_advice_but_to_keep_watching() -> None:
    said = foreshock("diagnose", str(TRACES / "key-bias_fp32_batch32.trace.xz"))
    assert said.exit_code == 0
    assert "no head was warned about" in said.output
    assert "keep watching" in said.output
    assert "foreshock switch" not in said.output


def test_a_head_far_from_zero_is_a_finding_without_any_warning() -> None:
    heads = [Head("a.xz", 0, head, {"offset": offset, "largest": 1.0}) for head, offset in ((0, 1.0), (1, -117.9))]
    assert [found.kind for found in diagnose([Source("a.xz", heads[:1])]).findings] == ["quiet"]
    [found] = diagnose([Source("a.xz", heads)]).findings
    assert (found.kind, found.heads) == ("large", [(0, 1)])
    assert "layer 0 head 1 are far from zero. The first has an offset of -117.9 nats" in found.words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.jsonl.gz"], "there is no trace at nothing.jsonl.gz; the recorded runs are"),
        (["{folder}/text"], "is nothing that torch loads safely"),
        (["{folder}/other.pt"], "is not a checkpoint of the laboratory"),
        (["{folder}/number.pt"], "holds a int; give a checkpoint"),
        (["math:pi"], "names no function: math has none"),
        (["{trace}", "--head", "first"], "names no head; write LAYER.HEAD"),
        (["{trace}", "--head", "9.9"], "has no head 9.9; it has 0.0 to "),
        (["some-run"], "some-run does not exist; give a trace"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_with_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save(3, tmp_path / "number.pt")
    trace = str(TRACES / "key-bias_fp32_batch32.trace.xz")
    said = foreshock("diagnose", *(word.format(folder=tmp_path, trace=trace) for word in words))
    assert said.exit_code == 1
    assert sentence in (said.output + capfd.readouterr().err)
