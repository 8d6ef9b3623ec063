"""The published set of runs: what `foreshock lab run-set` makes, and lab/traces/ holds of it."""

from collections.abc import Iterable, Sequence

from foreshock.lab.many import Branch, Entry
from foreshock.lab.recipes import ARMS, CONTROL, RECIPES, UNTREATED, Arm, find_recipe

_BRANCHES = (
    Branch(name="exact-head-0"),
    Branch(name="exact-head-500", delay_steps=500),
    Branch(name="exact-head-2000", delay_steps=2000),
)


def _arms(recipe: str, arms: Iterable[Arm], seeds: Sequence[int]) -> list[Entry]:
    return [Entry(recipe=find_recipe(recipe), arm=arm, seed=seed) for seed in seeds for arm in arms]


def _healthy(*, on_gpu: bool, seeds: Sequence[int]) -> list[Entry]:
    names = [name for name, each in RECIPES.items() if each.truth == "healthy" and each.on_gpu == on_gpu]
    return [entry for name in names for entry in _arms(name, [UNTREATED], seeds)]


def published() -> dict[str, list[Entry]]:
    """The sets by name: `cpu` and `gpu` (which arms for which recipe and seed), and `rescue` (what helps)."""
    return {
        "cpu": [
            *_arms("key-bias-small", ARMS.values(), (41, 42, 43)),
            *_arms("high-rate", [CONTROL], (1, 2, 3)),
            *_arms("injected-noise", [UNTREATED], (1, 2, 3)),
            *_arms("injected-half", [UNTREATED], (1, 2, 3)),
            *_healthy(on_gpu=False, seeds=(1, 2)),
        ],
        "gpu": [*_arms("shared-values", ARMS.values(), (1, 2, 3)), *_healthy(on_gpu=True, seeds=(1,))],
        "rescue": [
            Entry(recipe=find_recipe("shared-values"), arm=UNTREATED, seed=1, branch=branch)
            for branch in (None, *_BRANCHES)
        ],
    }
