"""Call a function of user code given as `module:factory`, and report its errors as one sentence, not as a traceback."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_LONGEST: Final = 300
"""Longest error message that is quoted, in characters."""


def made_by(path: str, *given: str) -> Any:
    """Call the function `module:factory` with `given` and return its result; modules in the current folder are found.

    Raises ValueError if the module lacks the function, or if the import or the function fails.
    """
    module_name, _, factory_name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with explained(f"the module {module_name} of {path}"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ValueError(f"{path} is not a function: the module {module_name} has no callable {factory_name!r}")
    with explained(f"{path}({', '.join(given)})"):
        return factory(*given)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """In a with block, convert an error of user code to a ValueError that says what failed and at which line."""
    try:
        yield
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        message = " ".join(str(error).split())[:_LONGEST]
        raise ValueError(f"{what} failed with {type(error).__name__}{': ' * bool(message)}{message}{place}") from error


def _is_theirs(file: str) -> bool:
    ours = Path(file).parent == Path(__file__).parent
    return not (ours or file.startswith(("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
