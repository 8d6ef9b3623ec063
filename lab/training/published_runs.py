"""The published set of runs: what `foreshock lab run-set` makes, and lab/traces/ holds of it."""

from collections.abc import Iterable, Sequence
from functools import partial

from foreshock.lab.training.arm import UNTREATED, find_arm
from foreshock.lab.training.cure_runs import cure_sets
from foreshock.lab.training.real_text import real_text_sets
from foreshock.lab.training.recipes import RECIPES, find_recipe
from foreshock.lab.training.run_set import Branch, Entry

_EXACT = partial(Branch, mode="exact_delta")
_BRANCHES = (
    _EXACT(name="exact-head-2000", delay_steps=2000),
    _EXACT(name="exact-head-4000", delay_steps=4000),
    _EXACT(name="exact-all-0", heads="all"),
    _EXACT(name="exact-all-2000", delay_steps=2000, heads="all"),
    _EXACT(name="exact-all-4000", delay_steps=4000, heads="all"),
    _EXACT(name="exact-all-5000", delay_steps=5000, heads="all"),
    _EXACT(name="exact-layer-2000", delay_steps=2000, heads="layer"),
    Branch(name="stable-all-2000", delay_steps=2000, heads="all", mode="stable_softmax"),
    Branch(name="both-head-2000", delay_steps=2000, mode="exact_delta+stable_softmax"),
    Branch(name="removed-all-4000", delay_steps=4000, heads="all", mode="plain", remove_offset=True),
    _EXACT(name="removed-and-exact-head-4000", delay_steps=4000, remove_offset=True),
    _EXACT(name="removed-and-exact-all-4000", delay_steps=4000, heads="all", remove_offset=True),
    _EXACT(name="removed-and-exact-all-5000", delay_steps=5000, heads="all", remove_offset=True),
)
"""What is done, after the first warning, to the warned head alone, its layer or all heads."""
_PAPER_BRANCHES = (
    _EXACT(name="paper-exact-head-0"),
    _EXACT(name="paper-exact-layer-0", heads="layer"),
    _EXACT(name="paper-exact-all-0", heads="all"),
    Branch(name="paper-stable-all-0", heads="all", mode="stable_softmax"),
    Branch(name="paper-paper-softmax-all-0", heads="all", mode="paper_softmax"),
    Branch(name="paper-both-all-0", heads="all", mode="exact_delta+stable_softmax"),
    _EXACT(name="paper-exact-all-500", heads="all", delay_steps=500),
    _EXACT(name="paper-removed-and-exact-all-500", heads="all", delay_steps=500, remove_offset=True),
)
_REMOVAL = (
    None,
    _EXACT(name="exact-all-0", heads="all"),
    Branch(name="offset-removed", mode="plain", heads="all", remove_offset=True),
    _EXACT(name="offset-removed-exact", heads="all", remove_offset=True),
)
"""What taking an offset out does by itself and beside exact delta."""
_PAPER_ARMS = ("paper", "control", "paper-exact-delta", "paper-rescued")
_KERNEL_ARMS = ("untreated", "control", "rescued", "exact-delta", "paper")


def _arms(recipe: str, arms: Iterable[str], seeds: Sequence[int]) -> list[Entry]:
    return [Entry(recipe=find_recipe(recipe), arm=find_arm(arm), seed=seed) for seed in seeds for arm in arms]


def _healthy(*, on_gpu: bool, seeds: Sequence[int]) -> list[Entry]:
    names = [
        name
        for name, each in RECIPES.items()
        if each.truth == "healthy" and each.on_gpu == on_gpu and each.text == "bytes"  # the others: real_text_sets
    ]
    return [entry for name in names for entry in _arms(name, [UNTREATED.name], seeds)]


def published() -> dict[str, list[Entry]]:
    """The sets by name: `cpu`, `healthy` and `gpu` (which arms of which recipe and seed), `rescue` (what helps) and
    `removal` (the same of an offset that is taken out, on a CPU), and those of `cure_sets` and `real_text_sets`."""
    shared, paper = find_recipe("shared-values"), find_recipe("paper-values")
    return {
        **cure_sets(),
        **real_text_sets(),
        "cpu": [
            *_arms("key-bias-small", _KERNEL_ARMS, (41, 42, 43)),
            *_arms("high-rate", ["control"], (1, 2, 3)),
            *_arms("injected-noise", ["untreated"], (1, 2, 3)),
            *_arms("injected-half", ["untreated"], (1, 2, 3)),
        ],
        "healthy": _healthy(on_gpu=False, seeds=(1, 2, 3, 4)),
        "gpu": [
            *_arms("shared-values", _KERNEL_ARMS, (1, 2, 3)),
            *_arms("paper-values", _PAPER_ARMS, (1, 2, 3)),
            *_healthy(on_gpu=True, seeds=(1,)),
        ],
        "other": [  # one seed: another optimizer, a larger model
            *_arms("shared-values-muon", ("untreated", "control"), (1,)),
            *_arms("shared-values-large", ("untreated", "control", "exact-delta"), (1,)),
        ],
        "removal": [
            Entry(recipe=find_recipe("key-bias-small"), arm=UNTREATED, seed=seed, branch=branch)
            for seed in (41, 42, 43)
            for branch in _REMOVAL
        ],
        "rescue": [
            *(Entry(recipe=shared, arm=UNTREATED, seed=2, branch=branch) for branch in (None, *_BRANCHES)),
            *(Entry(recipe=paper, arm=find_arm("paper"), seed=1, branch=branch) for branch in (None, *_PAPER_BRANCHES)),
        ],
    }
