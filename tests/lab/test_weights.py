"""Weights of any usual checkpoint are loaded, and what does not fit is refused with what does not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.lab.tagger_model import diagnosed, key_bias, weights


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
