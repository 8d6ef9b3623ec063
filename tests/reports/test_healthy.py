"""Trainings that are healthy and unusual: nothing is reported of them, and rows are counted as they are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.reports.settings import adapted, attention_of, changed, replaced
from tests.reports.training import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Model,
    Outcome,
    train,
)
from torch import Tensor, nn

PADDED = 3
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def left_padded(lowest: float) -> Tensor:
    """A causal mask and left padding, by a number that is added."""
    hidden = FUTURE.expand(BATCH, 1, -1, -1).clone()
    hidden[::2, ..., :PADDED] = True
    return torch.zeros(hidden.shape).masked_fill(hidden, lowest)


def relative_bias(farthest: float) -> Tensor:
    """ALiBi, by the distance of query and key, as at a length at which the farthest key has this bias."""
    distance = (torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]) * farthest / LENGTH
    slopes = 2.0 ** -torch.arange(HEADS)[:, None, None]
    return (slopes * distance).masked_fill(FUTURE, -math.inf)[None]


def positional_bias(farthest: float, origin: int) -> Tensor:
    """The same attention by the position of the key, from `origin` on: each row's scores are shifted as a whole."""
    position = (torch.arange(LENGTH)[:, None] - origin) * farthest / LENGTH
    return relative_bias(farthest) + position * 2.0 ** -torch.arange(HEADS)[:, None, None]


class Cosine(Attention):
    """Queries and keys of length 1, at the scale that Swin v2 begins with."""

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(query, dim=-1) * 10 * HEAD_DIM**0.5, F.normalize(key, dim=-1), value


class Narrow(Attention):
    """Heads of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = WIDTH // 2


class Sink(Attention):
    """A learned sink: a key of zeros, whose score is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        seen = torch.zeros(LENGTH, LENGTH).masked_fill(FUTURE, -math.inf).expand(1, HEADS, -1, -1)
        return super().forward(x, torch.cat([self.sink[:, None, None].expand(1, -1, LENGTH, 1), seen], -1))


class Experts(Model):
    """Two of four experts for each token, by a softmax of logits of which two are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
            logits = self.router(x)
            kept = logits.topk(2, -1).indices
            weights = torch.full_like(logits, -math.inf).scatter(-1, kept, logits.gather(-1, kept)).softmax(-1)
            x = x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class EncoderDecoder(Model):
    """Two blocks encode a longer and padded sequence, two decode, each with a look at what was encoded. Every third
    sequence that is encoded has a single token."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        memory, x = self.embed(torch.cat([tokens, tokens.flip(1)], 1)), self.embed(tokens)
        lengths = torch.tensor([2 * LENGTH, LENGTH, 1]).repeat(BATCH // 3)
        real = (torch.arange(2 * LENGTH) < lengths[:, None])[:, None, None]
        for block in self.blocks[:2]:
            memory = block(memory, real.expand(-1, -1, 2 * LENGTH, -1))
        for block, cross in zip(self.blocks[2:], self.cross, strict=True):
            cross.source = memory
            x = block(x, mask)
            x = x + cross(x, real)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class PackedLlama(nn.Module):
    """Documents of these lengths in one row, which transformers tells by their positions. All scores are large."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
        for layer in self.model.model.layers:
            layer.self_attn.q_proj.weight.detach().mul_(25)
        positions = torch.cat([torch.arange(length) for length in lengths])
        self.positions = positions.repeat(LENGTH // sum(lengths)).expand(BATCH, -1)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, position_ids=self.positions, use_cache=False).logits  # type: ignore[no-any-return]


class PaddedTranslation(nn.Module):
    """A model of transformers that encodes padded sequences and decodes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        real = (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH // 2, 1]).repeat(BATCH // 3)[:, None]).long()
        return self.model(tokens, attention_mask=real, decoder_input_ids=tokens.flip(1), use_cache=False).logits  # type: ignore[no-any-return]


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": HEAD_DIM, "d_ff": 2 * WIDTH, "num_heads": HEADS, "num_layers": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def bart() -> Any:
    each = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
    sizes = {f"{part}_{name}": size for name, size in each.items() for part in ("encoder", "decoder")}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=LENGTH, **sizes)
    )


def packed(*lengths: int) -> Tensor:
    """A causal mask of documents of these lengths in one row, again and again."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    document = torch.cat([document + len(lengths) * i for i in range(LENGTH // sum(lengths))])
    return ~FUTURE & (document[:, None] == document)


def large(factor: float, layers: int = 2) -> Callable[[], Model]:
    """Weights that were loaded, in some of whose layers scores are this many times as large."""
    return changed(lambda model: [attention_of(model, block).q_proj.weight.mul_(factor) for block in range(layers)])


def frozen(model: Model) -> None:
    model.blocks[:2].requires_grad_(False)
    model.embed.requires_grad_(False)


def evaluated(model: Model, step: int) -> Any:
    """Before every fifth step the model is evaluated on other lengths, once with a graph that nothing runs back."""
    for tokens in (torch.zeros(2, 5, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)) if step % 5 == 0 else ():
        model.eval()(tokens)
    model.train()
    return []


def accumulated(model: Model, step: int) -> Any:
    """A micro-batch before the one of the step, whose gradients are added."""
    model(torch.full((3, LENGTH), step % 7)).square().mean().backward()
    return []


@pytest.mark.parametrize(
    ("training", "unseen"),
    [
        pytest.param(lambda: train(30, mask=relative_bias(2000.0)), False, id="alibi"),
        pytest.param(lambda: train(30, mask=positional_bias(2000.0, 0)), False, id="alibi by keys"),
        pytest.param(
            lambda: train(30, mask=positional_bias(900.0, LENGTH - 1)), False, id="alibi by keys from the end"
        ),
        *(
            pytest.param(lambda lowest=lowest: train(30, mask=left_padded(lowest)), True, id=f"padding by {lowest:g}")
            for lowest in (-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf)
        ),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Cosine())), False, id="cosine"),
        *(
            pytest.param(
                lambda given=given: train(30, lr=1e-4, mask=packed(*given[1:]), make=large(given[0], LAYERS)),
                False,
                id=f"packed, scores times {given[0]}: {given[1:]}",
            )
            for given in ((1, 5, 4, 3), (25, 2, 1), (25, 1))
        ),
        pytest.param(lambda: train(30, lr=1e-3, make=EncoderDecoder), False, id="encoder and decoder"),
        *(
            pytest.param(
                lambda make=make: train(30, lr=1e-3, make=lambda: PaddedTranslation(make())), False, id=make.__name__
            )
            for make in (t5, bart)
        ),
        *(
            pytest.param(
                lambda given=given: train(30, lr=1e-4, make=lambda: PackedLlama(*given)),
                False,
                id=f"packed by positions: {given}",
            )
            for given in ((5, 4, 3), (2, 1))
        ),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Narrow())), False, id="head dim 2"),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Sink())), False, id="sink"),
        pytest.param(lambda: train(30, make=Experts), False, id="experts"),
        pytest.param(lambda: train(30, lr=1e-4, make=large(40.0)), False, id="large scores"),
        pytest.param(lambda: train(30, make=changed(frozen)), False, id="frozen"),
        pytest.param(lambda: train(30, lr=1e-3, make=adapted(1.0)), False, id="adapters"),
        pytest.param(lambda: train(30, before=evaluated), False, id="evaluated"),
        pytest.param(lambda: train(30, before=accumulated), False, id="accumulated"),
    ],
)
def test_nothing_is_reported_of_a_healthy_training(training: Callable[[], Outcome], unseen: bool) -> None:
    found = training()
    assert not found.raised, [each.sentence for each in found.raised]
    assert all(map(math.isfinite, found.losses))
    assert (f"{PADDED * BATCH // 2} of {BATCH * LENGTH} measured rows of a head see no key" in found.table) == unseen
    assert unseen or "see no key" not in found.table
