"""The settings of public bug reports on a small model, by the address of the report (reports.toml)."""

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

SAMPLED_STEP, UNSAMPLED_STEP = 20, 24
"""A step whose rows are sampled (every tenth is), and a step whose rows are not."""


def overflow_in_half(
    block: int, part: str, factor: float, is_broken_step: Callable[[int], bool]
) -> Callable[[Model, int], Any]:
    """A part of a block computes in float16 with activations multiplied by `factor`."""

    def before(model: Model, step: int) -> Any:
        module = getattr(model.blocks[block], part)
        change = lambda _, __, out: (out * factor).half().to(out.dtype)  # noqa: E731
        return [module.register_forward_hook(change)] if is_broken_step(step) else []

    return before


def broken_backward(block: int, part: str, is_broken_step: Callable[[int], bool], number: float = math.nan) -> Any:
    """The backward of one part returns a non-finite number."""

    def before(model: Model, step: int) -> Any:
        return [poison(model.get_submodule(f"blocks.{block}.{part}"), number)] if is_broken_step(step) else []

    return before


def once(step: int) -> Callable[[int], bool]:
    return lambda now: now == step


def since(step: int, every: int = 1) -> Callable[[int], bool]:
    return lambda now: now >= step and (now - step) % every == 0


def changed(change: Callable[[Model], object]) -> Callable[[], Model]:
    """A model whose weights were changed by `change`, as if loaded from a checkpoint."""

    def make() -> Model:
        model = Model()
        with torch.no_grad():
            change(model)
        return model

    return make


def replaced(place: str, make: Callable[[Any], nn.Module]) -> Callable[[], Model]:
    """A model in which the modules with matching names are replaced; `make` gets the original module."""

    def change(model: Model) -> None:
        for name, original in [*model.named_modules()]:
            if fnmatch(name, place):
                model.set_submodule(name, make(original))

    return changed(change)


def attention_of(model: Model, block: int) -> Attention:
    attention = model.get_submodule(f"blocks.{block}.attn")
    assert isinstance(attention, Attention)
    return attention


def queries_and_keys(model: Model, block: int) -> tuple[nn.Linear, nn.Linear]:
    attention = attention_of(model, block)
    return attention.q_proj, attention.k_proj


def padded(columns: int, *, left: bool) -> Tensor:
    """A boolean mask with padding on one side; it is causal only for left padding."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask = (mask.tril() if left else mask).expand(BATCH, 1, -1, -1).clone()
    mask[::2, ..., slice(columns) if left else slice(LENGTH - columns, None)] = False
    if not left:
        mask[::2, ..., LENGTH - columns :, :] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def packed() -> Tensor:
    """Two documents in a row; the padding after them belongs to neither."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[:5, :5] = mask[5:10, 5:10] = True
    return mask.tril().expand(BATCH, 1, -1, -1)


def ignored_labels(is_broken_step: Callable[[int], bool]) -> Callable[[Tensor, int], Tensor]:
    return lambda targets, step: torch.full_like(targets, -100) if is_broken_step(step) else targets


class Adapter(nn.Module):
    """LoRA with factors in a separate dtype."""

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
    """A decoder from transformers with large biases on queries and keys of layer 1 head 2, in float16 autocast."""
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
    """One layer of nn.MultiheadAttention with need_weights and both masks, which leave some rows without keys."""

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


def without_padding(targets: Tensor, step: int) -> Tensor:
    """Ignore the labels of rows without keys."""
    remaining = targets.clone().view(BATCH, LENGTH)
    remaining[::2, :3] = -100
    return remaining.flatten()


def divided_by_count(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """A masked loss divided by the number of tokens, which is 0 in one batch."""
    remaining = torch.full(targets.shape, float(step != UNSAMPLED_STEP))
    return (F.cross_entropy(logits, targets, reduction="none") * remaining).sum() / remaining.sum()


def norm_of_zero(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """A norm regulariser of a vector that is zero in one batch."""
    centre = logits.mean(0) * (step != UNSAMPLED_STEP)
    return F.cross_entropy(logits, targets) + 0.01 * centre.square().sum().sqrt()


class Features(Model):
    """Continuous input features; one batch has a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        features = F.one_hot(tokens % WIDTH, WIDTH).float()
        features[0, 3, 5] = math.nan if self.calls == UNSAMPLED_STEP else 0.0
        x = self.into(features)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Temperature(Model):
    """The logits are scaled by the exponential of an unbounded weight."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = F.normalize(super().forward(tokens, mask), dim=-1)
        return self.logit_scale.exp() * logits


def grow_temperature(model: Model, step: int) -> Any:
    """Increase the logit scale."""
    with torch.no_grad():
        model.get_parameter("logit_scale").add_(4.0)
    return []


class HandwrittenAttention(Attention):
    """Attention written with matmul, masked_fill and softmax."""

    repairs = False

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) / HEAD_DIM**0.5
        assert mask is not None
        weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
        return (weights.nan_to_num(0.0) if self.repairs else weights) @ value


class Experts(Model):
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


def reverse_kl(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """Distillation by reverse KL at a low temperature: probabilities of the student become 0."""
    student, teacher = (logits / 0.01).softmax(-1), F.one_hot(targets, logits.shape[-1]).float()
    return F.kl_div(teacher.log_softmax(-1), student, reduction="batchmean")


class Extrapolated(Attention):
    """xPos rotary embeddings whose base is negative at early positions, where its power is NaN."""

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = ((torch.arange(LENGTH) - 1) / LENGTH) ** 0.4
        return query, key / scale.clamp(min=0.1)[:, None], value


class NewTokens(Model):
    """Two tokens were added with uninitialised embeddings. The batch of one step contains one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.calls = nn.Embedding(VOCABULARY + 2, WIDTH), 0
        with torch.no_grad():
            self.embed.weight[VOCABULARY:] = math.nan

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.calls == UNSAMPLED_STEP:
            tokens = tokens.clone()
            tokens[2, 7] = VOCABULARY
        return super().forward(tokens, mask)


class RootNorm(nn.Module):
    """A norm that adds epsilon to the standard deviation instead of the variance."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-5)


def constant_rows(model: Model, step: int) -> Any:
    """All features of one token are equal at the input of the norm."""

    def mask_row(_: nn.Module, inputs: Any) -> Any:
        keep = torch.ones_like(inputs[0])
        keep[1, 4] = 0.0
        return (inputs[0] * keep,)

    return [model.get_submodule("blocks.2.ln_2").register_forward_pre_hook(mask_row)] if step == UNSAMPLED_STEP else []


class Translation(Model):
    """Layer 2 attends to an encoder's output; the context of one sample is only padding."""

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


def lowest_float16_mask() -> nn.Module:
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


def nan_learning_rate(parameters: Any) -> torch.optim.Optimizer:
    """A schedule without warm-up divides 0 by 0 in its first step."""
    return torch.optim.SGD(parameters, lr=torch.tensor(math.nan))


class MaskedLogits(Model):
    """Logits of padded negatives are -inf before the division by a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        padded = torch.arange(VOCABULARY) >= VOCABULARY - 2
        return super().forward(tokens, mask).masked_fill(padded, -math.inf) / self.temperature


def without_padded_labels(targets: Tensor, step: int) -> Tensor:
    """Labels without padded negatives."""
    return targets % (VOCABULARY - 2)


def clipped_divergence(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """A KL estimate that is clipped after its exponential; in one batch the old policy differs strongly."""
    likelihood = -F.cross_entropy(logits, targets, reduction="none")
    ratio = likelihood.detach() + (200.0 if step == UNSAMPLED_STEP else 0.1) - likelihood
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
    """Some tokens never occur, so the gradients of their embeddings are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 24, WIDTH)


class LinearAttention(nn.Module):
    """A chunk of gated linear attention: keys are weighted by the exponential of a difference of summed decays."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.decay = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls, self.factor = 0, 1.0

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.calls += 1
        summed = (F.logsigmoid(self.decay(x)) * (40.0 if self.calls == UNSAMPLED_STEP else 1.0)).cumsum(1)
        weighted = self.k(x) * (summed[:, :1] - summed).exp()
        scores = (self.q(x) * (summed - summed[:, :1]).exp()) @ weighted.transpose(1, 2)
        out: Tensor = scores.tril() @ self.v(x) / LENGTH
        return out


def ctc_with_long_transcripts(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """CTC; the transcripts of one batch are longer than their audio."""
    frames = logits.view(BATCH, LENGTH, -1).transpose(0, 1).log_softmax(-1)
    length = LENGTH + 2 if step == UNSAMPLED_STEP else 4
    labels = (targets.view(BATCH, LENGTH).repeat(1, 2)[:, :length] + 1) % VOCABULARY
    labels = labels.clamp(min=1)
    return F.ctc_loss(frames, labels, torch.full((BATCH,), LENGTH), torch.full((BATCH,), length))


def weighted_by_noise(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """Samples are weighted by min(SNR, 5) / SNR, which is 0 / 0 at the last of the noise levels."""
    ratio = torch.tensor([30.0, 5.0, 1.0, 0.3, 0.1, 0.0 if step == UNSAMPLED_STEP else 0.03])
    weights = ratio.clamp(max=5.0) / ratio
    return (F.cross_entropy(logits, targets, reduction="none").view(BATCH, LENGTH).mean(1) * weights).mean()


class Bottleneck(nn.Module):
    """A sample of a normal distribution with an unbounded log variance."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mean, self.log_variance = inner, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.inner(x, mask)
        return self.mean(x) + torch.randn_like(x) * (0.5 * self.log_variance(x)).exp()  # type: ignore[no-any-return]


def grow_variance(model: Model, step: int) -> Any:
    """Increase the log variances."""
    if step == UNSAMPLED_STEP:
        with torch.no_grad():
            model.get_parameter("blocks.1.log_variance.bias").add_(400.0)
    return []


class WeightNormalised(nn.Module):
    """A weight as direction times magnitude; the norm of a zero row is 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        with torch.no_grad():
            base.weight[3] = 0.0
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        direction = self.base.weight / self.base.weight.norm(dim=1, keepdim=True)
        return F.linear(x, self.magnitude * direction, self.base.bias)


class WhereActivation(nn.Module):
    """torch.where between two activations; one overflows at positions where the other is selected."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up, self.calls = up, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.up(x) * (200.0 if self.calls == UNSAMPLED_STEP else 1.0)
        return torch.where(x <= 1.0, x.exp() - 1.0, x.clamp(max=3.0))


def wrong_sign() -> Tensor:
    """An additive mask with +inf for hidden keys."""
    return torch.full((LENGTH, LENGTH), math.inf).triu(1)


SETTINGS: Final[dict[str, Callable[[], Outcome]]] = {
    "huggingface/transformers/issues/5651": lambda: train(before=overflow_in_half(1, "down", 1e6, once(SAMPLED_STEP))),
    "google-research/text-to-text-transfer-transformer/issues/539": lambda: train(
        120, before=overflow_in_half(0, "down", 1e6, since(UNSAMPLED_STEP, 7)), skip_broken=True
    ),
    "huggingface/transformers/issues/12225": lambda: train(before=overflow_in_half(3, "down", 1e6, once(SAMPLED_STEP))),
    "pytorch/pytorch/issues/41527": lambda: train(before=overflow_in_half(2, "ln_1", math.nan, once(SAMPLED_STEP))),
    "huggingface/diffusers/pull/13316": lambda: train(
        before=overflow_in_half(2, "ln_1", math.nan, since(UNSAMPLED_STEP, 3)), skip_broken=True
    ),
    "pytorch/pytorch/issues/40497": lambda: train(20, lr=1e-4, make=eager("eager", 300.0)),
    "showlab/Tune-A-Video/issues/103": lambda: train(20, lr=1e-4, make=eager("sdpa", 300.0)),
    "Dao-AILab/flash-attention/issues/41": lambda: train(
        before=broken_backward(2, "attn.q_proj", since(UNSAMPLED_STEP, 8)), skip_broken=True, steps=120
    ),
    "Dao-AILab/flash-attention/issues/334": lambda: train(before=broken_backward(1, "attn.q_proj", once(SAMPLED_STEP))),
    "HKUSTDial/flash-sparse-attention/issues/121": lambda: train(
        before=broken_backward(3, "attn.v_proj", once(UNSAMPLED_STEP), math.inf)
    ),
    "ymcui/Chinese-LLaMA-Alpaca/issues/534": lambda: train(
        120, before=broken_backward(1, "down", since(UNSAMPLED_STEP), math.inf), skip_broken=True
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
    "pytorch/pytorch/issues/75181": lambda: train(labels=ignored_labels(once(UNSAMPLED_STEP))),
    "pytorch/pytorch/issues/26098": lambda: train(mask=padded(3, left=True)),
    "AshleyLab/OpenMHC/issues/11": lambda: train(mask=additive(padded(3, left=False))),
    "pytorch/pytorch/issues/109517": lambda: train(mask=packed()),
    "dmlc/dgl/issues/2657": lambda: train(
        mask=padded(4, left=False), before=broken_backward(0, "attn.q_proj", once(SAMPLED_STEP))
    ),
    "cactus-compute/needle/issues/53": lambda: train(20, lr=10.0, make=adapted(1e4)),
    "OpenNMT/OpenNMT-tf/issues/744": lambda: train(60, lr=2.0),
    "NVlabs/Sana/issues/192": lambda: train(
        20,
        lr=1e-4,
        make=changed(lambda model: [projection.bias[9].fill_(60.0) for projection in queries_and_keys(model, 2)]),
    ),
    "PAIR-code/tiny-transformers/issues/71": lambda: train(
        20,
        lr=1e-4,
        make=changed(
            lambda model: [
                projection.weight.mul_(7.0) for block in range(4) for projection in queries_and_keys(model, block)
            ]
        ),
    ),
    "pytorch/pytorch/issues/41508": lambda: train(20, make=Padded, labels=without_padding),
    "NVIDIA-NeMo/Automodel/issues/3796": lambda: train(loss_of=divided_by_count),
    "pqhieu/jsis3d/issues/26": lambda: train(loss_of=norm_of_zero),
    "prs-eth/Marigold/issues/111": lambda: train(make=Features),
    "openai/CLIP/issues/46": lambda: train(make=Temperature, before=grow_temperature),
    "sooftware/kospeech/issues/37": lambda: train(
        20, make=replaced("blocks.*.attn", lambda _: HandwrittenAttention()), mask=padded(3, left=True)
    ),
    "google-research/vmoe/pull/218": lambda: train(make=Experts),
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
        20, make=lowest_float16_mask, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)
    ),
    "mlcommons/hpc/pull/27": lambda: train(20, optimizer=nan_learning_rate),
    "NVIDIA-NeMo/Automodel/pull/3850": lambda: train(make=MaskedLogits, labels=without_padded_labels),
    "OpenRLHF/OpenRLHF/pull/1335": lambda: train(loss_of=clipped_divergence),
    "pytorch/pytorch/pull/186444": lambda: train(make=UnusedTokens, optimizer=ZeroWarmUp),
    "fla-org/flash-linear-attention/pull/649": lambda: train(
        make=replaced("blocks.2.attn", lambda _: LinearAttention())
    ),
    "wenet-e2e/wenet/pull/2299": lambda: train(loss_of=ctc_with_long_transcripts),
    "TiankaiHang/Min-SNR-Diffusion-Training/issues/2": lambda: train(loss_of=weighted_by_noise),
    "vanderschaarlab/synthcity/issues/331": lambda: train(make=replaced("blocks.1", Bottleneck), before=grow_variance),
    "KohakuBlueleaf/LyCORIS/pull/166": lambda: train(make=replaced("blocks.1.attn.v_proj", WeightNormalised)),
    "pytorch/pytorch/issues/156212": lambda: train(make=replaced("blocks.1.up", WhereActivation)),
    "lucidrains/memory-compressed-attention/issues/2": lambda: train(mask=wrong_sign()),
}
