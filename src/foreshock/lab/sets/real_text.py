"""The runs on real text that detectors are judged by, in the order in which they are made."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from foreshock.lab.sets.run_set import Entry
from foreshock.lab.training.arm import CONTROL, CONTROL_AGAIN, PAPER, UNTREATED
from foreshock.lab.training.real_text_split import real_text_split
from foreshock.lab.training.recipes import find_recipe

_DEEPEST_TOGETHER: Final = 8
"""Layers. Models with more fill a GPU by themselves, and are a set of their own: `real-text-large`."""
_CONTROLS_AGAIN: Final = 2
"""Seeds of a recipe that may fail whose control is made twice: how far the two part is the noise of the recipe."""


def real_text_sets() -> dict[str, list[Entry]]:
    """By name: `real-text`, `real-text-large` (models of twelve layers) and `real-text-small` (for a CPU).

    The first seed of every recipe comes before the second of any, tuning and held-out by turns, so that each leg of a
    set that is made in several gives some of everything. A run that may fail is followed by its control, which is as
    long. The first recipes are those that may fail.
    """
    sets: dict[str, list[Entry]] = {"real-text": [], "real-text-large": [], "real-text-small": []}
    for turn, name, seed in _in_turn():
        recipe = find_recipe(name)
        which = "real-text" if recipe.model.layers <= _DEEPEST_TOGETHER else "real-text-large"
        untreated = PAPER if name == "paper-values" else UNTREATED
        arms = [untreated] if recipe.truth == "healthy" else [untreated, CONTROL]
        if recipe.truth != "healthy" and turn < _CONTROLS_AGAIN:
            arms.append(CONTROL_AGAIN)
        sets[which if recipe.on_gpu else "real-text-small"] += [
            Entry(recipe=recipe, arm=arm, seed=seed) for arm in arms
        ]
    return sets


def _in_turn() -> Iterator[tuple[int, str, int]]:
    """Round, recipe and seed of every run, round by round."""
    queues = {
        name: [
            seed
            for pair in zip_longest(halves["tuning"], [*halves.get("spent", ()), *halves["held-out"]])
            for seed in pair
            if seed is not None
        ]
        for name, halves in real_text_split().items()
    }  # fmt: skip
    for number in range(max(map(len, queues.values()))):
        for name, seeds in queues.items():
            if number < len(seeds):
                yield number, name, seeds[number]
