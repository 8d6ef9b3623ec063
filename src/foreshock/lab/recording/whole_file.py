"""A file is whole or not there: what is stopped half-way takes no older file's place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` at the end of the block, unless that raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    yield part
    part.replace(path)
