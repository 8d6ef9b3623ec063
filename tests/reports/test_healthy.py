"""Healthy but unusual trainings raise no warning, and rows without keys are counted correctly."""

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


def left_padded(hidden_value: float) -> Tensor:
    """An additive mask: causal with left padding."""
    hidden = FUTURE.expand(BATCH, 1, -1, -1).clone()
    hidden[::2, ..., :PADDED] = True
    return torch.zeros(hidden.shape).masked_fill(hidden, hidden_value)


def relative_bias(max_bias: float) -> Tensor:
    """ALiBi by the distance of query and key, scaled so that the farthest key has the bias `max_bias`."""
    distance = (torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]) * max_bias / LENGTH
    slopes = 2.0 ** -torch.arange(HEADS)[:, None, None]
    return (slopes * distance).masked_fill(FUTURE, -math.inf)[None]


def positional_bias(max_bias: float, origin: int) -> Tensor:
    """The same attention with the bias by key position from `origin`, which shifts all scores of a row."""
    position = (torch.arange(LENGTH)[:, None] - origin) * max_bias / LENGTH
    return relative_bias(max_bias) + position * 2.0 ** -torch.arange(HEADS)[:, None, None]


class Cosine(Attention):
    """Queries and keys of norm 1, with the initial scale of Swin v2."""

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(query, dim=-1) * 10 * HEAD_DIM**0.5, F.normalize(key, dim=-1), value


class Narrow(Attention):
    """Heads of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = WIDTH // 2


class Sink(Attention):
    """A learned attention sink: a zero key whose score is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        causal_mask = torch.zeros(LENGTH, LENGTH).masked_fill(FUTURE, -math.inf).expand(1, HEADS, -1, -1)
        return super().forward(x, torch.cat([self.sink[:, None, None].expand(1, -1, LENGTH, 1), causal_mask], -1))


class Experts(Model):
    """Two of four experts per token, by a softmax over logits of which two are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
            logits = self.router(x)
            chosen = logits.topk(2, -1).indices
            weights = torch.full_like(logits, -math.inf).scatter(-1, chosen, logits.gather(-1, chosen)).softmax(-1)
            x = x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class EncoderDecoder(Model):
    """Two blocks encode a longer, padded sequence, and two decode with cross-attention. Every third encoded sequence
    has a single token."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        memory, x = self.embed(torch.cat([tokens, tokens.flip(1)], 1)), self.embed(tokens)
        lengths = torch.tensor([2 * LENGTH, LENGTH, 1]).repeat(BATCH // 3)
        is_token = (torch.arange(2 * LENGTH) < lengths[:, None])[:, None, None]
        for block in self.blocks[:2]:
            memory = block(memory, is_token.expand(-1, -1, 2 * LENGTH, -1))
        for block, cross in zip(self.blocks[2:], self.cross, strict=True):
            cross.source = memory
            x = block(x, mask)
            x = x + cross(x, is_token)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class PackedLlama(nn.Module):
    """Documents of these lengths in one row, which transformers detects from position_ids. All scores are large."""

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
    """An encoder-decoder model from transformers with padded inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        is_token = (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH // 2, 1]).repeat(BATCH // 3)[:, None]).long()
        return self.model(tokens, attention_mask=is_token, decoder_input_ids=tokens.flip(1), use_cache=False).logits  # type: ignore[no-any-return]


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": HEAD_DIM, "d_ff": 2 * WIDTH, "num_heads": HEADS, "num_layers": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def bart() -> Any:
    part_sizes = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
    sizes = {f"{part}_{name}": size for name, size in part_sizes.items() for part in ("encoder", "decoder")}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=LENGTH, **sizes)
    )


def packed(*lengths: int) -> Tensor:
    """A causal mask of repeated documents of these lengths in one row."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    document = torch.cat([document + len(lengths) * i for i in range(LENGTH // sum(lengths))])
    return ~FUTURE & (document[:, None] == document)


def large(factor: float, layers: int = 2) -> Callable[[], Model]:
    """A model whose scores are multiplied by `factor` in its first layers."""
    return changed(lambda model: [attention_of(model, block).q_proj.weight.mul_(factor) for block in range(layers)])


def freeze(model: Model) -> None:
    model.blocks[:2].requires_grad_(False)
    model.embed.requires_grad_(False)


def evaluate(model: Model, step: int) -> Any:
    """Before every fifth step, evaluate the model on other lengths, with a graph that is not backpropagated."""
    for tokens in (torch.zeros(2, 5, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)) if step % 5 == 0 else ():
        model.eval()(tokens)
    model.train()
    return []


def accumulate(model: Model, step: int) -> Any:
    """Accumulate the gradients of a micro-batch before the step."""
    model(torch.full((3, LENGTH), step % 7)).square().mean().backward()
    return []


@pytest.mark.parametrize(
    ("training", "has_rows_without_keys"),
    [
        pytest.param(lambda: train(30, mask=relative_bias(2000.0)), False, id="alibi"),
        pytest.param(lambda: train(30, mask=positional_bias(2000.0, 0)), False, id="alibi by keys"),
        pytest.param(
            lambda: train(30, mask=positional_bias(900.0, LENGTH - 1)), False, id="alibi by keys from the end"
        ),
        *(
            pytest.param(
                lambda hidden_value=hidden_value: train(30, mask=left_padded(hidden_value)),
                True,
                id=f"padding by {hidden_value:g}",
            )
            for hidden_value in (-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf)
        ),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Cosine())), False, id="cosine"),
        *(
            pytest.param(
                lambda arguments=arguments: train(
                    30, lr=1e-4, mask=packed(*arguments[1:]), make=large(arguments[0], LAYERS)
                ),
                False,
                id=f"packed, scores times {arguments[0]}: {arguments[1:]}",
            )
            for arguments in ((1, 5, 4, 3), (25, 2, 1), (25, 1))
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
                lambda arguments=arguments: train(30, lr=1e-4, make=lambda: PackedLlama(*arguments)),
                False,
                id=f"packed by positions: {arguments}",
            )
            for arguments in ((5, 4, 3), (2, 1))
        ),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Narrow())), False, id="head dim 2"),
        pytest.param(lambda: train(30, make=replaced("blocks.*.attn", lambda _: Sink())), False, id="sink"),
        pytest.param(lambda: train(30, make=Experts), False, id="experts"),
        pytest.param(lambda: train(30, lr=1e-4, make=large(40.0)), False, id="large scores"),
        pytest.param(lambda: train(30, make=changed(freeze)), False, id="frozen"),
        pytest.param(lambda: train(30, lr=1e-3, make=adapted(1.0)), False, id="adapters"),
        pytest.param(lambda: train(30, before=evaluate), False, id="evaluated"),
        pytest.param(lambda: train(30, before=accumulate), False, id="accumulated"),
    ],
)
def test_healthy_training_raises_no_warning(training: Callable[[], Outcome], has_rows_without_keys: bool) -> None:
    outcome = training()
    assert not outcome.raised, [verdict.sentence for verdict in outcome.raised]
    assert all(map(math.isfinite, outcome.losses))
    assert (
        f"{PADDED * BATCH // 2} of {BATCH * LENGTH} measured rows of a head see no key" in outcome.table
    ) == has_rows_without_keys
    assert has_rows_without_keys or "see no key" not in outcome.table
