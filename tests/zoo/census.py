"""The models of the zoo: every entry by name, and the model types that cannot be built, with the reason."""

import functools
import json
from pathlib import Path
from typing import Any, Final

from tests.zoo import libraries, transformers_zoo
from tests.zoo.judge import Entry
from tests.zoo.running import train
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_FOLDER: Final = Path(__file__).parent
UNBUILT: Final[dict[str, str]] = json.loads((_FOLDER / "unbuilt.json").read_text())
"""Model types of transformers without a small model, with the reason."""


VARIANTS: Final[dict[str, list[dict[str, Any]]]] = json.loads((_FOLDER / "variants.json").read_text())
"""Other configurations of a model type with another attention or weight layout."""


COMPILED: Final = (
    "bart", "bert", "falcon", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "mixtral", "modernbert",
    "opt", "phi3", "qwen3", "t5", "vit", "whisper",
)  # fmt: skip
"""Model types that also run under torch.compile: one or two for each implementation of attention."""


@functools.cache
def entries() -> dict[str, Entry]:
    """All entries by name."""
    types = [model_type for model_type in sorted(CONFIG_MAPPING_NAMES) if model_type not in UNBUILT]
    pairs = [(model_type, changes) for model_type in types for changes in (None, *VARIANTS.get(model_type, ()))]
    all_entries = [transformers_zoo.entry(model_type, changes) for model_type, changes in pairs]
    all_entries += [transformers_zoo.compiled_entry(model_type) for model_type in COMPILED] + libraries.entries()
    return {entry.name: entry for entry in all_entries}


def names() -> list[str]:
    """The names of all entries."""
    return list(entries())


def entry(name: str) -> Entry:
    """The entry of this name."""
    return entries()[name]


def run_once(model_type: str) -> None:
    """Build an unbuilt model type and train it; raises the error that prevents this."""
    model = transformers_zoo.build(model_type)
    for case in transformers_zoo.cases(model)[:1]:
        train(model, case)
