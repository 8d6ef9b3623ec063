"""Version 0.1.0 as it was: its reader, what its agents and its service said to each other, and what it stored."""

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FILES = Path(__file__).parent / "golden" / "0.1.0"


@cache
def reader() -> ModuleType:
    """contract/wire.py of 0.1.0, which refuses whatever it does not know."""
    text = (FILES / "wire.py.txt").read_text("utf-8")
    for name, source in (("slots", (FILES / "slots.py.txt").read_text("utf-8")), ("wire", text)):
        module = ModuleType(f"foreshock_0_1_0_{name}")
        sys.modules[module.__name__] = module  # pydantic looks types up by their module
        own = source.replace("foreshock.contract.slots", "foreshock_0_1_0_slots")
        exec(compile(own, module.__name__, "exec"), module.__dict__)
    return sys.modules["foreshock_0_1_0_wire"]


@cache
def exchanges() -> list[dict[str, Any]]:
    """Each batch that an agent posted, and the status and body of the answer."""
    lines = gzip.decompress((FILES / "exchanges.jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line) for line in lines]


def answers() -> dict[str, Any]:
    """What its service answered, by address."""
    found: dict[str, Any] = json.loads(gzip.decompress((FILES / "answers.json.gz").read_bytes()))
    return found


def store_at(path: Path) -> None:
    """Put the SQLite file that its service left to `path`."""
    path.write_bytes(gzip.decompress((FILES / "store.db.gz").read_bytes()))
