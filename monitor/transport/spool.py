"""Unsent batches on disk: an append-only file of framed, checksummed records that outlives the process.

A record is `FSK1`, payload length, CRC-32 of sequence and payload, sequence, payload; integers little-endian. A record
is readable once its write returned: it survives SIGKILL, not a power cut (nothing is synced). A torn tail is cut, a
damaged record is skipped, whatever stands before and after it is kept.
"""

import errno
import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

_MAGIC: Final = b"FSK1"
_HEADER: Final = struct.Struct("<4sIIQ")
_CHUNK: Final = 1 << 16
_pwrite: Final = os.pwrite
_LOCK_SECONDS: Final = 2.0
"""How long a boot waits for its own spool, which a process that starts at the same moment may be looking into."""


class Record(NamedTuple):
    """Where one batch lies in a spool's file."""

    offset: int
    size: int
    """Payload bytes."""
    sequence: int


def frame(sequence: int, payload: bytes) -> bytes:
    """One record as it stands in the file."""
    return _HEADER.pack(_MAGIC, len(payload), _checksum(sequence, payload), sequence) + payload


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(sequence.to_bytes(8, "little")))


class Spool:
    """The unsent batches of one boot, first in first out. Every method may raise OSError.

    The file is locked while a process holds it, so that only the batches of dead processes are replayed by others.
    """

    def __init__(self, path: Path, max_bytes: int, *, of_a_dead_boot: bool = False) -> None:
        self.path: Final = path
        self._max_bytes = max_bytes
        self._fd = _open_locked(path, 0.0, 0) if of_a_dead_boot else _open_locked(path, _LOCK_SECONDS, os.O_CREAT)
        self._records = deque(_scan(self._fd))
        self._end = self._records[-1].offset + _HEADER.size + self._records[-1].size if self._records else 0
        os.ftruncate(self._fd, self._end)  # a torn tail is cut
        self.highest: int = self._records[-1].sequence if self._records else 0
        """The last sequence ever appended."""

    @property
    def boot(self) -> str:
        """The boot whose batches these are."""
        return self.path.stem

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def __len__(self) -> int:
        return len(self._records)

    def append(self, sequence: int, payload: bytes, *, force: bool = False) -> bool:
        """Keep a batch; False when it does not fit in `max_bytes` (`force` adds it all the same)."""
        record = frame(sequence, payload)
        if not force and self._end + len(record) > self._max_bytes:
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
        """The oldest batch, (sequence, payload); None when all are sent. A record that decayed on disk is skipped."""
        while self._records:
            record = self._records[0]
            payload = _read(self._fd, record.offset + _HEADER.size, record.size)
            header = _read(self._fd, record.offset, _HEADER.size)
            if header + payload == frame(record.sequence, payload) and len(payload) == record.size:
                return record.sequence, payload
            self.pop()
        return None

    def pop(self) -> None:
        """Forget the oldest batch, which is stored elsewhere now."""
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
            # the copy ends where the original begins at the latest: nothing unsent is overwritten
            _write_all(self._fd, chunk, position)
            position += len(chunk)
        os.ftruncate(self._fd, position)
        self._records = deque(Record(r.offset - start, r.size, r.sequence) for r in self._records)
        self._end = position

    def close(self) -> None:
        """Unlock; an empty file is removed."""
        if self._fd < 0:
            return
        if not self._records:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spool_path(directory: Path, run: str, boot: str) -> Path:
    """Where a boot of a run keeps its batches; made with its directory, for this user alone."""
    folder = _folder(directory, run)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{boot}.spool"


def leftovers(directory: Path, run: str, max_bytes: int) -> tuple[list[Spool], int]:
    """Spools of dead boots of this run, oldest first, and how many files were removed to stay within `max_bytes`."""
    kept: list[Spool] = []
    total = removed = 0
    for path in sorted(_folder(directory, run).glob("*.spool"), reverse=True):
        try:
            spool = Spool(path, max_bytes, of_a_dead_boot=True)
        except OSError:
            continue  # a living process holds it, or it is gone
        total += spool.size_bytes
        if len(spool) and total <= max_bytes:
            kept.append(spool)
            continue
        removed += bool(len(spool))
        path.unlink(missing_ok=True)
        spool._records.clear()
        spool.close()
    return kept[::-1], removed


def _folder(directory: Path, run: str) -> Path:
    return directory / hashlib.sha256(run.encode()).hexdigest()[:32]  # a name that people give never becomes a path


def _open_locked(path: Path, seconds: float, create: int) -> int:
    """Open and lock the file at this path, trying for `seconds`; between the two another process may remove it."""
    deadline = time.monotonic() + seconds
    while True:
        fd = os.open(path, os.O_RDWR | create | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
            raise FileNotFoundError(errno.ENOENT, "another process removed it", str(path))
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            if time.monotonic() >= deadline:
                raise
        except OSError:
            os.close(fd)
            raise
        time.sleep(0.005)


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
    """Up to `size` bytes from `offset`; fewer at the end of the file."""
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
