"""Unsent batches, in memory or on disk: an append-only file of framed, checksummed records that outlives the process.

A record is `FSK1`, payload length, CRC-32 of sequence and payload, sequence, payload; integers are little-endian. A
record is readable once its write returned: it survives SIGKILL, but not a power cut (the file is not synced). A torn
tail is truncated; a damaged record is skipped without losing the records around it. A file that is not a spool, or is
larger than a spool may be, is neither read nor changed.
"""

import hashlib
import json
import logging
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from foreshock.monitor.transport.private_folder import PrivateFolder, refused

logger: Final = logging.getLogger("foreshock")

_MAGIC: Final = b"FSK1"
_HEADER: Final = struct.Struct("<4sIIQ")
_CHUNK: Final = 1 << 16
_SUFFIX: Final = ".spool"
_pwrite: Final = os.pwrite
_LOCK_SECONDS: Final = 2.0
"""How long a process waits for the lock of its own spool, which another starting process may hold for a moment."""


class Record(NamedTuple):
    """Position of one batch in a spool's file."""

    offset: int
    size: int
    """Payload bytes."""
    sequence: int


def frame(sequence: int, payload: bytes) -> bytes:
    """Return one record in the file's format."""
    return _HEADER.pack(_MAGIC, len(payload), _checksum(sequence, payload), sequence) + payload


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(sequence.to_bytes(8, "little")))


class Spool:
    """The unsent batches of one process instance, first in first out. Every method may raise OSError.

    A process locks its file, so that other processes replay only the batches of dead processes. left: the file is a
    dead process's; only records that contain its run and process instance are used.
    """

    def __init__(self, folder: PrivateFolder, run: str, boot: str, max_bytes: int, *, left: bool = False) -> None:
        self.boot: Final = boot
        """The process instance of these batches."""
        self.path: Final = folder.path / f"{_prefix(run)}{boot}{_SUFFIX}"
        self._folder, self._run, self._max_bytes, self._left = folder, run, max_bytes, left
        waits, create = (0.0, 0) if left else (_LOCK_SECONDS, os.O_CREAT)
        self._fd = folder.open_locked(self.path.name, waits, create)
        try:
            self._records = self._recognised()
        except BaseException:
            os.close(self._fd)
            raise
        self._end = self._records[-1].offset + _HEADER.size + self._records[-1].size if self._records else 0
        os.ftruncate(self._fd, self._end)  # a torn tail is cut
        self.highest: int = self._records[-1].sequence if self._records else 0
        """The last sequence ever appended."""

    def _recognised(self) -> deque[Record]:
        if os.fstat(self._fd).st_size > self._most_bytes:
            raise refused(self.path, f"is larger than {self._most_bytes} bytes, twice FORESHOCK_SPOOL_BYTES")
        records = deque(_scan(self._fd))
        begins = _read(self._fd, 0, len(_MAGIC))
        if not records and begins != _MAGIC[: len(begins)]:  # a torn first record is accepted
            raise refused(self.path, "does not contain batches")
        return records

    @property
    def _most_bytes(self) -> int:
        """Limit for events other than samples, which are stored even if samples no longer fit."""
        return 2 * self._max_bytes

    def __len__(self) -> int:
        return len(self._records)

    def append(self, sequence: int, payload: bytes, *, force: bool = False) -> bool:
        """Store a batch; False if it does not fit in `max_bytes` (with `force`: twice that)."""
        record = frame(sequence, payload)
        if self._end + len(record) > (self._most_bytes if force else self._max_bytes):
            return False
        try:
            _write_all(self._fd, record, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._records.append(Record(self._end, len(payload), sequence))
        self._end += len(record)
        self.highest = max(self.highest, sequence)
        return True

    def peek(self) -> tuple[int, bytes] | None:
        """Return the oldest batch, (sequence, payload); None if all are sent.

        A record that was damaged on disk, or belongs to another run, is skipped.
        """
        while self._records:
            record = self._records[0]
            payload = _read(self._fd, record.offset + _HEADER.size, record.size)
            header = _read(self._fd, record.offset, _HEADER.size)
            whole = header + payload == frame(record.sequence, payload) and len(payload) == record.size
            if whole and not (self._left and self._is_foreign(record.sequence, payload)):
                return record.sequence, payload
            self.pop()
        return None

    def _is_foreign(self, sequence: int, payload: bytes) -> bool:
        """Whether a dead process's batch names another run or process: do not send it with this process's token."""
        try:
            batch = json.loads(payload)
            return [batch[key] for key in ("run", "boot", "sequence")] != [self._run, self.boot, sequence]
        except (ValueError, LookupError, TypeError, RecursionError):
            return True

    def pop(self) -> None:
        """Remove the oldest batch after it was delivered or dropped."""
        self._records.popleft()
        if not self._records:
            os.ftruncate(self._fd, 0)
            self._end = 0
        elif self._records[0].offset > self._max_bytes // 2:
            self._compact()

    def _compact(self) -> None:
        start = self._records[0].offset
        position = 0
        while chunk := _read(self._fd, start + position, _CHUNK):
            # the copy ends at the latest where the original begins, so unsent data is not overwritten
            _write_all(self._fd, chunk, position)
            position += len(chunk)
        os.ftruncate(self._fd, position)
        self._records = deque(Record(r.offset - start, r.size, r.sequence) for r in self._records)
        self._end = position

    def close(self) -> None:
        """Unlock the file, and remove it if it is empty."""
        if self._fd < 0:
            return
        if not self._records:
            self._folder.remove(self.path.name)
        os.close(self._fd)
        self._fd = -1


def _prefix(run: str) -> str:
    """Return the prefix of a run's file names: a hash, because a run name from a user must not become a path."""
    return hashlib.sha256(run.encode()).hexdigest()[:32] + "-"


def leftovers(folder: PrivateFolder, run: str, max_bytes: int) -> tuple[list[Spool], int]:
    """Return the spools of this run's dead processes, oldest first, and the number of files removed to stay within
    `max_bytes`."""
    kept: list[Spool] = []
    total = removed = 0
    prefix = _prefix(run)
    for name in reversed([name for name in folder.names() if name.startswith(prefix) and name.endswith(_SUFFIX)]):
        try:
            spool = Spool(folder, run, name.removeprefix(prefix).removesuffix(_SUFFIX), max_bytes, left=True)
        except PermissionError as error:
            logger.warning("foreshock: not sent and not changed: %s", error.strerror)
            continue
        except OSError:
            continue  # a running process has locked it, or it was removed
        total += spool._end
        if len(spool) and total <= max_bytes:
            kept.append(spool)
            continue
        removed += bool(len(spool))
        spool._records.clear()
        spool.close()
    return kept[::-1], removed


def _scan(fd: int) -> Iterator[Record]:
    size, offset = os.fstat(fd).st_size, 0
    while offset + _HEADER.size <= size:
        magic, length, checksum, sequence = _HEADER.unpack(_read(fd, offset, _HEADER.size))
        end = offset + _HEADER.size + length
        if magic == _MAGIC and end <= size:
            payload = _read(fd, offset + _HEADER.size, length)
            if _checksum(sequence, payload) == checksum:
                yield Record(offset, length, sequence)
                offset = end
                continue
        found = _find_magic(fd, offset + 1, size)
        if found is None:
            return
        offset = found


def _find_magic(fd: int, start: int, size: int) -> int | None:
    while start < size:
        chunk = _read(fd, start, _CHUNK)
        if (index := chunk.find(_MAGIC)) >= 0:
            return start + index
        if len(chunk) < _CHUNK:
            return None
        start += len(chunk) - len(_MAGIC) + 1
    return None


def _read(fd: int, offset: int, size: int) -> bytes:
    """Read up to `size` bytes from `offset`; fewer at the end of the file."""
    parts = []
    while size and (part := os.pread(fd, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = _pwrite(fd, view, offset)
        offset += written
        view = view[written:]


class MemoryStore:
    """Batches in memory, if there is no spool."""

    def __init__(self, boot: str, max_bytes: int) -> None:
        self.boot: str = boot
        self.highest: int = 0
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes, *, force: bool = False) -> bool:
        """Store a batch; False if it does not fit in `max_bytes` (with `force`: 1.5 times that)."""
        bound = self._max_bytes * 3 // 2 if force else self._max_bytes
        if self._bytes + len(payload) > bound:
            return False
        self._batches.append((sequence, payload))
        self._bytes += len(payload)
        self.highest = max(self.highest, sequence)
        return True

    def peek(self) -> tuple[int, bytes] | None:
        """Return the oldest batch, (sequence, payload), or None."""
        return self._batches[0] if self._batches else None

    def pop(self) -> None:
        """Remove the oldest batch."""
        self._bytes -= len(self._batches.popleft()[1])


Store = Spool | MemoryStore
"""Batches waiting for their acknowledgement, oldest first."""
