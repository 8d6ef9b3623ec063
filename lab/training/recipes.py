"""Recipes as data: a model, an optimizer, a text, and how attention is rounded. Adding one needs no code."""

from dataclasses import replace
from typing import Any

from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipe import Injection as Injection
from foreshock.lab.training.recipe import Recipe as Recipe
from foreshock.lab.training.recipe import Text as Text
from foreshock.lab.training.text_recipes import TEXT_RECIPES

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
_SHARED_VALUES_DEEP = replace(
    _SHARED_VALUES, name="shared-values-deep", summary="Eight layers.", model=replace(_SHARED_VALUES.model, layers=8)
)
_PAPER_VALUES_DEEP = replace(
    _PAPER_VALUES, name="paper-values-deep", summary="Eight layers.", model=replace(_PAPER_VALUES.model, layers=8)
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
    _SHARED_VALUES,
    _PAPER_VALUES,
    _SHARED_VALUES_DEEP,
    _PAPER_VALUES_DEEP,
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
    _healthy("healthy-long", "512 tokens.", replace(_HEALTHY, heads=2, context=512, rotary=True), batch=8),
)
RECIPES = {recipe.name: recipe for recipe in (*_ALL, *TEXT_RECIPES)}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
