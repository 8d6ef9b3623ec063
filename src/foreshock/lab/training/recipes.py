"""The recipes of the laboratory: a model, an optimizer and a dataset.

They are read from recipes.toml, so a new recipe does not need code.
"""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from foreshock.lab.training.model import Dtype, ModelConfig
from foreshock.lab.training.variant import Variant

Text = Literal["bytes", "byte-pairs", "folders"]
"""Datasets (texts.py): bytes of the standard library, byte-pair tokens of it and of installed packages, or byte-pair
tokens of the source files in given folders, with a larger vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run without its variant and seed."""

    name: str
    summary: str
    model: ModelConfig
    batch: int
    """Sequences per step."""
    micro_batch: int | None = None
    """Most sequences per forward pass of a process; gradients are accumulated over a step. None: all of its rows."""
    steps: int
    learning_rate: float
    warmup_steps: int
    """Steps in which the learning rate rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up; the cosine ends at the last step with a hundredth of the rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    """Gradient norm above which gradients are clipped."""
    text: Text = "bytes"
    split: Literal["tuning", "held-out"] = "held-out"
    """Detectors may be tuned on the runs of a tuning recipe; held-out runs are only used to score them."""
    compiled: bool = False
    """Whether to use torch.compile on a GPU; on a CPU the model is never compiled."""
    sample_every_steps: int = 25

    def rate_share(self, step: int) -> float:
        """Return the fraction of `learning_rate` at a step, counted from 1."""
        if step < self.warmup_steps or self.schedule == "constant":
            return min(1.0, step / self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        return 0.505 + 0.495 * math.cos(math.pi * done)

    def header(self, variant: Variant, seed: int, run: str) -> dict[str, Any]:
        """Return the header of a trace of this run.

        `truth` is the outcome that the run is designed to show: recipes fail by rounding, unless the variant removes
        the cause from the first step.
        """
        return {
            "recipe": self.name,
            "arm": variant.name,
            "seed": seed,
            "run": run,
            "steps": self.steps,
            "split": self.split,
            "truth": "healthy" if variant.cured else "rounding",
            "nature": "natural",
            "policy": variant.policy,
            **({} if variant.backend is None else {"backend": variant.backend}),
        }

    def under(self, variant: Variant) -> "Recipe":
        """Return the recipe with the changes of a variant, such as float32 attention for the control."""
        dtype: Dtype = "float32" if variant.numerics == "float32" else "bfloat16"
        key_bias = self.model.key_bias and variant.key_bias
        return replace(self, model=replace(self.model, attention_dtype=dtype, key_bias=key_bias))


FILE: Final = Path(__file__).with_name("recipes.toml")


def read_recipes(text: str) -> dict[str, Recipe]:
    """Parse recipes in the format of recipes.toml, by name. Raises ValueError for a field that does not exist."""
    written, merged = tomllib.loads(text), dict[str, dict[str, Any]]()
    for name, own in written.items():
        base = merged.get(own.pop("base", name), {})
        merged[name] = {**base, **own, "name": name, "model": {**base.get("model", {}), **own.get("model", {})}}
        # Pydantic ignores unknown fields, so a misspelt one would go unnoticed.
        known = [{field.name for field in fields(kind)} for kind in (Recipe, ModelConfig)]
        if unknown := (merged[name].keys() - known[0]) | (merged[name]["model"].keys() - known[1]):
            raise ValueError(f"recipe {name!r} has the fields {', '.join(sorted(unknown))}, which do not exist")
    adapter = TypeAdapter(Recipe)
    return {name: adapter.validate_python(given) for name, given in merged.items()}


RECIPES: Final = read_recipes(FILE.read_text())


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name. Raises ValueError, with the allowed names, if it does not exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
