"""Checks of the FORESHOCK_ variables of this process, with suggestions for misspelt names.

Error messages never contain a value, because it may be a secret.
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
"""Similarity (at most 1) from which a name counts as a misspelling: of FORESHOK_URL, but not of AFTERSHOCK_URL."""


REMOVED: Final = {
    "FORESHOCK_CONNECTIONS": "the number of open files of the process limits connections",
    "FORESHOCK_LAYERS": "first_layer takes the number of the first attention layer in each module",
    "FORESHOCK_LOG_LEVEL": "the service logs from the level info on",
    "FORESHOCK_QK_CLIP_EVERY_STEPS": "QK-Clip computes all scores of native attention in one step of ten",
    "FORESHOCK_RUN_BATCHES_PER_SECOND": "a token may send 1,000 batches a second for each run",
    "FORESHOCK_SAMPLE_EVERY_SECONDS": "set sample_every_steps, which is then followed exactly",
}
"""Settings of earlier builds, with advice for their users; otherwise nothing would report that they have no effect."""


def why_removed(setting: str) -> str | None:
    """Return the advice about a setting of an earlier build, given without its prefix; None for any other name."""
    return REMOVED.get(PREFIX + setting.upper())


def refuse_misspelt(environment: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a removed setting, and for an unknown variable whose name is similar to a known one.

    Case and underscores do not matter. Other unknown variables are allowed: Kubernetes sets FORESHOCK_SERVICE_HOST and
    others for a service of this name.
    """
    environment = os.environ if environment is None else environment
    for given in sorted(set(environment) - set(VARIABLES)):
        if why := REMOVED.get(given.upper()):
            if environment[given]:  # the agent ignores an empty variable
                raise ValueError(f"{given} is no longer a setting: {why}")
            continue
        if meant := _meant_by(_letters(given)):
            raise ValueError(f"{given} is not a setting of foreshock; did you mean {meant}?")


@functools.cache
def _meant_by(letters: str) -> str | None:
    """Return the variable that these letters are a misspelling of."""
    names = {_letters(name): name for name in VARIABLES}
    nearest = get_close_matches(letters, names, n=1, cutoff=_NEARLY)
    if not nearest:
        return None
    longer = [name for key, name in names.items() if key.startswith(letters)]  # FORESHOCK_RETENTION is cut off
    return longer[0] if len(longer) == 1 else names[nearest[0]]


def _letters(name: str) -> str:
    return name.upper().replace("_", "")


def names_a_host(url: str) -> bool:
    """Whether `url` is an http or https address with a host."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host)


def as_header_carries(token: str) -> str:
    """Return the token without blanks at its ends. Raises ValueError if a header cannot carry it."""
    bare = token.strip()
    if not (bare and bare.isascii() and bare.isprintable()):
        raise ValueError("a token must be printable ASCII on one line, to fit into a header; use another one")
    return bare


def token_in(file: Path) -> SecretStr:
    """Read a token from a file. Raises ValueError if the file cannot be read or is empty."""
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file {file} cannot be read: {type(error).__name__}") from None
    if not found:
        raise ValueError(f"token_file {file} is empty; it must contain the token")
    return SecretStr(as_header_carries(found))


_FORMS: Final = {
    "tuple_type": 'use a JSON list such as ["a", "b"]',
    "model_type": "use a JSON object",
    "too_short": "use at least one entry",
}
"""Instructions for errors whose usual messages name types of Python."""


def sentences(error: ValidationError) -> list[str]:
    """Return a sentence for each invalid setting, with the variable's name but never its value."""
    found = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        name, *inside = map(str, item["loc"] or ("",))
        where = f"{PREFIX}{name.upper()}" + (f" ({'.'.join(inside)})" if inside else "")
        problem = _FORMS.get(item["type"], item["msg"].removeprefix("Value error, "))
        found.append(f"{where}: {problem}" if name else problem)
    return found


def meant(given: str, names: Iterable[str]) -> str:
    """Return the clause `did you mean NAME? ` for an error message; empty if no name is similar."""
    near = get_close_matches(given[:64].lower(), names, n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}? " if near else ""
