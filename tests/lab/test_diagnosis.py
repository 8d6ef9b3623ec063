"""`foreshock diagnose` on models, checkpoints and recordings: it finds the fault with its place, and nothing else."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.typed import TRACE, foreshock
from tests.lab.patients import Attention, left_padded
from tests.lab.tagger_model import diagnosed, key_bias, weights

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.statistics import new_state
from foreshock.lab.diagnosis.calls import Capture, measured
from foreshock.lab.diagnosis.examination import Head, Source, examine, of_checkpoint, of_factory
from foreshock.lab.diagnosis.verdict import diagnose
from foreshock.lab.training.long_run import LongRun
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.variant import find_variant
from foreshock.monitor import attach

TINY = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)
FAILS = TRACE.with_name("key-bias_fa2_batch32.trace.xz")

# Models


_ATTENTION = "first in the forward: the output of the attention of layer"
_GRADIENT = "first in the backward, the gradient of model.layers"
FOUND = {
    "eager_overflows": rf"{_ATTENTION} 1 \(model.layers.1.self_attn\), head 2 of 4, is not .*: "
    r"query times key reaches 90\d\d\d before the scale, and float16 ends at 65504",
    "rows_without_a_key": rf"{_ATTENTION} 0 \(model.layers.0.self_attn\), all 4 heads, .*: these rows see no key",
    "overflowing_mlp": r"in the forward, after the attention of layer 1: what enters model.layers.1.mlp.down_proj is",
    "hurt_keys": rf"{_GRADIENT}.2.self_attn.k_proj.weight is not finite",
    "hurt_frozen": rf"{_GRADIENT}.1.mlp",
    "hurt_queries": r"in the backward, in the attention of layer 2 \(3, head 1 of 2: the gradient of its query is not",
    "left_padded": r"48 of 144 rows of layer 0 head 0 see no key, and so in 3 of 3 layers",
    "large_scores": r"layer 1 head 2 moved as a whole, by \+22\d\d\d.\d nats. .* score of 22\d\d\d by 17\d nats",
    "peaked": r"Attention is nearly one-hot in 12 of 12 heads: their entropy is 0.\d\d nats",
    "attention_with_weights": r"in the forward, before any attention: what enters out is not finite",
    "by_hand": r"was not judged: none of its layers was measured.*\n.*it computes its attention by hand",
    "partly_trained": r"^Verdict: Not this rounding: .* of 12 heads in 3 layers",
}


@pytest.mark.parametrize("build", FOUND)
def test_what_is_wrong_with_a_model_is_found_with_its_place(build: str) -> None:
    said = foreshock("diagnose", f"tests.lab.patients:{build}", "--batches", "2")
    assert said.exit_code == 0, said.output
    assert re.search(FOUND[build], said.output), said.output


@pytest.mark.parametrize("build", ["eager", "packed", "sliding", "checkpointed"])
def test_a_sound_model_has_no_finding_and_all_its_heads_are_judged(build: str) -> None:
    said = foreshock("diagnose", f"tests.lab.patients:{build}", "--batches", "2")
    assert said.exit_code == 0, said.output
    assert said.output.startswith("Verdict: Not this rounding: no head has large scores"), said.output
    assert "of 12 heads in 3 layers" in said.output
    assert "Also" not in said.output
    assert "Note" not in said.output


def test_layers_of_adapters_under_a_mask_are_judged_like_any_other() -> None:
    examined = of_factory("tests.lab.patients:adapted", None, 2)
    assert [(head.layer, head.head) for head in examined.heads] == [
        (layer, head) for layer in range(3) for head in range(4)
    ]
    assert all({"offset", "shift", "largest", "output error"} <= head.cells.keys() for head in examined.heads)


def test_a_diagnosis_changes_neither_weights_nor_buffers() -> None:
    model, loss = left_padded()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, url=None, spool_directory=None, quiet=True):
        examine("here", model, loss, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_measured_of_a_call_is_what_the_agent_counts() -> None:
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
    sums, rows = state.view(torch.float64), state[:, Slot.ROWS]
    found = measured(call)
    assert found["offset"] == pytest.approx((sums[:, Slot.SCORE_OFFSET_SUM] / rows).numpy(), rel=0.01)
    scores = (query.double() @ key.double().mT).detach() / math.sqrt(query.shape[-1])
    largest = scores.tril().abs().amax((0, 2, 3))
    assert found["largest"] == pytest.approx(largest.numpy(), rel=0.02)
    assert found["output error"] == pytest.approx([0.0, 0.0], abs=0.02)
    assert (found["output error"] > 0).all()


# Checkpoints of one's own model


def test_a_healthy_checkpoint_is_told_to_have_another_trouble(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights())
    assert said.exit_code == 0, said.output
    assert "Not this rounding: no head has large scores" in said.output
    assert "foreshock switch" not in said.output
    assert "row_corrected" not in said.output


def test_a_head_whose_scores_moved_as_a_whole_is_named_with_what_would_confirm_it(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, key_bias(60.0))
    assert (
        "Attention, with the mark of this rounding: the scores of layer 1 head 2 moved as a whole, by +" in said.output
    )
    assert "One checkpoint cannot say whether it grows" in said.output
    assert 'agent.set_mode(agent.modes(), "row_corrected"' in said.output


@pytest.mark.parametrize(
    ("nats", "sentence"),
    [
        ((20.0, 60.0), "Attention, most likely this rounding"),
        ((60.0, 60.0), "Attention is shifted, but the shift does not grow"),
        ((20.0, 60.0, 20.0), "It grew and is back"),
    ],
)
def test_several_checkpoints_say_whether_the_shift_grows(
    nats: tuple[float, ...], sentence: str, tmp_path: Path
) -> None:
    said = diagnosed(tmp_path, *map(key_bias, nats))
    assert sentence in said.output
    assert "layer 1 head 2" in said.output


def test_a_shift_in_attention_that_runs_in_float32_is_not_called_this_rounding(tmp_path: Path) -> None:
    assert "not by this rounding, because it ran in float32 here" in diagnosed(
        tmp_path, key_bias(60.0), build="in_float32"
    ).output.replace("\n", " ")


def test_scores_that_grew_apart_are_another_trouble(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__0__qkv__weight=lambda weight: weight * 60))
    assert "something else than this rounding: scores of layer 0 head" in said.output
    assert "A switch of numerics would not help" in said.output


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__1__qkv__weight=lambda weight: weight.fill_(float("nan"))))
    assert said.exit_code == 0, said.output
    assert "1 of its parameters hold values that are not finite, blocks.1.qkv.weight among them" in said.output


def test_finite_weights_that_overflow_are_named_by_layer(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights(blocks__0__out__weight=lambda weight: weight.fill_(3e38)))
    assert said.exit_code == 0, said.output
    assert "first in the forward, after the attention of layer 0: " in said.output


@pytest.mark.parametrize(
    ("holder", "prefix"),
    [
        (None, ""),
        (None, "module."),
        ("model", "_orig_mod."),
        ("state_dict", "model."),
        ("model_state_dict", "net.tagger."),
    ],
)
def test_weights_are_found_wherever_a_training_loop_put_them(prefix: str, holder: str | None, tmp_path: Path) -> None:
    state = {prefix + name: tensor for name, tensor in key_bias(60.0).items()}
    said = diagnosed(tmp_path, {holder: state, "step": 3} if holder else state)
    assert "the scores of layer 1 head 2 moved as a whole" in said.output


def test_files_and_folders_of_safetensors_with_a_tied_weight_left_out_are_read(tmp_path: Path) -> None:
    state = key_bias(60.0)
    del state["head.weight"]
    names = sorted(state)
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file({name: state[name] for name in names[:5]}, shards / "model-00001.safetensors")
    save_file({name: state[name] for name in names[5:]}, shards / "model-00002.safetensors")
    save_file(state, tmp_path / "whole.safetensors")
    for path in (shards, tmp_path / "whole.safetensors"):
        assert "the scores of layer 1 head 2 moved as a whole" in diagnosed(tmp_path, path).output


def test_what_a_checkpoint_holds_beside_the_model_is_told_and_left_out(tmp_path: Path) -> None:
    said = diagnosed(tmp_path, weights() | {"rope.inv_freq": torch.ones(2)})
    assert "rope.inv_freq belong to no part of the model and were left out" in said.output


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, "is of another model: a, b fit no parameter of Tagger"),
        ({}, "holds no weights"),
        ([1], "holds a list; give a checkpoint"),
        (
            weights(blocks__0__norm__bias=lambda bias: bias[:5]),
            "is of another model: size mismatch for blocks.0.norm.bias: copying a param with shape torch.Size([5])",
        ),
        ({n: t for n, t in weights().items() if "norm" not in n}, "lacks blocks.0.norm.weight"),
    ],
)
def test_weights_of_another_model_are_refused_with_what_does_not_fit(
    state: object, sentence: str, tmp_path: Path
) -> None:
    said = diagnosed(tmp_path, state)
    assert said.exit_code == 1
    assert sentence in said.stderr


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no file"),
        (b"", "it is empty"),
        (b"hello" * 50, "is nothing that torch loads safely"),
        ("folder", "a folder without *.safetensors"),
        ("distributed", "dcp_to_torch"),
    ],
)
def test_what_is_no_file_of_weights_is_refused_with_a_sentence(content: object, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
        if content == "distributed":
            (path / ".metadata").write_bytes(b"x")
    said = diagnosed(tmp_path, path)
    assert said.exit_code == 1
    assert sentence in said.stderr


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            "fails",
            "tagger_model:fails() failed with RuntimeError: the data are not mounted (tagger_model.py, line",
        ),
        ("gives_nothing", "is no function that returns (model, loss)"),
        ("gives_a_number", "loss() gave a float"),
        ("gives_many_losses", "loss() gave a tensor of shape [1, 20, 40]"),
        ("without_a_graph", "the loss has no graph"),
        ("with_one_batch", "the loss of batch 2 of 2 failed with StopIteration"),
        ("nowhere", "tests.lab.tagger_model has none that is called 'nowhere'"),
    ],
)
def test_what_is_wrong_in_a_persons_own_code_is_a_sentence_that_names_the_place(
    build: str, sentence: str, tmp_path: Path
) -> None:
    said = diagnosed(tmp_path, build=build)
    assert said.exit_code == 1
    assert sentence in said.stderr


def test_a_module_and_a_head_that_do_not_exist_are_sentences(tmp_path: Path) -> None:
    assert "has no head 0.9; it has 0.0 to 1.2" in diagnosed(tmp_path, more=("--head", "0.9")).stderr
    for command in ("diagnose", "doctor"):
        said = foreshock(command, "no_such_module:build")
        assert said.exit_code == 1
        assert "the module no_such_module of no_such_module:build failed" in said.stderr


# Checkpoints of the laboratory, and recordings


@pytest.mark.parametrize(("variant", "exact"), [("flash-untreated", False), ("control", True)])
def test_a_checkpoint_of_the_laboratory_is_examined_with_the_attention_that_trained_it(
    variant: str, exact: bool, tmp_path: Path
) -> None:
    recipe = replace(TINY, micro_batch=2, compiled=True)
    run = LongRun(recipe=recipe, variant=find_variant(variant), seed=1, folder=tmp_path, steps=3)
    run.train()
    [path] = run.checkpoints.all()
    source = of_checkpoint(path, 2)
    assert (source.name, source.exact) == ("step 3", exact)
    assert {head.place for head in source.heads} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    [column] = diagnose([source], [(1, 0)]).heads
    assert math.isfinite(column["output error"])
    with pytest.raises(ValueError, match=r"step 3 has no head 7\.0; it has 0\.0 to 1\.1"):
        diagnose([source], [(7, 0)])
    report = tmp_path / "d.json"
    said = foreshock("diagnose", str(FAILS), str(path), "--head", "0.0", "--batches", "2", "--json", str(report))
    assert said.exit_code == 0, said.output
    for words in ("warned at step", "output off float64", "foreshock switch RUN --mode row_corrected"):
        assert words in said.output
    found = json.loads(report.read_text())
    assert found["findings"][0]["kind"] == "rounding"
    assert [(head["source"], head["layer"], head["head"]) for head in found["heads"]] == [
        (FAILS.name, 0, 0),
        ("step 3", 0, 0),
    ]
    assert found["heads"][0]["cells"]["warned"].endswith(", rounding")


def test_a_healthy_trace_gets_no_advice_but_to_keep_watching_and_no_line_that_ends_in_blanks() -> None:
    said = foreshock("diagnose", str(TRACE))
    assert said.exit_code == 0
    assert "no head was warned about" in said.output
    assert "keep watching" in said.output
    assert "foreshock switch" not in said.output
    assert [line for line in said.stdout.splitlines() if line.endswith(" ")] == []


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
    said = foreshock("diagnose", *(word.format(folder=tmp_path, trace=TRACE) for word in words))
    assert said.exit_code == 1
    assert sentence in (said.output + capfd.readouterr().err)
