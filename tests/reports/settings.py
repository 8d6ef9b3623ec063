"""The settings of public bug reports on a small model, each by the address of its report (reports.toml)."""

import math
from collections.abc import Callable
from fnmatch import fnmatch
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

MEASURED, MISSED = 20, 24
"""A step whose rows are measured, the last of ten; and one whose rows are not."""


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


def replaced(place: str, by: Callable[[Any], nn.Module]) -> Callable[[], Model]:
    """A model with others in the place of the modules whose names match; `by` is given what was there."""

    def change(model: Model) -> None:
        for name, old in [*model.named_modules()]:
            if fnmatch(name, place):
                model.set_submodule(name, by(old))

    return changed(change)


def attention_of(model: Model, block: int) -> Attention:
    found = model.get_submodule(f"blocks.{block}.attn")
    assert isinstance(found, Attention)
    return found


def queries_and_keys(model: Model, block: int) -> tuple[nn.Linear, nn.Linear]:
    attention = attention_of(model, block)
    return attention.q_proj, attention.k_proj


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

    repairs = False

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) / HEAD_DIM**0.5
        assert mask is not None
        weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
        return (weights.nan_to_num(0.0) if self.repairs else weights) @ value


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


class Translation(Model):
    """Layer 2 attends to an encoder's output; the context of one sample is all padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks[2].attn = Attention()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        has_context = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        has_context[3] = False
        for number, block in enumerate(self.blocks):
            if number == 2:
                block.attn.source = self.source(tokens.flip(1))  # type: ignore[union-attr]
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


class WithTemperature(Model):
    """Logits of padded negatives are -inf before they are divided by a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        padded = torch.arange(VOCABULARY) >= VOCABULARY - 2
        return super().forward(tokens, mask).masked_fill(padded, -math.inf) / self.temperature


def with_negatives(wanted: Tensor, step: int) -> Tensor:
    """No label is a padded negative."""
    return wanted % (VOCABULARY - 2)


def clipped_divergence(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """A KL estimate that is clipped after its exponential; the old policy of one batch is far away."""
    likelihood = -F.cross_entropy(logits, wanted, reduction="none")
    ratio = likelihood.detach() + (200.0 if step == MISSED else 0.1) - likelihood
    return (ratio.exp() - ratio - 1).clamp(max=10.0).mean() - likelihood.mean()


class ZeroWarmUp(torch.optim.Optimizer):
    """Adam whose denominator is divided by the learning rate before eps is added; the first rate of a warm-up is 0."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    square = self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))
                    square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                    minus = torch.tensor(-group["lr"])
                    parameter.addcdiv_(gradient, square.sqrt() / minus + group["eps"] / minus)
            group["lr"] = min(group["lr"] + 1e-4, 1e-3)


class UnusedTokens(Model):
    """Some tokens are in no batch, so their embeddings have gradients of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 24, WIDTH)


class LinearAttention(nn.Module):
    """A chunk of gated linear attention: keys are weighted by the exponential of a difference of summed decays."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.decay = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.seen, self.factor = 0, 1.0

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.seen += 1
        summed = (F.logsigmoid(self.decay(x)) * (40.0 if self.seen == MISSED else 1.0)).cumsum(1)
        weighted = self.k(x) * (summed[:, :1] - summed).exp()
        scores = (self.q(x) * (summed - summed[:, :1]).exp()) @ weighted.transpose(1, 2)
        out: Tensor = scores.tril() @ self.v(x) / LENGTH
        return out


def transcripts(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """CTC; the transcripts of one batch are longer than what they transcribe."""
    frames = logits.view(BATCH, LENGTH, -1).transpose(0, 1).log_softmax(-1)
    length = LENGTH + 2 if step == MISSED else 4
    labels = (wanted.view(BATCH, LENGTH).repeat(1, 2)[:, :length] + 1) % VOCABULARY
    labels = labels.clamp(min=1)
    return F.ctc_loss(frames, labels, torch.full((BATCH,), LENGTH), torch.full((BATCH,), length))


def weighted_by_noise(logits: Tensor, wanted: Tensor, step: int) -> Tensor:
    """Samples are weighted by min(SNR, 5) / SNR, which is 0 / 0 at the last of the noise levels."""
    ratio = torch.tensor([30.0, 5.0, 1.0, 0.3, 0.1, 0.0 if step == MISSED else 0.03])
    weights = ratio.clamp(max=5.0) / ratio
    return (F.cross_entropy(logits, wanted, reduction="none").view(BATCH, LENGTH).mean(1) * weights).mean()


class Bottleneck(nn.Module):
    """A sample of a normal distribution, whose log variance nothing bounds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mean, self.log_variance = inner, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.inner(x, mask)
        return self.mean(x) + torch.randn_like(x) * (0.5 * self.log_variance(x)).exp()  # type: ignore[no-any-return]


def grown_variance(model: Model, step: int) -> Any:
    """The log variances have grown."""
    if step == MISSED:
        with torch.no_grad():
            model.get_parameter("blocks.1.log_variance.bias").add_(400.0)
    return []


class Decomposed(nn.Module):
    """A weight by direction and magnitude; the norm of a row that is all 0 is 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        with torch.no_grad():
            base.weight[3] = 0.0
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        direction = self.base.weight / self.base.weight.norm(dim=1, keepdim=True)
        return F.linear(x, self.magnitude * direction, self.base.bias)


class Chosen(nn.Module):
    """torch.where between two activations, one of which overflows where the other is chosen."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up, self.seen = up, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.up(x) * (200.0 if self.seen == MISSED else 1.0)
        return torch.where(x <= 1.0, x.exp() - 1.0, x.clamp(max=3.0))


def wrong_sign() -> Tensor:
    """Keys that are hidden get +inf added."""
    return torch.full((LENGTH, LENGTH), math.inf).triu(1)


SETTINGS: Final[dict[str, Callable[[], Outcome]]] = {
    "huggingface/transformers/issues/5651": lambda: train(before=overflow_in_half(1, "down", 1e6, once(MEASURED))),
    "google-research/text-to-text-transfer-transformer/issues/539": lambda: train(
        120, before=overflow_in_half(0, "down", 1e6, since(MISSED, 7)), skip_broken=True
    ),
    "huggingface/transformers/issues/12225": lambda: train(before=overflow_in_half(3, "down", 1e6, once(MEASURED))),
    "pytorch/pytorch/issues/41527": lambda: train(before=overflow_in_half(2, "ln_1", math.nan, once(MEASURED))),
    "huggingface/diffusers/pull/13316": lambda: train(
        before=overflow_in_half(2, "ln_1", math.nan, since(MISSED, 3)), skip_broken=True
    ),
    "pytorch/pytorch/issues/40497": lambda: train(20, lr=1e-4, make=eager("eager", 300.0)),
    "showlab/Tune-A-Video/issues/103": lambda: train(20, lr=1e-4, make=eager("sdpa", 300.0)),
    "Dao-AILab/flash-attention/issues/41": lambda: train(
        before=broken_backward(2, "attn.q_proj", since(MISSED, 8)), skip_broken=True, steps=120
    ),
    "Dao-AILab/flash-attention/issues/334": lambda: train(before=broken_backward(1, "attn.q_proj", once(MEASURED))),
    "HKUSTDial/flash-sparse-attention/issues/121": lambda: train(
        before=broken_backward(3, "attn.v_proj", once(MISSED), math.inf)
    ),
    "ymcui/Chinese-LLaMA-Alpaca/issues/534": lambda: train(
        120, before=broken_backward(1, "down", since(MISSED), math.inf), skip_broken=True
    ),
    "NVIDIA/apex/issues/318": lambda: train(
        120, before=broken_backward(3, "up", since(2, 2), math.inf), skip_broken=True
    ),
    "whai362/PVT/issues/94": lambda: train(
        120, before=broken_backward(0, "attn.o_proj", since(3, 5), math.inf), skip_broken=True
    ),
    "afiaka87/glide-finetune/issues/5": lambda: train(
        20, make=lambda: UnusedTokens().half(), optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-8)
    ),
    "Sara-Ahmed/SiT/issues/4": lambda: train(
        20,
        first_step=501,
        make=changed(lambda model: attention_of(model, 2).q_proj.weight[5].fill_(math.nan)),
    ),
    "pytorch/pytorch/issues/75181": lambda: train(labels=no_labels(once(MISSED))),
    "pytorch/pytorch/issues/26098": lambda: train(mask=padded(3, left=True)),
    "AshleyLab/OpenMHC/issues/11": lambda: train(mask=additive(padded(3, left=False))),
    "pytorch/pytorch/issues/109517": lambda: train(mask=packed()),
    "dmlc/dgl/issues/2657": lambda: train(
        mask=padded(4, left=False), before=broken_backward(0, "attn.q_proj", once(MEASURED))
    ),
    "cactus-compute/needle/issues/53": lambda: train(20, lr=10.0, make=adapted(1e4)),
    "OpenNMT/OpenNMT-tf/issues/744": lambda: train(60, lr=2.0),
    "NVlabs/Sana/issues/192": lambda: train(
        20,
        lr=1e-4,
        make=changed(lambda model: [each.bias[9].fill_(60.0) for each in queries_and_keys(model, 2)]),
    ),
    "PAIR-code/tiny-transformers/issues/71": lambda: train(
        20,
        lr=1e-4,
        make=changed(
            lambda model: [each.weight.mul_(7.0) for block in range(4) for each in queries_and_keys(model, block)]
        ),
    ),
    "pytorch/pytorch/issues/41508": lambda: train(20, make=Padded, labels=without_padding),
    "NVIDIA-NeMo/Automodel/issues/3796": lambda: train(loss_of=divided_by_count),
    "pqhieu/jsis3d/issues/26": lambda: train(loss_of=norm_of_zero),
    "prs-eth/Marigold/issues/111": lambda: train(make=Features),
    "openai/CLIP/issues/46": lambda: train(make=Temperature, before=grown),
    "sooftware/kospeech/issues/37": lambda: train(
        20, make=replaced("blocks.*.attn", lambda _: ByHand()), mask=padded(3, left=True)
    ),
    "google-research/vmoe/pull/218": lambda: train(make=Routed),
    "MakazhanAlpamys/Soup/issues/719": lambda: train(loss_of=reverse_kl),
    "lucidrains/rotary-embedding-torch/issues/8": lambda: train(
        make=replaced("blocks.*.attn", lambda _: Extrapolated())
    ),
    "huggingface/transformers/issues/30953": lambda: train(make=NewTokens),
    "pyg-team/pytorch_geometric/pull/2917": lambda: train(
        make=replaced("blocks.2.ln_2", lambda _: RootNorm()), before=constant_rows
    ),
    "lucidrains/x-transformers/issues/263": lambda: train(make=Translation),
    "huggingface/transformers/pull/17306": lambda: train(
        20, make=lowest_mask, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)
    ),
    "mlcommons/hpc/pull/27": lambda: train(20, optimizer=without_rate),
    "NVIDIA-NeMo/Automodel/pull/3850": lambda: train(make=WithTemperature, labels=with_negatives),
    "OpenRLHF/OpenRLHF/pull/1335": lambda: train(loss_of=clipped_divergence),
    "pytorch/pytorch/pull/186444": lambda: train(make=UnusedTokens, optimizer=ZeroWarmUp),
    "fla-org/flash-linear-attention/pull/649": lambda: train(
        make=replaced("blocks.2.attn", lambda _: LinearAttention())
    ),
    "wenet-e2e/wenet/pull/2299": lambda: train(loss_of=transcripts),
    "TiankaiHang/Min-SNR-Diffusion-Training/issues/2": lambda: train(loss_of=weighted_by_noise),
    "vanderschaarlab/synthcity/issues/331": lambda: train(make=replaced("blocks.1", Bottleneck), before=grown_variance),
    "KohakuBlueleaf/LyCORIS/pull/166": lambda: train(make=replaced("blocks.1.attn.v_proj", Decomposed)),
    "pytorch/pytorch/issues/156212": lambda: train(make=replaced("blocks.1.up", Chosen)),
    "lucidrains/memory-compressed-attention/issues/2": lambda: train(mask=wrong_sign()),
}
