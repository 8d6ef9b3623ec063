"""The sets of runs that `foreshock lab run-set` makes. Those of finished studies are at commit ba386e0."""

from foreshock.lab.sets.real_text import real_text_sets
from foreshock.lab.sets.run_set import Entry
from foreshock.lab.training.arm import PAPER, PAPER_NO_KEY_BIAS, PAPER_RESCUED, find_arm
from foreshock.lab.training.recipes import RECIPES, find_recipe

_OBSERVED, _RESCUED = ("flash-untreated", "cudnn-untreated"), ("flash-rescued", "cudnn-rescued")
_FRESH = (21, 22, 23, 24, 25)
_CLIPPED = (31, 32, 33, 34, 35)
_CLIPS = {4e-3: ("untreated",), 8e-3: ("untreated", "qk-clip"), 32e-3: ("untreated", "qk-clip", "qk-clip-warned")}


def _runs(recipe: str, arms: tuple[str, ...], seeds: tuple[int, ...]) -> list[Entry]:
    return [Entry(recipe=find_recipe(recipe), arm=find_arm(arm), seed=seed) for seed in seeds for arm in arms]


def published() -> dict[str, list[Entry]]:
    """The sets by name: those of `real_text_sets`, on PyTorch's own attention `vendor` and `vendor-healthy`, and with
    QK-Clip and without at rates that it is needed for and that it is not, `qk-clip`. `demo`: what `foreshock demo
    --train` shows on a CPU, whole and on twenty seeds."""
    return {
        **real_text_sets(),
        "vendor": [
            *_runs("kb256", _OBSERVED, _FRESH),
            *_runs("kb256", _RESCUED, _FRESH),
            *_runs("kb256", ("control",), _FRESH[:3]),
            *_runs("kb256b64", (*_OBSERVED, *_RESCUED), _FRESH),
        ],
        "vendor-healthy": [
            run
            for backend, seeds in (("cudnn", _FRESH[:2]), ("flash", _FRESH[2:3]))
            for recipe in ("gpt2-small", "llama-small")
            for run in _runs(recipe, (f"{backend}-untreated",), seeds)
        ],
        "demo": _runs(
            "key-bias-small", (PAPER.name, PAPER_RESCUED.name, PAPER_NO_KEY_BIAS.name), tuple(range(201, 221))
        ),
        "qk-clip": [
            run
            for seed in _CLIPPED
            for recipe in RECIPES.values()
            if recipe.name.startswith("no-bias-")
            for run in _runs(recipe.name, _CLIPS[recipe.learning_rate], (seed,))
        ],
    }
