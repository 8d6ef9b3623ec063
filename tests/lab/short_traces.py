"""Recorded runs, and short traces written by tests."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.contract import wire

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"
FAILS = TRACES / "key-bias_fa2_batch32.trace.xz"


def write(path: Path, lines: list[Any]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def sample(step: int, since: int, words: "np.ndarray[Any, np.dtype[np.int64]]") -> wire.Sample:
    return wire.Sample(step=step, since_step=since, unix_seconds=1.0, states=wire.Array.of(words), loss=float("inf"))


def started(heads: int) -> wire.Started:
    layer = wire.Layer(layer=3, name="h.3", heads=tuple(range(heads)), kv_heads=1, head_dim=8, served_by="reference")
    return wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel")
