"""The recipes of the laboratory by name, read from recipes.toml: adding one needs no code."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipe import Recipe as Recipe
from foreshock.lab.training.recipe import Text as Text

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
    return {
        name: adapter.validate_python({field: None if value == "none" else value for field, value in given.items()})
        for name, given in merged.items()
    }


RECIPES: Final = read_recipes(FILE.read_text())


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
