"""Settings of which a test changes constants too."""

from typing import Any, TypeVar

from pydantic import BaseModel

Kind = TypeVar("Kind", bound=BaseModel)


def settings_with(kind: type[Kind], **given: Any) -> Kind:
    """Settings of which some may be constants of the class."""
    constants = {name: value for name, value in given.items() if name in kind.__class_vars__}
    made: type[Kind] = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    for name, value in constants.items():
        setattr(made, name, value)
    return made(**{name: value for name, value in given.items() if name not in constants})
