"""Waiting between two rounds of a background task, cut short when the service goes down."""

import asyncio
from contextlib import suppress


async def pause(closing: asyncio.Event, seconds: float) -> None:
    """Wait `seconds`, or until `closing` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await closing.wait()
