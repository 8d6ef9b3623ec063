"""Public bug reports rebuilt on a small model: what each one says, and what has to be reported about it.

`python -m tests.reports.public` trains every one of them and prints the tables of docs/evidence.md.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from tests.reports.training import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Model,
    Outcome,
    poison,
    train,
)
from torch import Tensor, nn

GITHUB: Final = "https://github.com/"
MEASURED, MISSED = 20, 24
"""A step whose rows are measured, the last of ten; and one whose rows are not."""


@dataclass(frozen=True, slots=True)
class Report:
    """One public report, and the words that answer it."""

    address: str
    setting: str
    injected: bool
    train: Callable[[], Outcome]
    place: str
    """a pattern of the words that name the place"""
    advice: str
    """a pattern of the words that help"""
    false: str = r"(?!)"
    """a pattern of advice that would be false here"""
    harmed: Callable[[Outcome], int] = lambda found: found.harmed
    """the step at which the person saw it; past the end if the loss stays finite"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What foreshock reported of it."""

    words: str
    when: str
    place: bool
    advice: bool


def answer(report: Report) -> Answer:
    """Train it, and compare the first words with what the report needs."""
    found = report.train()
    unseen = re.search(r"[^\n]*see no key[^\n]*", found.table)
    step = 1 if unseen and not found.raised else found.raised[0].step if found.raised else None
    words = " ".join(filter(None, (unseen and unseen.group(), found.told, *found.later)))
    harmed = report.harmed(found)
    when = "not" if step is None else "before" if step < harmed else "with" if step == harmed else "after"
    advice = bool(re.search(report.advice, words)) and not re.search(report.false, words)
    return Answer(words, when, bool(re.search(report.place, words)), advice)


def row(report: Report, found: Answer) -> str:
    """Its line in the table."""
    name = report.address.replace("/issues/", "#").replace("/pull/", "#")
    how = "injected" if report.injected else "natural"
    return (
        f"| [{name}]({GITHUB}{report.address}) | {report.setting} | {how} | {found.when} | "
        f"{_said(found.place)} | {_said(found.advice)} |"
    )


def _said(right: bool) -> str:
    return "right" if right else "**missed**"


# ---- what the reports describe -----------------------------------------------------------------------------------


def overflow_in_half(block: int, part: str, factor: float, at: Callable[[int], bool]) -> Callable[[Model, int], Any]:
    """A part of a block computes in float16, on activations that have grown by `factor`."""

    def before(model: Model, step: int) -> Any:
        module = getattr(model.blocks[block], part)
        change = lambda _, __, out: (out * factor).half().to(out.dtype)  # noqa: E731
        return [module.register_forward_hook(change)] if at(step) else []

    return before


def broken_backward(block: int, part: str, at: Callable[[int], bool], number: float = math.nan) -> Any:
    """The backward of one part gives a number that is not finite."""

    def before(model: Model, step: int) -> Any:
        return [poison(model.get_submodule(f"blocks.{block}.{part}"), number)] if at(step) else []

    return before


def once(step: int) -> Callable[[int], bool]:
    return lambda now: now == step


def since(step: int, every: int = 1) -> Callable[[int], bool]:
    return lambda now: now >= step and (now - step) % every == 0


def changed(change: Callable[[Model], object]) -> Callable[[], Model]:
    """A model whose weights were loaded from a checkpoint that `change` describes."""

    def make() -> Model:
        model = Model()
        with torch.no_grad():
            change(model)
        return model

    return make


def attention_of(model: Model, block: int) -> Attention:
    found = model.get_submodule(f"blocks.{block}.attn")
    assert isinstance(found, Attention)
    return found


def padded(columns: int, *, left: bool) -> Tensor:
    """A mask as people write it: padding on one side, and causal only if that is the left one."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask = (mask.tril() if left else mask).expand(BATCH, 1, -1, -1).clone()
    mask[::2, ..., slice(columns) if left else slice(LENGTH - columns, None)] = False
    if not left:
        mask[::2, ..., LENGTH - columns :, :] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def packed() -> Tensor:
    """Two documents in a row; the padding behind them belongs to none."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[:5, :5] = mask[5:10, 5:10] = True
    return mask.tril().expand(BATCH, 1, -1, -1)


def half_model() -> nn.Module:
    """All weights in float16; one row of the embedding is used by no batch."""

    class Padded(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, WIDTH)

    return Padded().half()


def no_labels(at: Callable[[int], bool]) -> Callable[[Tensor, int], Tensor]:
    return lambda wanted, step: torch.full_like(wanted, -100) if at(step) else wanted


class Adapter(nn.Module):
    """LoRA, with factors in a type of its own."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.base, self.dtype, self.scale = base.requires_grad_(False), dtype, scale
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x.to(self.dtype), self.a.to(self.dtype)), self.b.to(self.dtype)) * self.scale
        return self.base(x) + low.to(x.dtype)  # type: ignore[no-any-return]


def adapted(scale: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Model().requires_grad_(False)
        for block in range(len(model.blocks)):
            attention = attention_of(model, block)
            for name in ("q_proj", "v_proj"):
                setattr(attention, name, Adapter(getattr(attention, name), torch.float16, scale))
        return model

    return make


def eager(implementation: str, bias: float) -> Callable[[], nn.Module]:
    """A decoder of transformers with large biases on queries and keys of layer 1 head 2, under float16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=40,
                    hidden_size=WIDTH,
                    intermediate_size=WIDTH,
                    num_hidden_layers=3,
                    num_attention_heads=HEADS,
                    num_key_value_heads=HEADS,
                    max_position_embeddings=LENGTH,
                    attn_implementation=implementation,
                )
            )
            attention = self.lm.model.layers[1].self_attn
            with torch.no_grad():
                for projection in (attention.q_proj, attention.k_proj):
                    projection.bias[2 * HEAD_DIM + 3] = bias

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.lm(input_ids=tokens).logits  # type: ignore[no-any-return]

    return Half


class Padded(Model):
    """One layer of nn.MultiheadAttention that returns its weights, with both of its masks, which hide some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        padding = torch.zeros(tokens.shape, dtype=torch.bool)
        padding[::2, :3] = True
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=True)
        return self.head(self.norm(x + out))  # type: ignore[no-any-return]


def without_padding(wanted: Tensor, step: int) -> Tensor:
    """The labels of rows that see no key are ignored."""
    kept = wanted.clone().view(BATCH, LENGTH)
    kept[::2, :3] = -100
    return kept.flatten()


def divided_by_count(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """A masked sum over tokens by their number, which is 0 in one batch."""
    kept = torch.full(wanted.shape, float(step != MISSED))
    return (F.cross_entropy(logits, wanted, reduction="none") * kept).sum() / kept.sum()


def norm_of_zero(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """A regularisation by a norm, of a vector that is zero in one batch."""
    centre = logits.mean(0) * (step != MISSED)
    return F.cross_entropy(logits, wanted) + 0.01 * centre.square().sum().sqrt()


class Features(Model):
    """Continuous features in, of which one batch has a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.seen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.seen += 1
        features = F.one_hot(tokens % WIDTH, WIDTH).float()
        features[0, 3, 5] = math.nan if self.seen == MISSED else 0.0
        x = self.into(features)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Temperature(Model):
    """The logits are scaled by the exponential of a weight that nothing bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = F.normalize(super().forward(tokens, mask), dim=-1)
        return self.logit_scale.exp() * logits


def grown(model: Model, step: int) -> Any:
    """The scale has grown."""
    with torch.no_grad():
        model.get_parameter("logit_scale").add_(4.0)
    return []


class ByHand(Attention):
    """Scores, -inf and a softmax written out."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query @ key.transpose(-1, -2) / HEAD_DIM**0.5
        assert mask is not None
        out = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ value
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def by_hand() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.attn = ByHand()
    return model


class Routed(Model):
    """Block 2 has four experts; the coefficient of variation of their loads is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].router = nn.Linear(WIDTH, 4)
        nn.init.zeros_(self.blocks[2].router.weight)
        nn.init.zeros_(self.blocks[2].router.bias)
        self.balance = torch.zeros(())

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, mask)
            if number == 2:
                gates = block.router(x).softmax(-1)  # type: ignore[operator]
                loads = gates.flatten(0, -2).sum(0)
                self.balance = (loads.var().sqrt() / loads.mean()) ** 2
                x = x * (1 + gates.amax(-1, keepdim=True))
        return self.head(self.norm(x)) + 0.01 * self.balance  # type: ignore[no-any-return]


def reverse_kl(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """Distillation by the reverse divergence at a low temperature: probabilities of the student reach 0."""
    student, teacher = (logits / 0.01).softmax(-1), F.one_hot(wanted, logits.shape[-1]).float()
    return F.kl_div(teacher.log_softmax(-1), student, reduction="batchmean")


class Extrapolated(Attention):
    """Rotary positions of xPos, whose base is negative at early positions: its power is NaN there."""

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = ((torch.arange(LENGTH) - 1) / LENGTH) ** 0.4
        return query, key / scale.clamp(min=0.1)[:, None], value


def extrapolated() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.attn = Extrapolated()
    return model


class NewTokens(Model):
    """Two tokens were added, whose embeddings are memory that nobody wrote. The batch of one step has one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seen = nn.Embedding(VOCABULARY + 2, WIDTH), 0
        with torch.no_grad():
            self.embed.weight[VOCABULARY:] = math.nan

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.seen += 1
        if self.seen == MISSED:
            tokens = tokens.clone()
            tokens[2, 7] = VOCABULARY
        return super().forward(tokens, mask)


class RootNorm(nn.Module):
    """A norm that adds its epsilon to the root of the variance, and not below it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-5)


def constant_rows(model: Model, step: int) -> Any:
    """The features of one token are all the same where the norm reads them."""

    def same(_: nn.Module, given: Any) -> Any:
        keep = torch.ones_like(given[0])
        keep[1, 4] = 0.0
        return (given[0] * keep,)

    return [model.get_submodule("blocks.2.ln_2").register_forward_pre_hook(same)] if step == MISSED else []


def root_norm() -> nn.Module:
    model = Model()
    model.blocks[2].ln_2 = RootNorm()
    return model


class CrossAttention(Attention):
    """Queries of the decoder, keys and values of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.context = torch.zeros(())

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        key, value = (
            each(self.context).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for each in (self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Translation(Model):
    """Layer 2 attends to an encoder's output; the context of one sample is all padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks[2].attn = CrossAttention()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        has_context = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        has_context[3] = False
        for number, block in enumerate(self.blocks):
            if number == 2:
                block.attn.context = self.source(tokens.flip(1))  # type: ignore[union-attr]
            x = block(x, has_context if number == 2 else None)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def lowest_mask() -> nn.Module:
    """Eager attention in float16 adds the lowest number of float16 to negative scores of left-padded rows."""
    model: Any = eager("eager", 12.0)()
    with torch.no_grad():
        model.lm.model.layers[1].self_attn.k_proj.bias[2 * HEAD_DIM + 3] = -12.0

    class Padding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model.lm

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            real = torch.ones_like(tokens)
            real[::2, :3] = 0
            return self.lm(input_ids=tokens, attention_mask=real).logits  # type: ignore[no-any-return]

    return Padding().half()


def without_rate(parameters: Any) -> torch.optim.Optimizer:
    """A schedule without warm-up divides 0 by 0 in its first step."""
    return torch.optim.SGD(parameters, lr=torch.tensor(math.nan))


HEAD: Final = """| report | its setting | failure | reported | place | advice |
|---|---|---|---|---|---|"""

GO_BACK = r"resume from a checkpoint before step \d+"
START_AGAIN = "Repair what the warning names, and start the run again"
CONTINUE = r"[Ww]eights are finite|stay finite"
STOP = r"(?i)go back|stop the run|at risk"
BACKWARD = "first in the backward, between layer {} and layer {}"
FORWARD = "first in the forward, between the attention of layer {} and the inputs of layer {}"
SEE_NO_KEY = r"{} of {} .*rows.* see no key"
LAST = "after the attention of layer 3"

REPORTS: Final = (
    Report(
        "huggingface/transformers/issues/5651",
        "T5 in float16: the MLP's second projection passes 65,504 after some steps",
        False,
        lambda: train(before=overflow_in_half(1, "down", 1e6, once(MEASURED))),
        FORWARD.format(1, 2),
        GO_BACK,
    ),
    Report(
        "google-research/text-to-text-transfer-transformer/issues/539",
        "the same under a loss scaler, which skips the steps; the batches come again",
        False,
        lambda: train(120, before=overflow_in_half(0, "down", 1e6, since(MISSED, 7)), skip_broken=True),
        FORWARD.format(0, 1),
        CONTINUE,
        STOP,
    ),
    Report(
        "huggingface/transformers/issues/12225",
        "Pegasus in float16: the last block's residual sum overflows",
        False,
        lambda: train(before=overflow_in_half(3, "down", 1e6, once(MEASURED))),
        LAST,
        GO_BACK,
    ),
    Report(
        "pytorch/pytorch/issues/41527",
        "LayerNorm of zeros gives NaN in float16",
        True,
        lambda: train(before=overflow_in_half(2, "ln_1", math.nan, once(MEASURED))),
        FORWARD.format(1, 2),
        GO_BACK,
    ),
    Report(
        "huggingface/diffusers/pull/13316",
        "a norm divides by a zero that float16 made of its epsilon; batches without rows measured",
        True,
        lambda: train(before=overflow_in_half(2, "ln_1", math.nan, since(MISSED, 3)), skip_broken=True),
        FORWARD.format(1, 2),
        CONTINUE,
        STOP,
    ),
    Report(
        "pytorch/pytorch/issues/40497",
        "eager attention in float16 overflows before the scale, on loaded weights",
        False,
        lambda: train(20, lr=1e-4, make=eager("eager", 300.0)),
        "attention output of layer 1 head 2; its inputs are finite",
        "type that scores are computed in",
    ),
    Report(
        "showlab/Tune-A-Video/issues/103",
        "the same weights under fused attention: scores of 20,000, which a change of attention would break",
        False,
        lambda: train(20, lr=1e-4, make=eager("sdpa", 300.0)),
        "[Ll]ayer 1 head 2",
        "float16",
    ),
    Report(
        "Dao-AILab/flash-attention/issues/41",
        "one layer's fused backward gives NaN for some batches, the weights stay finite",
        True,
        lambda: train(before=broken_backward(2, "attn.q_proj", since(MISSED, 8)), skip_broken=True, steps=120),
        "blocks.2.attn.q_proj",
        CONTINUE,
        STOP,
    ),
    Report(
        "Dao-AILab/flash-attention/issues/334",
        "the backward of queries gives NaN for some inputs",
        True,
        lambda: train(before=broken_backward(1, "attn.q_proj", once(MEASURED))),
        BACKWARD.format(0, 1),
        GO_BACK,
    ),
    Report(
        "HKUSTDial/flash-sparse-attention/issues/121",
        "only the gradient of the values is infinite",
        True,
        lambda: train(before=broken_backward(3, "attn.v_proj", once(MISSED), math.inf)),
        "blocks.3.attn.v_proj",
        GO_BACK,
    ),
    Report(
        "ymcui/Chinese-LLaMA-Alpaca/issues/534",
        "DeepSpeed's loss scale falls at every step until it is at its minimum",
        True,
        lambda: train(120, before=broken_backward(1, "down", since(MISSED), math.inf), skip_broken=True),
        "blocks.1.down",
        r"updates were lost",
        STOP,
    ),
    Report(
        "NVIDIA/apex/issues/318",
        "every second update is skipped, for thousands of steps",
        True,
        lambda: train(120, before=broken_backward(3, "up", since(2, 2), math.inf), skip_broken=True),
        "blocks.3.up",
        r"updates were lost",
        STOP,
    ),
    Report(
        "whai362/PVT/issues/94",
        "the loss scale falls to 0.03: one update in five is skipped",
        True,
        lambda: train(120, before=broken_backward(0, "attn.o_proj", since(3, 5), math.inf), skip_broken=True),
        "blocks.0.attn.o_proj",
        r"updates were lost",
        STOP,
    ),
    Report(
        "afiaka87/glide-finetune/issues/5",
        "weights in float16: Adam's epsilon is 0 there, the first update gives NaN",
        False,
        lambda: train(20, make=half_model, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-8)),
        "embed",
        "eps=1e-4",
    ),
    Report(
        "Sara-Ahmed/SiT/issues/4",
        "a run resumes from a checkpoint that holds NaN",
        True,
        lambda: train(
            20,
            first_step=501,
            make=changed(lambda model: attention_of(model, 2).q_proj.weight[5].fill_(math.nan)),
        ),
        FORWARD.format(1, 2),
        "weights that were loaded.* before step 500",
    ),
    Report(
        "pytorch/pytorch/issues/75181",
        "every label of a batch is ignored: the loss is NaN, weights are not",
        False,
        lambda: train(labels=no_labels(once(MISSED))),
        "loss was not finite.*Gradients and weights are finite",
        CONTINUE,
        STOP,
    ),
    Report(
        "pytorch/pytorch/issues/26098",
        "a padding mask and a causal mask hide every key of the first rows",
        False,
        lambda: train(mask=padded(3, left=True)),
        SEE_NO_KEY.format(9, 72),
        "mask hides|left padding",
        STOP,
    ),
    Report(
        "AshleyLab/OpenMHC/issues/11",
        "an additive mask of -inf leaves whole rows",
        False,
        lambda: train(mask=additive(padded(3, left=False))),
        SEE_NO_KEY.format(9, 72),
        "mask hides|left padding",
        STOP,
    ),
    Report(
        "pytorch/pytorch/issues/109517",
        "documents packed in a row, with padding that belongs to none",
        False,
        lambda: train(mask=packed()),
        SEE_NO_KEY.format(12, 72),
        "mask hides|left padding",
        STOP,
    ),
    Report(
        "dmlc/dgl/issues/2657",
        "padded sets hide whole rows, and NaN comes after an epoch",
        True,
        lambda: train(mask=padded(4, left=False), before=broken_backward(0, "attn.q_proj", once(MEASURED))),
        SEE_NO_KEY.format(12, 72),
        "suspect the mask first",
    ),
    Report(
        "cactus-compute/needle/issues/53",
        "LoRA's factors in float16 overflow in the second step",
        False,
        lambda: train(20, lr=10.0, make=adapted(1e4)),
        "attention of layer 0|at or before the inputs of layer 0",
        "lower the learning rate",
    ),
    Report(
        "OpenNMT/OpenNMT-tf/issues/744",
        "a learning rate of 2 where 2.5e-4 was meant",
        False,
        lambda: train(60, lr=2.0),
        r"heads",
        "[Ll]ower the learning rate",
        harmed=lambda found: found.first_loss(lambda loss: not loss < 2 * found.losses[0]),
    ),
    Report(
        "NVlabs/Sana/issues/192",
        "fine-tuning a model whose key and query biases are very large",
        False,
        lambda: train(
            20,
            lr=1e-4,
            make=changed(
                lambda model: [
                    each.bias[9].fill_(60.0) for each in (attention_of(model, 2).q_proj, attention_of(model, 2).k_proj)
                ]
            ),
        ),
        "[Ll]ayer 2 head 1",
        "16|score",
    ),
    Report(
        "PAIR-code/tiny-transformers/issues/71",
        "scores are not divided by the root of the head's width: attention is one-hot from step 1",
        False,
        lambda: train(
            20,
            lr=1e-4,
            make=changed(
                lambda model: [
                    projection.weight.mul_(7.0)
                    for block in range(4)
                    for projection in (attention_of(model, block).q_proj, attention_of(model, block).k_proj)
                ]
            ),
        ),
        "all .*heads|16 heads|every head",
        "one key|one-hot|entropy",
    ),
    Report(
        "pytorch/pytorch/issues/41508",
        "nn.MultiheadAttention that returns its weights, with a padding and an attention mask: the gradients are NaN",
        False,
        lambda: train(20, make=Padded, labels=without_padding),
        "see no key|attention output of layer 0",
        "mask",
    ),
    Report(
        "NVIDIA-NeMo/Automodel/issues/3796",
        "a batch without supervised tokens: the loss is divided by their number",
        False,
        lambda: train(loss_of=divided_by_count),
        "in the loss",
        GO_BACK,
    ),
    Report(
        "pqhieu/jsis3d/issues/26",
        "the backward of a norm of zero, in the loss",
        False,
        lambda: train(loss_of=norm_of_zero),
        "in the loss",
        GO_BACK,
    ),
    Report(
        "prs-eth/Marigold/issues/111",
        "one batch contains NaN",
        False,
        lambda: train(make=Features),
        "the batch",
        GO_BACK,
    ),
    Report(
        "openai/CLIP/issues/46",
        "the logits' learned scale has no bound: its exponential overflows",
        True,
        lambda: train(make=Temperature, before=grown),
        "logit_scale|in the loss|output head",
        GO_BACK,
    ),
    Report(
        "sooftware/kospeech/issues/37",
        "attention written out, whose mask of -inf leaves whole rows",
        False,
        lambda: train(20, make=by_hand, mask=padded(3, left=True)),
        SEE_NO_KEY.format(9, 72),
        "mask",
    ),
)

HELD_OUT: Final = (
    Report(
        "google-research/vmoe/pull/218",
        "experts: the load loss is differentiated through a deviation that is 0 when the router starts at zero",
        False,
        lambda: train(make=Routed),
        r"blocks\.2\.router",
        START_AGAIN,
    ),
    Report(
        "MakazhanAlpamys/Soup/issues/719",
        "reverse KL in distillation: the loss is finite, gradients at probabilities of 0 are NaN",
        False,
        lambda: train(loss_of=reverse_kl),
        "in the loss",
        "how it is computed",
    ),
    Report(
        "lucidrains/rotary-embedding-torch/issues/8",
        "rotary positions with xPos: a few keys are NaN",
        False,
        lambda: train(make=extrapolated),
        "inputs of layer 0",
        START_AGAIN,
    ),
    Report(
        "huggingface/transformers/issues/30953",
        "weights that no checkpoint holds are memory that nobody wrote: the first batch with a new token is NaN",
        True,
        lambda: train(make=NewTokens),
        r"at or before the .*layer 0|embed",
        GO_BACK,
    ),
    Report(
        "pyg-team/pytorch_geometric/pull/2917",
        "a norm takes the root of a variance before it adds epsilon: one constant row gives NaN gradients",
        True,
        lambda: train(make=root_norm, before=constant_rows),
        r"blocks\.2\.|between layer 2 and layer 3",
        GO_BACK,
    ),
    Report(
        "lucidrains/x-transformers/issues/263",
        "cross-attention to a context that is all padding",
        False,
        lambda: train(make=Translation),
        SEE_NO_KEY.format(12, 72),
        "mask",
        STOP,
    ),
    Report(
        "huggingface/transformers/pull/17306",
        "a mask of the lowest float16 number, added to negative scores of left-padded rows, is -inf in all keys",
        False,
        lambda: train(20, make=lowest_mask, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)),
        "see no key|attention output of layer 1 head 2",
        "mask",
    ),
    Report(
        "mlcommons/hpc/pull/27",
        "a schedule without warm-up begins with a learning rate of NaN: gradients are finite, the update is not",
        False,
        lambda: train(20, optimizer=without_rate),
        "the update|learning rate is",
        "learning rate is",
    ),
)
"""Chosen and scored before the product was changed for any of them."""


def summary(found: list[tuple[bool, bool, bool]]) -> str:
    """The sentence above the table, of (in time, place, advice) of every report."""
    in_time, place, advice = (sum(column) for column in zip(*found, strict=True))
    return (
        f"Of {len(found)} reports, foreshock reported {in_time} before the loss or with it. "
        f"It named the right place in {place} of them and gave the right advice in {advice}."
    )


def judged(lines: list[str]) -> list[tuple[bool, bool, bool]]:
    """What lines of the table say: in time, place, advice."""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [(when in ("before", "with"), place == "right", advice == "right") for *_, when, place, advice in cells]


if __name__ == "__main__":
    for reports in (REPORTS, HELD_OUT):
        rows = [row(each, answer(each)) for each in reports]
        print(summary(judged(rows)), "", HEAD, *rows, "", sep="\n")
