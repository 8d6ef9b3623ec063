"""A checkpoint and a model get the first answer: is it attention, which head, is it this rounding, what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.cli.typed import foreshock
from torch import Tensor, nn
from typer.testing import Result

HEADS, WIDTH = 3, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2 * self.training)
        added: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return added


class Tagger(nn.Module):
    """An encoder whose embedding is its last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(40, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return hidden


def tagger() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(11)
    model, draw = Tagger(), torch.Generator().manual_seed(12)

    def loss() -> Tensor:
        tokens = torch.randint(40, (3, 20), generator=draw)
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(tokens)
        return F.cross_entropy(scores.float().flatten(0, 1), tokens.flip(1).flatten())

    return model, loss


def in_float32() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, _ = tagger()
    return model, lambda: model(torch.arange(20)[None]).square().mean()


def weights(**changes: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Healthy weights of a tagger, some of them changed; dots of their names are written as double underscores."""
    state = {name: tensor.clone() for name, tensor in tagger()[0].state_dict().items()}
    for name, change in changes.items():
        state[name.replace("__", ".")] = change(state[name.replace("__", ".")])
    return state


def key_bias(nats: float) -> dict[str, Tensor]:
    """Keys and queries of layer 1 head 2 share a direction by their biases: all its scores move by about `nats`."""
    dim = WIDTH // HEADS
    size = (nats / dim**0.5) ** 0.5
    places = (slice(2 * dim, 3 * dim), slice(WIDTH + 2 * dim, WIDTH + 3 * dim))

    def biased(bias: Tensor) -> Tensor:
        for place in places:
            bias[place] += size
        return bias

    return weights(blocks__1__qkv__bias=biased)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return tmp_path


def diagnosed(folder: Path, *states: object, build: str = "tagger", more: tuple[str, ...] = ()) -> Result:
    words = ["diagnose", f"test_verdict:{build}", "--batches", "2", *more]
    for number, state in enumerate(states):
        path = state if isinstance(state, Path) else folder / f"state{number}.pt"
        if not isinstance(state, Path):
            torch.save(state, path)
        words += ["--state", str(path)]
    return foreshock(*words)


def test_a_healthy_checkpoint_is_told_to_have_another_trouble(folder: Path) -> None:
    said = diagnosed(folder, weights())
    assert said.exit_code == 0, said.output
    assert "Not this rounding: no head has large scores" in said.output
    assert "foreshock switch" not in said.output
    assert "row_corrected" not in said.output


def test_a_head_whose_scores_moved_as_a_whole_is_named_with_what_would_confirm_it(folder: Path) -> None:
    said = diagnosed(folder, key_bias(60.0))
    assert "Attention, with the mark of this rounding: the scores of layer 1 head 2 lie +" in said.output
    assert "One checkpoint cannot say whether it grows" in said.output
    assert 'agent.set_mode(agent.modes(), "row_corrected"' in said.output


@pytest.mark.parametrize(
    ("nats", "sentence"),
    [
        ((20.0, 60.0), "Attention, most likely this rounding"),
        ((60.0, 60.0), "Attention is shifted, but does not grow"),
        ((20.0, 60.0, 20.0), "It grew and is back"),
    ],
)
def test_several_checkpoints_say_whether_the_shift_grows(nats: tuple[float, ...], sentence: str, folder: Path) -> None:
    said = diagnosed(folder, *map(key_bias, nats))
    assert sentence in said.output
    assert "layer 1 head 2" in said.output


def test_a_shift_in_attention_that_runs_in_float32_is_not_called_this_rounding(folder: Path) -> None:
    assert "as it was run here not by this rounding: it runs in float32" in diagnosed(
        folder, key_bias(60.0), build="in_float32"
    ).output.replace("\n", " ")


def test_scores_that_grew_apart_are_another_trouble(folder: Path) -> None:
    said = diagnosed(folder, weights(blocks__0__qkv__weight=lambda weight: weight * 60))
    assert "something else than this rounding: scores of layer 0 head" in said.output
    assert "a switch of numerics would not help" in said.output


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    said = diagnosed(folder, weights(blocks__1__qkv__weight=lambda weight: weight.fill_(float("nan"))))
    assert said.exit_code == 0, said.output
    assert "1 of its parameters hold values that are not finite, blocks.1.qkv.weight among them" in said.output


def test_finite_weights_that_overflow_are_named_by_layer(folder: Path) -> None:
    said = diagnosed(folder, weights(blocks__0__out__weight=lambda weight: weight.fill_(3e38)))
    assert said.exit_code == 0, said.output
    assert "in layer" in said.output
    assert "not finite" in said.output


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "net.tagger."])
@pytest.mark.parametrize("holder", [None, "model", "state_dict", "model_state_dict"])
def test_weights_are_found_wherever_a_training_loop_put_them(prefix: str, holder: str | None, folder: Path) -> None:
    state = {prefix + name: tensor for name, tensor in key_bias(60.0).items()}
    said = diagnosed(folder, {holder: state, "step": 3} if holder else state)
    assert "the scores of layer 1 head 2 lie" in said.output


def test_files_and_folders_of_safetensors_with_a_tied_weight_left_out_are_read(folder: Path) -> None:
    state = key_bias(60.0)
    del state["head.weight"]
    names = sorted(state)
    shards = folder / "shards"
    shards.mkdir()
    save_file({name: state[name] for name in names[:5]}, shards / "model-00001.safetensors")
    save_file({name: state[name] for name in names[5:]}, shards / "model-00002.safetensors")
    save_file(state, folder / "whole.safetensors")
    for path in (shards, folder / "whole.safetensors"):
        assert "the scores of layer 1 head 2 lie" in diagnosed(folder, path).output


def test_what_a_checkpoint_holds_beside_the_model_is_told_and_left_out(folder: Path) -> None:
    state = weights() | {"rope.inv_freq": torch.ones(2)}
    said = diagnosed(folder, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()})
    assert "rope.inv_freq belong to no part of the model and were left out" in said.output
    assert "keeps weights as float8_e4m3fn" in said.output


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, "is of another model: a, b fit no parameter of Tagger"),
        ({}, "holds no weights"),
        ([1], "holds a list; give a checkpoint"),
        (weights(blocks__0__norm__bias=lambda bias: bias[:5]), "blocks.0.norm.bias is [5] there and [24] in the model"),
        ({n: t for n, t in weights().items() if "norm" not in n}, "lacks blocks.0.norm.weight"),
    ],
)
def test_weights_of_another_model_are_refused_with_what_does_not_fit(
    state: object, sentence: str, folder: Path
) -> None:
    said = diagnosed(folder, state)
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
def test_what_is_no_file_of_weights_is_refused_with_a_sentence(content: object, sentence: str, folder: Path) -> None:
    path = folder / "weights"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
        if content == "distributed":
            (path / ".metadata").write_bytes(b"x")
    said = diagnosed(folder, path)
    assert said.exit_code == 1
    assert sentence in said.stderr


def fails() -> None:
    raise RuntimeError("the data are not mounted")


def gives_nothing() -> None:
    return None


def gives_a_number() -> tuple[nn.Module, Callable[[], object]]:
    model, loss = tagger()
    return model, lambda: loss().item()


def gives_many_losses() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, _ = tagger()
    return model, lambda: model(torch.arange(20)[None])


def without_a_graph() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = tagger()
    return model, torch.no_grad()(loss)


def with_one_batch() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = tagger()
    left = iter([loss])
    return model, lambda: next(left)()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        ("fails", "test_verdict:fails() failed with RuntimeError: the data are not mounted (test_verdict.py, line"),
        ("gives_nothing", "is no function that returns (model, loss)"),
        ("gives_a_number", "loss() gave a float"),
        ("gives_many_losses", "loss() gave a tensor of shape [1, 20, 40]"),
        ("without_a_graph", "the loss has no graph"),
        ("with_one_batch", "the loss of batch 2 of 2 failed with StopIteration"),
        ("nowhere", "test_verdict has none that is called 'nowhere'"),
    ],
)
def test_what_is_wrong_in_a_persons_own_code_is_a_sentence_that_names_the_place(
    build: str, sentence: str, folder: Path
) -> None:
    said = diagnosed(folder, build=build)
    assert said.exit_code == 1
    assert sentence in said.stderr


def test_a_module_and_a_head_that_do_not_exist_are_sentences(folder: Path) -> None:
    assert "layer 0 has no head 9; its heads are 0 to 2" in diagnosed(folder, more=("--head", "0.9")).stderr
    for command in ("diagnose", "doctor"):
        said = foreshock(command, "no_such_module:build")
        assert said.exit_code == 1
        assert "the module no_such_module of no_such_module:build failed" in said.stderr
