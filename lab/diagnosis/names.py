"""The first of many names in a sentence."""

from collections.abc import Iterable
from typing import Final

SHOWN: Final = 3


def some(names: Iterable[str]) -> str:
    """The first three, and how many more there are."""
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + and_more(len(shown))


def and_more(count: int) -> str:
    """What follows the first three of so many."""
    return f" and {count - SHOWN} more" if count > SHOWN else ""
