"""The recipes of the laboratory by name, read from recipes.toml: adding one needs no code."""

import tomllib
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from foreshock.lab.training.recipe import Recipe as Recipe
from foreshock.lab.training.recipe import Text as Text

FILE: Final = Path(__file__).with_name("recipes.toml")


def read_recipes(text: str) -> dict[str, Recipe]:
    """The recipes of a file in the form of recipes.toml, by name. Raises ValueError for a field that does not exist."""
    written, merged = tomllib.loads(text), dict[str, dict[str, Any]]()
    for name, own in written.items():
        base = merged.get(own.pop("base", name), {})
        merged[name] = {**base, **own, "name": name, "model": {**base.get("model", {}), **own.get("model", {})}}
    adapter = TypeAdapter(Recipe)
    return {
        name: adapter.validate_python({field: None if value == "none" else value for field, value in fields.items()})
        for name, fields in merged.items()
    }


RECIPES: Final = read_recipes(FILE.read_text())


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; allowed are {', '.join(RECIPES)}")
    return RECIPES[name]
