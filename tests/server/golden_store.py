"""Files of an earlier build: a store, the responses of its service, and the saved state of an agent."""

import gzip
import json
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "golden" / "store"


def responses() -> dict[str, Any]:
    """The responses of its service, by path and query."""
    found: dict[str, Any] = json.loads(gzip.decompress((FILES / "answers.json.gz").read_bytes()))
    return found


def store_at(path: Path) -> None:
    """Write the SQLite file of its service, which has schema 0021, to `path`."""
    path.write_bytes(gzip.decompress((FILES / "store.db.gz").read_bytes()))
