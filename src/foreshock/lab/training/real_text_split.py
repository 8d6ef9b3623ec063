"""Which runs on real text detectors may be tuned on, and which are held out.

The split is a file, by recipe and seed, that was committed before any of these runs was made: `real_text_split.json`.
Detectors are tuned on its tuning runs alone. What is held out is scored once, at the end. Held-out runs that were
scored are "spent": from then on they are for tuning, and the next detectors are judged by other seeds.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

Split = Literal["tuning", "held-out"]
Half = Literal["tuning", "spent", "held-out"]
SPLIT_FILE: Final = Path(__file__).with_name("real_text_split.json")


@cache
def real_text_split() -> Mapping[str, Mapping[Half, Sequence[int]]]:
    """Seeds by recipe and half."""
    split: Mapping[str, Mapping[Half, Sequence[int]]] = json.loads(SPLIT_FILE.read_text())
    return split


def assigned(recipe: str, seed: Any) -> Split | None:
    """The half that the runs of a recipe and seed belong to; None for one that the file does not name."""
    for half, seeds in real_text_split().get(recipe, {}).items():
        if seed in seeds:
            return "held-out" if half == "held-out" else "tuning"
    return None
