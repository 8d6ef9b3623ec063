"""Rows are packed when they are written, and read back with care.

A row that cannot be read is passed over, counted and named, and hurts no other run. What is acknowledged can be read
(contract/wire.py checks it). What an earlier version stored, or a disk has torn, may not be.
"""

import hashlib
import math
import struct
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from foreshock.contract.slots import OLDEST_SLOT_COUNT, fitted
from foreshock.contract.wire import PER_HEAD, HeadRef, Layer, Sample

log = structlog.get_logger()
M = TypeVar("M", bound=BaseModel)
_LAYERS: TypeAdapter[tuple[Layer, ...]] = TypeAdapter(tuple[Layer, ...])
_REMEMBERED: Final = 10_000

unreadable: Final[dict[tuple[str, object], None]] = {}
"""(what, whose) of each row that could not be read since the process began, at most _REMEMBERED."""


def passed_over(what: str, whose: object, why: object) -> None:
    """Count a row and name it in the log, at its first time."""
    if (what, whose) not in unreadable and len(unreadable) < _REMEMBERED:
        unreadable[what, whose] = None
        log.error("a stored row cannot be read and is passed over", what=what, row=str(whose), why=str(why)[:300])


def read_back(kind: type[M], stored: str, what: str, whose: object) -> M | None:
    """A message as it was stored; None where it cannot be read. `what` and `whose` name the row."""
    try:
        return kind.model_validate_json(stored)
    except ValidationError as error:
        passed_over(what, whose, error.errors(include_url=False, include_input=False)[0]["msg"])
        return None


@lru_cache(maxsize=256)
def layers_of(stored: str) -> tuple[Layer, ...]:
    """The layers of a stored topology; none where it cannot be read."""
    try:
        return _LAYERS.validate_json(stored)
    except ValidationError as error:
        why = error.errors(include_url=False, include_input=False)[0]["msg"]
        passed_over("topology", hashlib.sha256(stored.encode()).hexdigest(), why)
        return ()


@lru_cache(maxsize=256)
def heads_of_layers(stored: str) -> tuple[HeadRef, ...]:
    """The (layer, head) of every row of a boot's arrays, in order."""
    return tuple((layer.layer, head) for layer in layers_of(stored) for head in layer.heads)


SCALARS: Final = ("loss", "loss_max", "grad_norm", "learning_rate", "step_seconds", "agent_seconds")
ARRAYS: Final = ("states", *PER_HEAD)
"""Positions are stored: append, never reorder."""
_DTYPES: Final = ("<i8", "<f8", "<f4", "<i4")

Arrays = dict[str, npt.NDArray[Any]]


def pack_arrays(sample: Sample) -> bytes | None:
    """The arrays of a sample, one after the other: name, dtype and shape in a few bytes, then the raw values."""
    parts: list[bytes] = []
    for position, name in enumerate(ARRAYS):
        array = getattr(sample, name)
        if array is not None:
            shape: tuple[int, ...] = array.shape
            parts.append(struct.pack(f"<BBB{len(shape)}I", position, _DTYPES.index(array.dtype), len(shape), *shape))
            parts.append(array.raw)  # what travels is what is stored: little-endian, in C order
    return b"".join(parts) or None


def unpack_arrays(blob: bytes | None, names: frozenset[str] | None = None) -> Arrays:
    """The named arrays (or all) of a blob written by `pack_arrays`; an absent array is left out."""
    arrays: Arrays = {}
    at, blob = 0, blob or b""
    while at < len(blob):
        position, dtype, ndim = struct.unpack_from("<BBB", blob, at)
        shape = struct.unpack_from(f"<{ndim}I", blob, at + 3)
        at += 3 + 4 * ndim
        count = math.prod(shape)
        if names is None or ARRAYS[position] in names:
            arrays[ARRAYS[position]] = np.frombuffer(blob, _DTYPES[dtype], count, at).reshape(shape)
        at += count * int(_DTYPES[dtype][2])
    return arrays


def head_arrays(row: Any, heads: int, names: frozenset[str] | None = None) -> Arrays:
    """The named arrays (or all) of a stored sample whose boot watches `heads` heads: states [heads, SLOT_COUNT], the
    others [heads]. What has another shape is passed over: which head is which is unknown."""
    found: Arrays = {}
    try:
        stored = unpack_arrays(row.arrays, names)
    except (struct.error, ValueError, IndexError) as error:
        passed_over("sample", row.id, error)
        return found
    for name, values in stored.items():
        if name in PER_HEAD and values.shape == (heads,):
            found[name] = values
        elif name == "states" and values.shape[:1] == (heads,) and values.ndim == 2 and _has_slots(values):
            found[name] = fitted(values)
        else:
            passed_over("sample", row.id, f"{name} is {values.dtype} {values.shape} of a boot with {heads} heads")
    return found


def _has_slots(values: npt.NDArray[Any]) -> bool:
    return values.dtype == np.int64 and values.shape[1] >= OLDEST_SLOT_COUNT


def pack_scalars(sample: Sample) -> dict[str, Any]:
    """The scalar columns of a sample. NaN becomes a bit of `nan_columns`."""
    row: dict[str, Any] = {}
    nan_columns = 0
    for position, name in enumerate(SCALARS):
        value = getattr(sample, name)
        if value is not None and math.isnan(value):
            nan_columns |= 1 << position
            value = None
        row[name] = value
    return {**row, "nan_columns": nan_columns}


def pack_sample(sample: Sample) -> dict[str, Any]:
    """The columns of a sample, without those that say whose it is."""
    return {
        "step": sample.step,
        "since_step": sample.since_step,
        "unix_seconds": sample.unix_seconds,
        "loss_nonfinite_steps": sample.loss_nonfinite_steps,
        "grad_norm_nonfinite_steps": sample.grad_norm_nonfinite_steps,
        "arrays": pack_arrays(sample),
        **pack_scalars(sample),
    }


def unpack_scalars(row: Any) -> dict[str, float | None]:
    """The scalars of a stored row, NaN restored."""
    return {
        name: math.nan if row.nan_columns >> position & 1 else getattr(row, name)
        for position, name in enumerate(SCALARS)
    }
