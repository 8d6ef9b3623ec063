"""For tests: settings whose constants are others, so that what takes an hour takes a moment."""

from typing import Any, TypeVar

from pydantic import BaseModel

Kind = TypeVar("Kind", bound=BaseModel)


def with_fixed(kind: type[Kind], **constants: Any) -> type[Kind]:
    """The same settings with these constants. Raises AttributeError for one that is none of its constants."""
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    for name, value in constants.items():
        if name not in kind.__class_vars__:
            raise AttributeError(f"{name} is no constant of {kind.__name__}")
        setattr(made, name, value)
    return made


def settings_with(kind: type[Kind], **given: Any) -> Kind:
    """Settings of which some may be constants."""
    constants = {name: value for name, value in given.items() if name in kind.__class_vars__}
    return with_fixed(kind, **constants)(**{name: value for name, value in given.items() if name not in constants})
