"""The service: it stores the batches of agents, shows runs, and sends notifications."""

from typing import Final

WITH_PARENT: Final = "--with-parent"
"""Command-line argument: end the service when its standard input is closed."""
