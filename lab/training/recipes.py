"""Recipes as data: a model, an optimizer, a text, and how attention is rounded. Adding one needs no code."""

from dataclasses import replace

from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.paper_recipes import PAPER_RECIPES
from foreshock.lab.training.recipe import Recipe as Recipe
from foreshock.lab.training.recipe import Text as Text
from foreshock.lab.training.text_recipes import RATES, TEXT_RECIPES

_SMALL = ModelConfig(layers=2, heads=2, width=64, context=64)
_MIDDLE = ModelConfig(layers=4, heads=2, width=128, context=128, matmul_dtype="bfloat16")
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
)
RECIPES = {recipe.name: recipe for recipe in (*_ALL, *TEXT_RECIPES, *RATES, *PAPER_RECIPES)}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
