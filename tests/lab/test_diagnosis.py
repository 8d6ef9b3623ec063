"""`foreshock diagnose` finds faults of models, checkpoints and recordings with their location, and nothing else."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.typed import TRACE, foreshock
from tests.lab.diagnosed_models import Attention, left_padded
from tests.lab.short_traces import sample, started
from tests.lab.tagger_model import key_bias, run_diagnose, weights

from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import identity_row
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.statistics import new_state
from foreshock.lab.diagnosis.calls import Capture, Measured
from foreshock.lab.diagnosis.examination import Head, Source, examine, of_factory
from foreshock.lab.diagnosis.verdict import diagnose
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.monitor import attach

TINY = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)
FAILS = TRACE.with_name("key-bias_fa2_batch32.trace.xz")

# Models


_ATTENTION = "first in the forward: the output of the attention of layer"
_GRADIENT = "first in the backward, the gradient of model.layers"
FINDINGS = {
    "eager_overflows": rf"{_ATTENTION} 1 \(model.layers.1.self_attn\), head 2 of 4, is not .*: "
    r"query times key reaches 90\d\d\d before the scale, and float16 ends at 65504",
    "rows_without_keys": rf"{_ATTENTION} 0 \(model.layers.0.self_attn\), all 4 heads, .*: these rows see no key",
    "overflowing_mlp": r"in the forward, after the attention of layer 1: what enters model.layers.1.mlp.down_proj is",
    "nan_key_gradient": rf"{_GRADIENT}.2.self_attn.k_proj.weight is not finite",
    "nan_gradient_in_frozen_model": rf"{_GRADIENT}.1.mlp",
    "nan_query_gradient": r"in the backward, in the attention of layer 2 \(3, head 1 of 2: "
    "the gradient of its query is not",
    "left_padded": r"48 of 144 rows of layer 0 head 0 see no key, and so in 3 of 3 layers",
    "large_scores": r"layer 1 head 2 moved as a whole, by \+22\d\d\d.\d nats. .* score of 22\d\d\d by 17\d nats",
    "peaked": r"Attention is nearly one-hot in 12 of 12 heads: their entropy is 0.\d\d nats",
    "attention_with_weights": r"in the forward, before any attention: what enters out is not finite",
    "manual_attention": r"was not judged: none of its layers was measured.*\n.*it computes its attention by hand",
}


@pytest.mark.parametrize("build", FINDINGS)
def test_fault_of_a_model_is_found_with_its_location(build: str) -> None:
    result = foreshock("diagnose", f"tests.lab.diagnosed_models:{build}", "--batches", "2")
    assert result.exit_code == 0, result.output
    assert re.search(FINDINGS[build], result.output), result.output


@pytest.mark.parametrize("build", ["eager", "checkpointed"])
def test_healthy_model_has_no_finding_and_all_heads_are_judged(build: str) -> None:
    result = foreshock("diagnose", f"tests.lab.diagnosed_models:{build}", "--batches", "2")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Verdict: Not this rounding: no head has large scores"), result.output
    assert "of 12 heads in 3 layers" in result.output
    assert "Also" not in result.output
    assert "Note" not in result.output


def test_lora_layers_with_a_mask_are_judged() -> None:
    examined = of_factory("tests.lab.diagnosed_models:adapted", None, 2)
    assert [(head.layer, head.head) for head in examined.heads] == [
        (layer, head) for layer in range(3) for head in range(4)
    ]
    assert all({"offset", "shift", "largest", "output error"} <= head.cells.keys() for head in examined.heads)


def test_diagnosis_does_not_change_weights_or_buffers() -> None:
    model, loss = left_padded()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, url=None, spool_directory=None, quiet=True) as agent:
        examine("here", model, loss, 1, agent)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_diagnosis_measures_the_same_statistics_as_the_agent() -> None:
    torch.manual_seed(0)
    attention, x = Attention(), torch.randn(2, 12, 16)
    settings = {"attention": "kernels", "numerics": "kernel", "quiet": True, "url": None, "spool_directory": None}
    with attach(attention, **settings), Capture(attention) as capture:  # type: ignore[arg-type]
        (attention(x).square().sum() * 10).backward(retain_graph=True)
    [call] = capture.calls
    state = new_state(2)
    query, key, value = (x.detach().requires_grad_() for x in call.given[2:5])
    out = flash_attention(query, key, value, causal="top_left", numerics="kernel", state=state)
    out.sum().backward()  # type: ignore[no-untyped-call]
    measured = Measured(call)
    measured.add(call)
    words = state.numpy()
    for head, cells in enumerate(measured.cells()):
        assert cells["offset"] == pytest.approx(read("head.score_offset", words)[head], rel=0.01)
        assert cells["largest"] == pytest.approx(read("head.row_max_abs", words)[head], rel=0.02)
        assert 0 < cells["output error"] < 0.02


# Checkpoints of a user's model


VERDICTS: dict[str, tuple[list[dict[str, torch.Tensor]], str]] = {
    "healthy": ([weights()], "Not this rounding: no head has large scores"),
    "one shifted head": (
        [key_bias(60.0)],
        "Attention, with the mark of this rounding: the scores of layer 1 head 2 moved as a whole, by +",
    ),
    "shift grows": ([key_bias(20.0), key_bias(60.0)], "Attention, most likely this rounding"),
    "shift does not grow": ([key_bias(60.0)] * 2, "Attention is shifted, but the shift does not grow"),
    "shift grows and goes back": ([*map(key_bias, (20.0, 60.0, 20.0))], "It grew and is back"),
    "score growth": (
        [weights(blocks__0__qkv__weight=lambda weight: weight * 60)],
        "something else than this rounding: scores of layer 0 head",
    ),
    "weights not finite": (
        [weights(blocks__1__qkv__weight=lambda weight: weight.fill_(math.nan))],
        "1 of its parameters hold values that are not finite: blocks.1.qkv.weight.",
    ),
    "finite weights that overflow": (
        [weights(blocks__0__out__weight=lambda weight: weight.fill_(3e38))],
        "first in the forward, after the attention of layer 0: ",
    ),
}


@pytest.mark.parametrize("checkpoints", VERDICTS)
def test_verdict_on_checkpoints_matches_the_change_of_their_weights(checkpoints: str, tmp_path: Path) -> None:
    states, sentence = VERDICTS[checkpoints]
    result = run_diagnose(tmp_path, *states)
    assert result.exit_code == 0, result.output
    assert sentence in result.output
    switches = any(words in sentence for words in ("mark of this rounding", "most likely", "is back"))
    assert ('agent.set_mode(agent.modes(), "row_corrected"' in result.output) is switches
    assert ("A switch of numerics would not help" in result.output) is ("something else" in sentence)


def test_shift_in_float32_attention_is_not_attributed_to_rounding(tmp_path: Path) -> None:
    assert "not by this rounding, because it ran in float32 here" in run_diagnose(
        tmp_path, key_bias(60.0), build="in_float32"
    ).output.replace("\n", " ")


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            "factory_fails",
            "tagger_model:factory_fails() failed with RuntimeError: the data are not mounted (tagger_model.py, line",
        ),
        ("returns_none", "must return (model, loss), where loss() returns"),
        ("loss_returns_float", "loss() must return a tensor of one number that requires grad, but returned a float"),
        ("loss_returns_many_values", "that requires grad, but returned one of shape [1, 20, 40]"),
        ("loss_without_graph", "that requires grad, but returned one of shape []"),
        ("only_one_batch", "batch 2 of 2 failed with StopIteration"),
        ("nowhere", "tagger_model has no callable 'nowhere'"),
    ],
)
def test_error_in_user_code_is_reported_with_its_location(build: str, sentence: str, tmp_path: Path) -> None:
    result = run_diagnose(tmp_path, build=build)
    assert result.exit_code == 1
    assert sentence in result.stderr


def test_checkpoint_of_another_model_is_rejected_with_the_size_mismatch(tmp_path: Path) -> None:
    result = run_diagnose(tmp_path, weights(blocks__0__norm__bias=lambda bias: bias[:5]))
    assert result.exit_code == 1
    assert "state0.pt) failed with RuntimeError" in result.stderr
    assert "size mismatch for blocks.0.norm.bias" in result.stderr


def test_missing_module_is_reported() -> None:
    for command in ("diagnose", "doctor"):
        result = foreshock(command, "no_such_module:build")
        assert result.exit_code == 1
        assert "the module no_such_module of no_such_module:build failed" in result.stderr


# Recordings


def test_failing_trace_is_diagnosed_with_its_head_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "d.json"
    result = foreshock("diagnose", str(FAILS), "--json", str(report))
    assert result.exit_code == 0, result.output
    for words in ("warned at step", "foreshock switch RUN --mode row_corrected"):
        assert words in result.output
    found = json.loads(report.read_text())
    assert found["findings"][0]["kind"] == "rounding"
    heads = {(head["source"], head["layer"], head["head"]): head for head in found["heads"]}
    assert heads[FAILS.name, 0, 0]["warned"][1] == "rounding"


def test_healthy_trace_gets_only_the_advice_to_keep_watching() -> None:
    result = foreshock("diagnose", str(TRACE))
    assert result.exit_code == 0
    assert "no head was warned about" in result.output
    assert "keep watching" in result.output
    assert "foreshock switch" not in result.output
    assert [line for line in result.stdout.splitlines() if line.endswith(" ")] == []


def test_recording_with_an_infinite_loss_is_not_called_quiet(tmp_path: Path) -> None:
    state = np.tile(identity_row(), (2, 1))
    with TraceWriter(tmp_path / "a.jsonl.gz", {}) as writer:
        writer(started(2))
        for step in (1, 2, 3):
            writer(sample(step, step - 1, state))  # its loss is infinite
    result = foreshock("diagnose", str(tmp_path / "a.jsonl.gz"))
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "Verdict: a.jsonl.gz: Numbers are not finite since step 1" in output
    assert "Diagnose the last checkpoint from before that step" in output
    assert "keep watching" not in output


def test_first_rounding_warning_of_a_recording_has_its_own_step() -> None:
    warned = ((40, "score growth"), (900, "rounding"), (950, "rounding"))
    heads = [Head("a.xz", 0, head, {}, each) for head, each in enumerate(warned)]
    rounding, other = diagnose([Source("a.xz", heads)])
    assert "rounding was warned about, first at step 900: layer 0 head 1, layer 0 head 2." in rounding.words
    assert "layer 0 head 0 had a warning with another cause" in other.words


def test_large_offset_is_a_finding_even_without_a_warning() -> None:
    heads = [Head("a.xz", 0, head, {"offset": offset, "largest": 1.0}) for head, offset in ((0, 1.0), (1, -117.9))]
    assert [found.kind for found in diagnose([Source("a.xz", heads[:1])])] == ["quiet"]
    [found] = diagnose([Source("a.xz", heads)])
    assert (found.kind, found.heads) == ("large", heads[1:])
    assert "layer 0 head 1 are far from zero. The first has an offset of -117.9 nats" in found.words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.jsonl.gz"], "there is no trace at nothing.jsonl.gz; the recorded runs are"),
        (["{folder}/other.pt"], "other.pt is neither a trace (.trace.xz or .jsonl.gz) nor module:factory"),
        (["math:pi"], "math:pi is not a function: the module math has no callable 'pi'"),
        (["some-run"], "For a run of the service use foreshock incidents"),
    ],
)
def test_invalid_argument_of_diagnose_is_rejected(
    words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    result = foreshock("diagnose", *(word.format(folder=tmp_path, trace=TRACE) for word in words))
    assert result.exit_code == 1
    assert sentence in (result.output + capfd.readouterr().err)
