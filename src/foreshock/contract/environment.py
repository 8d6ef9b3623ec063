"""What is wrong with the FORESHOCK_ variables of this process, and what a misspelt name was meant to be.

The sentences hold no value: it may be a secret.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import httpx
from pydantic import SecretStr, ValidationError

from foreshock.contract.variables import VARIABLES

PREFIX: Final = "FORESHOCK_"
_NEARLY: Final = 0.85
"""How alike two names are, of 1, when one is taken for a slip of the other: FORESHOK_URL, not AFTERSHOCK_URL."""


REMOVED: Final = {
    "FORESHOCK_LAYERS": "first_layer takes the number of the first attention layer in each module",
    "FORESHOCK_LOG_LEVEL": "the service logs from the level info on",
    "FORESHOCK_QK_CLIP_EVERY_STEPS": "QK-Clip computes all scores of native attention in one step of ten",
    "FORESHOCK_RUN_BATCHES_PER_SECOND": "a token may send 1,000 batches a second for each run",
    "FORESHOCK_SAMPLE_EVERY_SECONDS": "set sample_every_steps, which is then followed exactly",
}
"""Settings of earlier builds, and what a user of one should know: nothing else would report that it has no effect."""


def refuse_misspelt(environment: Mapping[str, str] | None = None) -> None:
    """Raises ValueError for a variable that nothing reads, and that was a setting once or is nearly one.

    Case and underscores do not count. Others are left alone: a cluster sets FORESHOCK_SERVICE_HOST and the like for a
    service of this name.
    """
    for given in sorted(set(os.environ if environment is None else environment) - set(VARIABLES)):
        if why := REMOVED.get(given.upper()):
            raise ValueError(f"{given} is no longer a setting: {why}")
        if meant := _meant_by(_letters(given)):
            raise ValueError(f"{given} is no setting of foreshock; did you mean {meant}?")


@functools.cache
def _meant_by(letters: str) -> str | None:
    """The variable of which these letters are a slip."""
    names = {_letters(name): name for name in VARIABLES}
    nearest = get_close_matches(letters, names, n=1, cutoff=_NEARLY)
    return names[nearest[0]] if nearest else None


def _letters(name: str) -> str:
    return name.upper().replace("_", "")


def names_a_host(url: str) -> bool:
    """Whether it is an address of http or https with the name of a machine in it."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host)


def as_header_carries(token: str) -> str:
    """The token without blanks at its ends, where a secret often has a line break. Raises ValueError without it."""
    bare = token.strip()
    if not (bare and bare.isascii() and bare.isprintable()):
        raise ValueError("a token must be printable ASCII on one line, for a header to carry it; give another one")
    return bare


def token_in(file: Path) -> SecretStr:
    """The token that a file holds. Raises ValueError for a file that cannot be read or holds none."""
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file {file} cannot be read: {type(error).__name__}") from None
    if not found:
        raise ValueError(f"token_file {file} is empty; it must hold the token")
    return SecretStr(as_header_carries(found))


def sentences(error: ValidationError) -> list[str]:
    """What is wrong with each setting, by the variable's name and never by its value."""
    found = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        name, *inside = map(str, item["loc"] or ("",))
        where = f"{PREFIX}{name.upper()}" + (f" ({'.'.join(inside)})" if inside else "")
        problem = item["msg"].removeprefix("Value error, ")
        found.append(f"{where}: {problem}" if name else problem)
    return found


def meant(given: str, names: Iterable[str]) -> str:
    """The clause `did you mean NAME? ` for an error's sentence; empty where no name is near."""
    near = get_close_matches(given[:64].lower(), names, n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}? " if near else ""
