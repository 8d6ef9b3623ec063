"""Models of libraries beside transformers; each is an optional package (extra `zoo` of pyproject.toml)."""

import importlib.util
from typing import Final

PACKAGES: Final = ("timm", "diffusers", "torchtune", "litgpt", "x_transformers")


def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
