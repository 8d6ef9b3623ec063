"""Who lives in the zoo: every entry by name, and the model types that cannot be built, with the reason."""

import json
from pathlib import Path
from typing import Final

from tests.zoo import transformers_zoo
from tests.zoo.judge import Entry
from tests.zoo.running import train
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_FOLDER: Final = Path(__file__).parent
UNBUILT: Final[dict[str, str]] = json.loads((_FOLDER / "unbuilt.json").read_text())
"""Model types of transformers that no small model stands for, and why."""
KNOWN_WRONG: Final[dict[str, list[str]]] = json.loads((_FOLDER / "known_wrong.json").read_text())
"""Entries that foreshock gets wrong today: "way, case" of each finding."""


def names() -> list[str]:
    """Every entry."""
    return [f"transformers {t}" for t in sorted(CONFIG_MAPPING_NAMES) if t not in UNBUILT]


def entry(name: str) -> Entry:
    """The entry of this name."""
    _, _, model_type = name.partition(" ")
    return transformers_zoo.entry(model_type)


def run_once(model_type: str) -> None:
    """Build a listed model type and call it; raises what stands in the way."""
    model = transformers_zoo.build(model_type)
    for case in transformers_zoo.cases(model)[:1]:
        train(model, case)
