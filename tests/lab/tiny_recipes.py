"""Recipes on real text, small enough for a test."""

from dataclasses import replace

from foreshock.lab.training.recipes import Recipe


def tiny(recipe: Recipe) -> Recipe:
    """The same settings on a model of two small layers and another text."""
    shape = replace(
        recipe.model,
        layers=2,
        heads=4,
        kv_heads=2 if recipe.model.kv_heads else None,
        width=32,
        context=16,
        vocabulary=256,
    )
    return replace(recipe, model=shape, batch=4, steps=40, warmup_steps=4, text="bytes")
