"""The service: it stores what agents send, shows it, and warns."""

from typing import Final

WITH_PARENT: Final = "--with-parent"
"""The argument with which the service ends when its standard input does."""
