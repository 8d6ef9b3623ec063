"""A small model that `foreshock diagnose` examines, with healthy or faulty weights, and faulty factories."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
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
    """An encoder whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(40, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return hidden


def tagger(checkpoint: str | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(11)
    model, draw = Tagger(), torch.Generator().manual_seed(12)
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint, weights_only=True))

    def loss() -> Tensor:
        tokens = torch.randint(40, (3, 20), generator=draw)
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(tokens)
        return F.cross_entropy(scores.float().flatten(0, 1), tokens.flip(1).flatten())

    return model, loss


def in_float32(checkpoint: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, _ = tagger(checkpoint)
    return model, lambda: model(torch.arange(20)[None]).square().mean()


def weights(**changes: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Healthy weights of a tagger with changes; write the dots of weight names as double underscores."""
    state = {name: tensor.clone() for name, tensor in tagger()[0].state_dict().items()}
    for name, change in changes.items():
        state[name.replace("__", ".")] = change(state[name.replace("__", ".")])
    return state


def key_bias(nats: float) -> dict[str, Tensor]:
    """The biases of keys and queries in layer 1 head 2 share a direction, which moves all scores by about `nats`."""
    dim = WIDTH // HEADS
    size = (nats / dim**0.5) ** 0.5
    places = (slice(2 * dim, 3 * dim), slice(WIDTH + 2 * dim, WIDTH + 3 * dim))

    def biased(bias: Tensor) -> Tensor:
        for place in places:
            bias[place] += size
        return bias

    return weights(blocks__1__qkv__bias=biased)


def run_diagnose(tmp_path: Path, *states: object, build: str = "tagger") -> Result:
    words = ["diagnose", f"{__name__}:{build}", "--batches", "2"]
    for number, state in enumerate(states):
        torch.save(state, path := tmp_path / f"state{number}.pt")
        words += ["--state", str(path)]
    return foreshock(*words)


def factory_fails() -> None:
    raise RuntimeError("the data are not mounted")


def returns_none() -> None:
    return None


def loss_returns_float() -> tuple[nn.Module, Callable[[], object]]:
    model, loss = tagger()
    return model, lambda: loss().item()


def loss_returns_many_values() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, _ = tagger()
    return model, lambda: model(torch.arange(20)[None])


def loss_without_graph() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = tagger()
    return model, torch.no_grad()(loss)


def only_one_batch() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = tagger()
    losses = iter([loss])
    return model, lambda: next(losses)()
