"""Turns at something scarce, shared by caller: whoever asks for much waits for it, and nobody else does."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BusyError(Exception):
    """This caller already has as many requests waiting as it may."""


class LeftError(Exception):
    """The caller left before its turn came."""


class Turns:
    """`at_once` turns are taken together; of each caller up to `waiting` requests wait. Callers take turns."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free, self._most = at_once, waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests by caller, none of them empty; the caller whose turn comes next is the first."""

    @asynccontextmanager
    async def turn(self, caller: str, leaves: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """Wait for a turn of this caller, which gives up its place when `leaves` is done.

        Raises BusyError when too many requests of the caller wait, LeftError when it left.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller, leaves)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, leaves: asyncio.Future[None] | None) -> None:
        if len(self._waiting.get(caller, ())) >= self._most:
            raise BusyError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await asyncio.wait({turn, leaves} if leaves else {turn}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave(caller, turn)
            raise
        if not turn.done():
            self._leave(caller, turn)
            raise LeftError

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        if turn.done():  # it came just as the caller left
            self._pass_on()
            return
        own = self._waiting[caller]
        own.remove(turn)
        if not own:
            del self._waiting[caller]

    def _pass_on(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        caller = next(iter(self._waiting))
        own = self._waiting.pop(caller)
        own.popleft().set_result(None)
        if own:
            self._waiting[caller] = own  # behind the others
