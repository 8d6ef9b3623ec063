"""What a service and an agent left behind: a store, what was answered of it, and a saved state."""

import gzip
import json
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "golden" / "store"


def answers() -> dict[str, Any]:
    """What its service answered, by address."""
    found: dict[str, Any] = json.loads(gzip.decompress((FILES / "answers.json.gz").read_bytes()))
    return found


def store_at(path: Path) -> None:
    """Put the SQLite file that its service left to `path`; its schema is 0021."""
    path.write_bytes(gzip.decompress((FILES / "store.db.gz").read_bytes()))
