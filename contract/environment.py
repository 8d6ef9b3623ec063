"""What is wrong with the FORESHOCK_ variables of this process, in sentences that hold no value: it may be a secret."""

import os
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Final

from pydantic import ValidationError

from foreshock.contract.variables import VARIABLES

PREFIX: Final = "FORESHOCK_"
_NEARLY: Final = 0.75
"""How alike two names are without their prefix, of 1, when one is taken for a slip of the other."""


def refuse_misspelt(environment: Mapping[str, str] | None = None) -> None:
    """Raises ValueError for a variable that nothing reads and that is nearly one which something does.

    Others are left alone: a cluster sets FORESHOCK_SERVICE_HOST and the like for a service of this name.
    """
    for given in sorted(os.environ if environment is None else environment):
        if not given.startswith(PREFIX) or given in VARIABLES:
            continue
        likeness, nearest = max((_alike(given, name), name) for name in VARIABLES)
        if likeness >= _NEARLY:
            raise ValueError(f"{given} is no setting of foreshock; did you mean {nearest}?")


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one.removeprefix(PREFIX), other.removeprefix(PREFIX)).ratio()


def sentences(error: ValidationError) -> list[str]:
    """What is wrong with each setting, by the variable's name and never by its value."""
    found = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        name, *inside = map(str, item["loc"] or ("",))
        where = f"{PREFIX}{name.upper()}" + (f" ({'.'.join(inside)})" if inside else "")
        said = item["msg"].removeprefix("Value error, ")
        found.append(f"{where}: {said}" if name else said)
    return found
