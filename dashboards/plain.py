"""Plain data as the text of a file."""

from typing import Any

import yaml


def to_yaml(data: dict[str, Any] | list[Any]) -> str:
    """YAML, keys in the order given."""
    return yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
