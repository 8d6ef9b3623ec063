"""Checkpoints, models and runs are examined, and what cannot be is refused with a sentence."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tests.lab.planted import TINY, Attention, Model, called
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from foreshock.cli.main import app
from foreshock.client import Service, ServiceError
from foreshock.lab.diagnosis.anatomy import Examined, examine
from foreshock.lab.diagnosis.examination import diagnose, examine_patient, lab_patient, own_patient
from foreshock.lab.recording.history import live, recorded
from foreshock.lab.training.arm import CONTROL, UNTREATED, find_arm
from foreshock.lab.training.run import lab_run
from foreshock.server.testing import FakeRank, LiveService

TRACES = Path(__file__).parents[2] / "lab" / "traces"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, paths = tmp_path_factory.mktemp("checkpoints"), []
    for arm in (UNTREATED, CONTROL):
        paths.append(folder / f"{arm.name}.pt")
        lab_run(TINY, arm, seed=1, trace=folder / f"{arm.name}.jsonl.gz", steps=3, checkpoint=paths[-1])
    return paths


@pytest.fixture
def examined(checkpoints: list[Path]) -> Iterator[dict[int, list[Examined]]]:
    with lab_patient(checkpoints[0]) as patient:
        yield examine_patient(patient, 2, None)[1]


def test_a_checkpoint_of_the_laboratory_is_examined_in_every_layer(examined: dict[int, list[Examined]]) -> None:
    assert sorted(examined) == [0, 1]
    found = diagnose([], examined, heads=[(1, 0)])
    assert found.sources == ["step 3"]
    [anatomy] = found.anatomies
    assert (anatomy.layer, anatomy.head, anatomy.batches) == (1, 0, 2)
    assert anatomy.weight_error_plain is not None
    with pytest.raises(ValueError, match="layer 7 was not examined; the model has layers 0, 1"):
        diagnose([], examined, heads=[(7, 0)])


def test_a_checkpoint_of_a_run_on_pytorchs_own_attention_is_examined_by_our_kernels(tmp_path: Path) -> None:
    path, recipe = tmp_path / "kept.pt", replace(TINY, micro_batch=2, compiled=True)
    trace = tmp_path / "kept.jsonl.gz"
    lab_run(recipe, find_arm("flash-untreated"), seed=1, trace=trace, steps=3, checkpoint=path)
    with lab_patient(path) as patient:
        _, examined = examine_patient(patient, 1, None)
    assert sorted(examined) == [0, 1]


def own_model() -> tuple[nn.Module, Callable[[], Tensor]]:
    """What a person writes to have their own model diagnosed."""
    torch.manual_seed(0)
    model = Model(Attention())
    return model, lambda: model(torch.randint(32, (2, 12))).square().mean()


def test_any_model_with_its_loss_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, _ = own_model()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with own_patient("test_examination:own_model", tmp_path / "state.pt") as patient:
        _, examined = examine_patient(patient, 2, None)
    assert diagnose([], examined).anatomies[0].head in (0, 1)


def foreshock(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_command_joins_a_trace_and_a_checkpoint(tmp_path: Path, checkpoints: list[Path]) -> None:
    said = foreshock(
        "diagnose", str(TRACES / "key-bias_fa2_batch32.trace.xz"), str(checkpoints[0]), "--head", "0.0",
        "--batches", "2", "--json", str(tmp_path / "d.json"),
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    for words in ("warned at step", "As recorded", "dW_Q off its truth", "foreshock switch RUN --mode row_corrected"):
        assert words in said.output
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["named"] == [[0, 0]]
    assert found["courses"][0]["cause"] == "rounding"
    assert found["anatomies"][0]["batches"] == 2


def test_a_healthy_trace_gets_no_advice_but_to_keep_watching() -> None:
    said = foreshock("diagnose", str(TRACES / "key-bias_fp32_batch32.trace.xz"))
    assert said.exit_code == 0
    assert "no warning" in said.output
    assert "Keep watching" in said.output


def test_a_run_of_the_service_is_diagnosed_like_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.lab.recording.history._POINTS", 8)
    trace = TRACES / "key-bias_fa2_batch32.trace.xz"
    with LiveService(tmp_path) as service, Service(service.url) as client:
        played = foreshock("replay", str(trace), "--url", service.url, "--run", "played")
        assert played.exit_code == 0, played.output
        history, same = live("played", client), recorded(trace)
        with pytest.raises(ServiceError, match="no run 'nobody'"):
            live("nobody", client)
        rank = FakeRank(run="young")
        body = rank.batch(rank.started()).model_dump_json()
        httpx.post(f"{service.url}/v1/batches", content=body, headers={"Content-Type": "application/json"})
        with pytest.raises(ValueError, match="young has sent no sample"):
            live("young", client)
    assert history.heads == same.heads
    at = np.searchsorted(same.steps, history.steps)
    np.testing.assert_allclose(
        history.values["head.score_offset"], same.values["head.score_offset"][at], rtol=1e-6, equal_nan=True
    )
    one, other = diagnose([history], {}), diagnose([same], {})
    assert one.named[0] == other.named[0]
    assert one.courses[0].warned_step == other.courses[0].warned_step


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.jsonl.gz"], "there is no trace at nothing.jsonl.gz; the recorded runs are"),
        (["{folder}/text"], "is nothing that torch loads safely"),
        (["{folder}/other.pt"], "is no checkpoint of the laboratory"),
        (["{folder}/number.pt"], "holds a int; give a checkpoint"),
        (["math:pi"], "names no function: math has none"),
        (["{trace}", "--head", "first"], "names no head; write LAYER.HEAD"),
        (["{trace}", "--head", "9.9"], "has no head 9.9; it has 0.0 to "),
        (["{trace}", "--numerics", "fp8"], "numerics 'fp8' does not exist"),
        (["some-run", "--url", "http://127.0.0.1:9"], "no service answers at http://127.0.0.1:9"),
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


def test_a_layer_without_a_backward_is_named() -> None:
    call, _ = called(Attention())
    with pytest.raises(ValueError, match=r"layer 0 \(attention\) saw no backward"):
        examine(replace(call, grad_out=None), "here")
