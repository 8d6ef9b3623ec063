"""The same batches given to a new service in some order, and what is then to be seen of the run."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from foreshock.contract.wire import Batch


def seen_after(
    player: Any,
    batches: list[Batch],
    look: Callable[[Any], Awaitable[dict[str, Any]]],
    at_once: int = 1,
    beside: Callable[[Batch, float], dict[str, Any]] = lambda batch, began: {},
) -> dict[str, Any]:
    """What `look` finds in a service on a new store that took the batches in their order, `at_once` at a time.

    beside: what is told beside a batch, given when the story began on the monotonic clock.
    """
    seen: dict[str, Any] = {}

    async def story(service: Any) -> None:
        began = time.monotonic()
        for i in range(0, len(batches), at_once):
            sent = (service.post(batch, **beside(batch, began)) for batch in batches[i : i + at_once])
            answers = await asyncio.gather(*sent)
            assert {answer.status_code for answer in answers} == {200}
        seen.update(await look(service))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(player(f"sqlite:///{Path(folder) / 'foreshock.db'}", story))
    return seen
