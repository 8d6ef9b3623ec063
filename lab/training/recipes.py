"""Recipes as data: a model, an optimizer, a text, and how attention is rounded. Adding one needs no code."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreshock.lab.training.arm import Arm
from foreshock.lab.training.model import ModelConfig

Text = Literal["bytes", "byte pairs"]
"""The source of the standard library as bytes (corpus.py), or what is installed as byte pairs (byte_pairs.py)."""
Truth = Literal["healthy", "rounding", "score growth", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Harm that is done to a run on purpose, from one step on; the name of its recipe begins with "injected"."""

    kind: Literal["noise", "half"]
    """noise: random bytes for text. half: gradients pass through float16 under a loss scale that never adapts."""
    first_step: int
    steps: int
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run up to its arm and its seed."""

    name: str
    summary: str
    model: ModelConfig
    batch: int
    """Sequences of a step."""
    steps: int
    learning_rate: float
    bias_rate: float = 1.0
    """Learning rate of biases as a multiple of that of all else. muP scales the rate of matrices by the inverse of the
    width and leaves that of vectors: 16 is what a model has that is 16 times as wide as the one its rates are from."""
    warmup_steps: int
    """Of a rate that rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows; the cosine ends at a tenth of the rate, at the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    bias_decay: float | None = None
    """Weight decay of vectors (biases and gains); None for that of all else."""
    clip: float | None = 1.0
    """Largest gradient norm; None leaves gradients as they are."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices inside the blocks, AdamW at `learning_rate` for all else."""
    text: Text = "bytes"
    repeats: int = 1
    """Every token of the text stands so many times in a row."""
    leading: int = 0
    """So many tokens at the start of every sequence are the same byte: a strong sink."""
    injection: Injection | None = None
    truth: Truth = "rounding"
    """What its untreated arm was made to show."""
    split: Literal["tuning", "held-out"] = "held-out"
    """Detectors may be tuned on the runs of a tuning recipe, and are scored on the others."""
    on_gpu: bool = False
    """Made for a GPU; it runs anywhere."""
    sample_every_steps: int = 25

    def rate_share(self, step: int) -> float:
        """Share of the learning rate in a step, counted from 1."""
        if step < self.warmup_steps or self.schedule == "constant":
            return min(1.0, step / self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    def truth_of(self, arm: Arm) -> Truth:
        """What an arm was made to show: a failure of rounding does not happen where nothing rounds that way."""
        return "healthy" if self.truth == "rounding" and arm.cured else self.truth

    def header(self, arm: Arm, seed: int, run: str) -> dict[str, Any]:
        """What the first line of a trace says of it."""
        switching = {"mitigation": arm.mitigation, "switch_scope": arm.switch_scope} if arm.policy == "auto" else {}
        return {
            "recipe": self.name,
            "arm": arm.name,
            "seed": seed,
            "run": run,
            "split": self.split,
            "truth": self.truth_of(arm),
            "nature": "injected" if self.injection else "natural",
            "policy": arm.policy,
            **switching,
        }

    def shaped(self, arm: Arm) -> ModelConfig:
        """The model of one arm: the control's attention is given float32 operands."""
        dtype = "float32" if arm.numerics == "float32" else "bfloat16"
        return replace(self.model, **{"attention_dtype": dtype, **arm.model})

    def under(self, arm: Arm) -> "Recipe":
        """The recipe as an arm of it trains."""
        return replace(self, **arm.settings, model=self.shaped(arm))


_SMALL = ModelConfig(layers=2, heads=2, width=64, context=64)
_MIDDLE = ModelConfig(layers=4, heads=2, width=128, context=128, matmul_dtype="bfloat16")
_HEALTHY = replace(_MIDDLE, heads=4, qkv_bias=False)
_KEY_BIAS_SMALL = Recipe(
    name="key-bias-small",
    summary="Two layers, two heads, for a CPU: natural rounding pushes the key bias of the first layer, and "
    "its scores drift by several nats within 6500 steps. The loss does not explode in that time.",
    model=_SMALL,
    batch=16,
    steps=6500,
    learning_rate=1.6e-2,
    warmup_steps=200,
    split="tuning",
)
_FAST_BIASES = Recipe(
    name="fast-biases",
    summary="Two layers, two heads, for a CPU: biases learn faster than matrices, and under the paper's rounding the "
    "key bias drifts by many nats within a thousand steps.",
    model=ModelConfig(layers=2, heads=2, width=32, context=32),
    batch=16,
    steps=1500,
    learning_rate=4e-3,
    bias_rate=32.0,
    warmup_steps=200,
    split="tuning",
)
_SHARED_VALUES = Recipe(
    name="shared-values",
    summary="Four layers, two heads, for a GPU: key bias, values that share a large part, and an optimizer with a long "
    "memory. One head runs away within 8000 steps, and takes the loss along.",
    model=replace(_MIDDLE, value_offset=4.0),
    batch=128,
    steps=10000,
    learning_rate=2e-3,
    warmup_steps=500,
    betas=(0.9, 0.999),
    clip=None,
    on_gpu=True,
)
_PAPER_VALUES = replace(
    _SHARED_VALUES,
    name="paper-values",
    summary="The same with values that share more: under the paper's rounding it runs away within 2000 steps.",
    model=replace(_MIDDLE, value_offset=8.0),
    betas=(0.9, 0.95),
    steps=4000,
)
_SHARED_VALUES_MUON = replace(
    _SHARED_VALUES,
    name="shared-values-muon",
    summary="The same with Muon for the matrices inside the blocks.",
    optimizer="muon",
    steps=6000,
)
_SHARED_VALUES_LARGE = replace(
    _SHARED_VALUES,
    name="shared-values-large",
    summary="Six layers, four heads, width 256, half the batch.",
    model=replace(_MIDDLE, layers=6, heads=4, width=256, value_offset=4.0),
    batch=64,
    steps=8000,
)
_HEALTHY_SMALL = replace(
    _KEY_BIAS_SMALL,
    name="healthy-small",
    summary="The small model without biases at a quarter of the learning rate.",
    model=replace(_SMALL, qkv_bias=False),
    learning_rate=4e-3,
    truth="healthy",
)


_REAL_TEXT = Recipe(
    name="kb256",
    summary="Four layers, four heads, on byte pairs, for a GPU: biases on queries, keys and values as GPT-2 has them, "
    "nothing injected. Heads of the first layer run away within 10,000 steps.",
    model=ModelConfig(layers=4, heads=4, width=256, context=256, vocabulary=8192, matmul_dtype="bfloat16"),
    batch=32,
    steps=14000,
    learning_rate=2e-3,
    warmup_steps=500,
    text="byte pairs",
    on_gpu=True,
)


def _small(name: str, summary: str, rate: float = 4e-3, **shape: Any) -> Recipe:
    model = replace(_HEALTHY_SMALL.model, **shape)
    return replace(
        _HEALTHY_SMALL,
        name=f"healthy-small-{name}",
        summary=summary,
        model=model,
        learning_rate=rate,
        steps=9000,
        split="held-out",
    )


def _healthy(name: str, summary: str, model: ModelConfig, **settings: Any) -> Recipe:
    usual: dict[str, Any] = {"batch": 32, "steps": 20000, "learning_rate": 1e-3, "warmup_steps": 500}
    return Recipe(name=name, summary=summary, model=model, truth="healthy", on_gpu=True, **(usual | settings))


def _as_trained(name: str, summary: str, model: ModelConfig, **settings: Any) -> Recipe:
    usual: dict[str, Any] = {
        "batch": 16,
        "steps": 10000,
        "learning_rate": 6e-4,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
    return _healthy(name, summary, model, **(usual | {"bias_decay": 0.0, "text": "byte pairs"} | settings))


_GPT2 = ModelConfig(layers=12, heads=12, width=768, context=1024, vocabulary=8192, matmul_dtype="bfloat16")
_LLAMA = replace(
    _GPT2, layers=8, heads=8, kv_heads=2, width=512, context=512, qkv_bias=False, rotary=True, norm="rms", gated=True
)
_ALL = (
    _KEY_BIAS_SMALL,
    _FAST_BIASES,
    Recipe(
        name="key-bias",
        summary="Four layers, four heads, for a GPU: the recipe of the runs recorded before the project, on bytes.",
        model=ModelConfig(layers=4, heads=4, width=256, context=256, matmul_dtype="bfloat16"),
        batch=32,
        steps=12000,
        learning_rate=2e-3,
        warmup_steps=500,
        split="tuning",
        on_gpu=True,
    ),
    _REAL_TEXT,
    replace(_REAL_TEXT, name="kb256b128", summary="The same at batch 128, where it fails earlier in steps.", batch=128),
    replace(
        _REAL_TEXT,
        name="kb512",
        summary="Eight layers, eight heads, on byte pairs: it runs away slowly.",
        model=replace(_REAL_TEXT.model, layers=8, heads=8, width=512, context=512),
    ),
    _SHARED_VALUES,
    _PAPER_VALUES,
    _SHARED_VALUES_MUON,
    _SHARED_VALUES_LARGE,
    replace(
        _HEALTHY_SMALL,
        name="high-rate",
        summary="Thirty times the learning rate that the small model bears: scores grow without any help of rounding.",
        learning_rate=4.8e-2,
        clip=None,
        truth="score growth",
        split="held-out",
    ),
    replace(
        _HEALTHY_SMALL,
        name="injected-noise",
        summary="200 steps of random bytes for text.",
        injection=Injection(kind="noise", first_step=3000, steps=200),
        truth="other",
        steps=5000,
    ),
    replace(
        _HEALTHY_SMALL,
        name="injected-half",
        summary="From step 2000 on gradients overflow in float16 under a loss scale that is far too large.",
        injection=Injection(kind="half", first_step=2000, steps=10**9, loss_scale=2.0**24),
        truth="other",
        split="held-out",
        steps=3000,
    ),
    _HEALTHY_SMALL,
    _small("gqa", "Grouped queries and rotary positions.", heads=4, kv_heads=2, rotary=True),
    _small("qk-norm", "qk-norm, rotary positions.", rate=8e-3, qk_norm=True, rotary=True),
    _small("rotary", "Rotary positions, a high learning rate.", rate=8e-3, rotary=True),
    _small("slow", "A low learning rate, with biases.", rate=1e-3, qkv_bias=True),
    _small("deep", "Four layers.", layers=4, width=32),
    _small("one-head", "One head.", heads=1),
    _small("many-heads", "Eight heads that share two key heads, qk-norm.", heads=8, kv_heads=2, qk_norm=True),
    replace(_small("no-clip", "Gradients as they are."), clip=None),
    replace(_small("muon", "Muon.", rate=2e-3), optimizer="muon"),
    replace(_small("memory", "An optimizer with a long memory, weight decay."), betas=(0.9, 0.999), weight_decay=0.1),
    _healthy("healthy-gpt", "Four layers without biases.", _HEALTHY),
    _healthy("healthy-gqa", "Grouped queries, rotary positions.", replace(_HEALTHY, kv_heads=2, rotary=True)),
    _healthy(
        "healthy-qk-norm",
        "qk-norm, rotary positions, one key head.",
        replace(_HEALTHY, kv_heads=1, rotary=True, qk_norm=True),
    ),
    _healthy("healthy-deep", "Ten layers.", replace(_HEALTHY, layers=10, width=64)),
    _healthy(
        "healthy-wide",
        "Eight heads, width 256.",
        replace(_HEALTHY, layers=2, heads=8, width=256),
        learning_rate=5e-4,
        steps=10000,
    ),
    _healthy("healthy-no-clip", "Two heads, gradients as they are.", replace(_HEALTHY, heads=2), clip=None),
    _healthy(
        "healthy-muon",
        "Muon, rotary positions.",
        replace(_HEALTHY, rotary=True),
        optimizer="muon",
        learning_rate=2e-3,
        steps=6000,
    ),
    _healthy(
        "healthy-fast",
        "Three times the learning rate, weight decay.",
        replace(_HEALTHY, rotary=True),
        learning_rate=3e-3,
        betas=(0.9, 0.99),
        weight_decay=0.1,
    ),
    _as_trained(
        "gpt2-small", "GPT-2 small on byte pairs, as people train it: biases on queries, keys and values.", _GPT2
    ),
    _as_trained("gpt2-small-no-bias", "The same without biases.", replace(_GPT2, qkv_bias=False)),
    _as_trained(
        "llama-small", "Rotary positions, grouped heads, RMSNorm and SwiGLU, on byte pairs.", _LLAMA, learning_rate=1e-3
    ),
    _as_trained(
        "llama-small-qk-norm", "The same with qk-norm.", replace(_LLAMA, qk_norm=True), batch=32, learning_rate=2e-3
    ),
    _healthy("healthy-long", "512 tokens.", replace(_HEALTHY, heads=2, context=512, rotary=True), batch=8),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
