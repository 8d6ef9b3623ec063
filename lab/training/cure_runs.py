"""The runs that the proof of a cure is made of, in the order in which they matter; made by `foreshock lab run-set`."""

from collections.abc import Iterable, Sequence
from typing import Final

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.training.arm import CONTROL, CONTROL_AGAIN, HABITS, PAPER, UNTREATED, Arm, find_arm
from foreshock.lab.training.milestones import Milestone
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run_set import Branch, Entry

CURES: Final = (
    "centred_keys",
    "row_corrected",
    "exact_delta+centred_keys",
    "centred_keys+centred_values",
    "exact_delta",
)
"""Modes whose effect is asked about, from what is expected to help most on. Under kernel numerics row_corrected and its
union with centred_keys train alike to the bit, so that the union is not among them."""
_EARLY: Final[tuple[tuple[Milestone, int], ...]] = (("warning", 2000),)
"""At the warning itself the arms rescued-all-MODE switch."""
_LATE: Final[tuple[tuple[Milestone, int], ...]] = (("harm", 0), ("explosion", 0))


def _runs(recipe: Recipe, arms: Iterable[Arm | str], seeds: Sequence[int]) -> list[Entry]:
    found = [arm if isinstance(arm, Arm) else find_arm(arm) for arm in arms]
    return [Entry(recipe=recipe, arm=arm, seed=seed) for seed in seeds for arm in found]


def _branches(
    recipe: Recipe, trunk: Arm, seeds: Sequence[int], points: Sequence[tuple[Milestone, int]], modes: Sequence[str]
) -> list[Entry]:
    """Every head switched to each mode at each point of each trunk."""
    made = [
        Branch(
            name=f"{'paper-' if trunk is PAPER else ''}{_arm(mode)}-after-{after}{f'-{delay}' if delay else ''}",
            after=after,
            delay_steps=delay,
            mode=mode,
            heads="all",
        )
        for after, delay in points
        for mode in modes
    ]
    return [Entry(recipe=recipe, arm=trunk, seed=seed, branch=branch) for seed in seeds for branch in made]


def _arm(mode: str) -> str:
    return mode.replace("_", "-")


def cure_sets() -> dict[str, list[Entry]]:
    """By name: `cure-explosion` (shared-values, with the habits of others, and paper-values), `cure-twenty` (fresh
    seeds of shared-values and the shipped policy), `cure-text` (byte pairs), `cure-deep` (eight layers, the
    shipped policy) and `cure-small` (on a CPU)."""
    shared, paper = find_recipe("shared-values"), find_recipe("paper-values")
    text, wide_batch, deep = (find_recipe(name) for name in ("kb256", "kb256b128", "kb512"))
    eight_layers = find_recipe("kb256deep")
    shared_deep, paper_deep = find_recipe("shared-values-deep"), find_recipe("paper-values-deep")
    small = find_recipe("key-bias-small")
    first, fresh = (2, 7, 1, 4, 5, 3), range(8, 28)
    at_once = [f"rescued-all-{_arm(mode)}" for mode in CURES[:3]]
    return {
        "cure-explosion": [
            *_runs(shared, [UNTREATED], first),
            *_runs(shared, [CONTROL], first),
            *_branches(shared, UNTREATED, first, _LATE, CURES),
            *_branches(shared, UNTREATED, first[:1], _EARLY, CURES),
            *_runs(shared, at_once, first[:3]),
            *_runs(shared, map(_arm, CURES), first[:1]),
            *_runs(paper, [PAPER, CONTROL], (1, 2, 3)),
            *_branches(paper, PAPER, (1, 2, 3), [("warning", 0), *_LATE], CURES[:4]),
            *_runs(shared, HABITS, first[:1]),
        ],
        "cure-twenty": [
            *_runs(shared, [UNTREATED, f"rescued-all-{_arm(DEFAULT_MITIGATION)}"], fresh),
            *_runs(shared, [CONTROL], fresh),
            *_runs(shared, [CONTROL_AGAIN], fresh[:8]),
        ],
        "cure-text": [
            *_runs(text, [UNTREATED, CONTROL, *map(_arm, CURES[:3]), *at_once[:2]], (2, 1)),
            *_branches(text, UNTREATED, (2, 1), [("warning", 2000), *_LATE], CURES[:3]),
            *_runs(wide_batch, [UNTREATED, CONTROL, *at_once[:2]], (1, 2)),
            *_branches(wide_batch, UNTREATED, (1,), _LATE, CURES[:3]),
            *_runs(text, [UNTREATED, CONTROL, *map(_arm, CURES[:3]), *at_once[:2]], (3,)),
            *_runs(deep, [UNTREATED, CONTROL, _arm(CURES[0])], (1,)),
            *_runs(text, HABITS[:-1], (2,)),
            *_runs(wide_batch, [UNTREATED, at_once[1], CONTROL], (3,)),
        ],
        "cure-deep": [
            *_runs(paper_deep, [PAPER, f"paper-rescued-all-{_arm(DEFAULT_MITIGATION)}", CONTROL], (1, 2, 3)),
            *_runs(shared_deep, [UNTREATED, f"rescued-all-{_arm(DEFAULT_MITIGATION)}", CONTROL], (1, 2, 3)),
            *_runs(eight_layers, [UNTREATED, f"rescued-all-{_arm(DEFAULT_MITIGATION)}"], (1, 2, 3)),
            *_runs(eight_layers, [CONTROL], (1, 2, 3)),
        ],
        "cure-small": [
            *_runs(small, [UNTREATED, CONTROL, *map(_arm, CURES)], (44, 45, 46)),
            *_branches(small, UNTREATED, (44, 45, 46), [("warning", 0)], CURES),
            *_runs(small, [PAPER, *(f"paper-{_arm(mode)}" for mode in CURES)], (44, 45, 46)),
            *_branches(small, PAPER, (44, 45, 46), [("warning", 0)], CURES),
        ],
    }
