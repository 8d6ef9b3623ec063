"""The entries of transformers: every model type, without and with padding, and with a cache."""

from typing import Any

import torch
from tests.zoo.architectures import class_of
from tests.zoo.inputs import forward_arguments, inputs_of
from tests.zoo.judge import Entry
from tests.zoo.running import Case, draw_weights, without_dropout
from tests.zoo.shrinking import small_config


def build(model_type: str, changes: dict[str, Any] | None = None) -> Any:
    """A small random model of a type; `changes` are fields of its configuration."""
    config = small_config(model_type, changes)
    torch.manual_seed(0)
    kind = class_of(model_type)
    if kind is None:
        raise ValueError("transformers has no class for it")
    model = kind(config)
    draw_weights(model)
    without_dropout(model)
    return model


def cases(model: Any) -> list[Case]:
    """Without padding, with padding left, right and inside, and with a cache."""
    given = inputs_of(model)
    all_cases = [Case("unpadded", given)]
    names = forward_arguments(model)
    ids = given.get("input_ids")
    if ids is not None and "attention_mask" in names and len(given) <= 3 and not any("pixel" in n for n in given):
        for name, span in (("padded right", (7, 12)), ("padded left", (0, 5)), ("padded inside", (4, 8))):
            real = torch.ones_like(ids, dtype=torch.bool)
            real[0, span[0] : span[1]] = False
            all_cases.append(Case(name, {**given, "attention_mask": real.long()}, real))
    if ids is not None and "use_cache" in names and "past_key_values" in names:
        plain = {n: v for n, v in given.items() if n != "use_cache"}
        all_cases.append(Case("cache", plain, generates=True))
    return all_cases


def entry(model_type: str, changes: dict[str, Any] | None = None) -> Entry:
    """The entry of a model type."""
    return Entry(name_of(model_type, changes), model_type, lambda: build(model_type, changes), cases)


def compiled_entry(model_type: str) -> Entry:
    """The entry of a model type under torch.compile, with a different length in each step."""
    name = f"{name_of(model_type)}, compiled"
    return Entry(name, model_type, lambda: build(model_type), lambda m: [Case("compiled", inputs_of(m), compiled=True)])


def name_of(model_type: str, changes: dict[str, Any] | None = None) -> str:
    """`transformers TYPE` and the changed fields of its configuration."""
    return ", ".join((f"transformers {model_type}", *(f"{field}={value}" for field, value in (changes or {}).items())))
