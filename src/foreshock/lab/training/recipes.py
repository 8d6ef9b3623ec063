"""The recipes of the laboratory: a model, an optimizer, a text, and how attention is rounded.

They are read from recipes.toml: adding one needs no code.
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
"""The source of the standard library as bytes, what is installed as byte pairs, or the source files of folders as byte
pairs of a larger vocabulary (texts.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run up to its variant and its seed."""

    name: str
    summary: str
    model: ModelConfig
    batch: int
    """Sequences of a step."""
    micro_batch: int | None = None
    """Sequences that a process takes at once, at most; gradients of several parts add up to a step. None: all."""
    steps: int
    learning_rate: float
    warmup_steps: int
    """Of a rate that rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows; the cosine ends at the last step, with a hundredth of the rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest gradient norm."""
    text: Text = "bytes"
    split: Literal["tuning", "held-out"] = "held-out"
    """Detectors may be tuned on the runs of a tuning recipe, and are scored on the others."""
    compiled: bool = False
    """On a GPU the model goes through torch.compile, as people train; elsewhere it is left as it is."""
    sample_every_steps: int = 25

    def rate_share(self, step: int) -> float:
        """Share of the learning rate in a step, counted from 1."""
        if step < self.warmup_steps or self.schedule == "constant":
            return min(1.0, step / self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        return 0.505 + 0.495 * math.cos(math.pi * done)

    def header(self, variant: Variant, seed: int, run: str) -> dict[str, Any]:
        """What the first line of a trace says of it. `truth` is what it was made to show: recipes fail by rounding,
        unless a variant keeps the cause away from the first step on.
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
        """The recipe as a variant of it trains: the control's attention is given float32 operands."""
        dtype: Dtype = "float32" if variant.numerics == "float32" else "bfloat16"
        key_bias = self.model.key_bias and variant.key_bias
        return replace(self, model=replace(self.model, attention_dtype=dtype, key_bias=key_bias))


FILE: Final = Path(__file__).with_name("recipes.toml")


def read_recipes(text: str) -> dict[str, Recipe]:
    """The recipes of a file in the form of recipes.toml, by name. Raises ValueError for a field that does not exist."""
    written, merged = tomllib.loads(text), dict[str, dict[str, Any]]()
    for name, own in written.items():
        base = merged.get(own.pop("base", name), {})
        merged[name] = {**base, **own, "name": name, "model": {**base.get("model", {}), **own.get("model", {})}}
        # Pydantic ignores fields that do not exist, and so reads checkpoints of earlier versions.
        known = [{field.name for field in fields(kind)} for kind in (Recipe, ModelConfig)]
        if unknown := (merged[name].keys() - known[0]) | (merged[name]["model"].keys() - known[1]):
            raise ValueError(f"recipe {name!r} has the fields {', '.join(sorted(unknown))}, which do not exist")
    adapter = TypeAdapter(Recipe)
    return {name: adapter.validate_python(given) for name, given in merged.items()}


RECIPES: Final = read_recipes(FILE.read_text())


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
