"""Helpers that override settings, including class constants, and environment variables."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

Kind = TypeVar("Kind", bound=BaseModel)


def settings_with(kind: type[Kind], **given: Any) -> Kind:
    """Settings with these values, some of which may be constants of the class."""
    constants = {name: value for name, value in given.items() if name in kind.__class_vars__}
    settings_class: type[Kind] = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    for name, value in constants.items():
        setattr(settings_class, name, value)
    return settings_class(**{name: value for name, value in given.items() if name not in constants})


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], *prefixes: str) -> None:
    """Set these variables, and unset all other variables of foreshock or with one of these prefixes."""
    for name in [name for name in os.environ if name.startswith(("FORESHOCK_", *prefixes))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
