"""Where batches wait for their acknowledgement: a spool is one such store, memory another."""

from collections import deque
from typing import Protocol


class Store(Protocol):
    """Batches waiting for their acknowledgement, oldest first."""

    @property
    def boot(self) -> str: ...
    @property
    def highest(self) -> int: ...
    def __len__(self) -> int: ...
    def append(self, sequence: int, payload: bytes, *, force: bool = False) -> bool: ...
    def peek(self) -> tuple[int, bytes] | None: ...
    def pop(self) -> None: ...


class MemoryStore:
    """Batches in memory, where there is no spool."""

    def __init__(self, boot: str, max_bytes: int) -> None:
        self.boot: str = boot
        self.highest: int = 0
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes, *, force: bool = False) -> bool:
        """Keep a batch; False when it does not fit (`force` allows half as much again)."""
        bound = self._max_bytes * 3 // 2 if force else self._max_bytes
        if self._bytes + len(payload) > bound:
            return False
        self._batches.append((sequence, payload))
        self._bytes += len(payload)
        self.highest = max(self.highest, sequence)
        return True

    def peek(self) -> tuple[int, bytes] | None:
        """The oldest batch, (sequence, payload)."""
        return self._batches[0] if self._batches else None

    def pop(self) -> None:
        """Forget the oldest batch."""
        self._bytes -= len(self._batches.popleft()[1])
