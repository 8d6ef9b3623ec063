"""One class for each model type of transformers."""

import importlib
import inspect
import re
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

_FIRST: Final = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)


def class_of(model_type: str) -> Any | None:
    """The class of a model type: its base model, or else the first class in the auto-model mappings."""
    others = sorted(
        name
        for name in dir(modeling_auto)
        if re.match("MODEL_(FOR|MAPPING)", name) and name.endswith("_NAMES") and name not in _FIRST
    )
    for mapping in (*_FIRST, *others):
        name = getattr(modeling_auto, mapping).get(model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    kind = CONFIG_MAPPING[model_type]
    modeling = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    candidates = [
        value
        for value in vars(modeling).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == modeling.__name__
        and getattr(value, "config_class", None) is kind
        and "forward" in vars(value)
    ]
    return min(candidates, key=lambda c: ("Model" not in c.__name__, len(c.__name__)), default=None)
