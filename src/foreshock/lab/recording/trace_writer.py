"""Write a run while it trains, in the format of foreshock.lab.recording.trace."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import READ
from foreshock.monitor.detect.readings import Readings

_LEFT_OUT: Final = {"risk", "unix_seconds", "step_seconds", "agent_seconds"}
"""Fields of a sample that are not written: a replay computes the risk again, and times differ between equal runs."""
_DIGITS_OF_A_STEP: Final = 3
"""Significant digits of a step's loss; its gradient norm has one fewer. Only means and z-scores use these values."""


class TraceWriter:
    """Writes an agent's events to a trace; use it in a with block.

    Samples are written without rounding, with all values that the detectors read. Pass the loss and gradient norm of
    every step to `steps`: these are rounded, because only the definition of harm and the baselines read them.
    """

    def __init__(self, path: Path, header: dict[str, Any], kept_bytes: int = 0) -> None:
        """kept_bytes: the `size` to which an earlier trace of this run at `path` is truncated before it continues.

        Raises ValueError if the earlier trace is shorter.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if (size := file.tell()) < kept_bytes:
                raise ValueError(
                    f"{path} has {size:,} bytes, fewer than the {kept_bytes:,} that the checkpoint continues from; put "
                    "the trace of this run back, or start a new run in another folder"
                )
            file.truncate(kept_bytes)
        self._path = path
        self._file = self._part()
        if not kept_bytes:
            self._write({"foreshock_trace": 1, **header})

    def _part(self) -> gzip.GzipFile:
        return gzip.GzipFile(self._path, "ab", compresslevel=9, mtime=0)

    def size(self) -> int:
        """End the current gzip member, and return the size of the file with everything written so far."""
        self._file.close()
        self._file = self._part()
        return self._path.stat().st_size

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __call__(self, event: wire.Event, readings: Readings | None = None) -> None:
        """Write one event, and for a sample the values that the detectors read."""
        if isinstance(event, wire.AgentHealth):
            return
        left_out = _LEFT_OUT if isinstance(event, wire.Sample) else None
        line = event.model_dump(mode="json", exclude_defaults=True, exclude=left_out) | {"kind": event.kind}
        if readings is not None and readings.step == event.step:
            line["read"] = {name: getattr(readings, name) for name in READ}
        self._write(line)

    def steps(self, since_step: int, loss: Sequence[float] | Floats, grad_norm: Sequence[float] | Floats) -> None:
        """Write the loss and the gradient norm before clipping of steps since_step + 1, since_step + 2, ...

        Flushes, so that the lines written so far survive a crash of this process.
        """
        numbers = {"loss": _rounded(loss, _DIGITS_OF_A_STEP), "grad_norm": _rounded(grad_norm, _DIGITS_OF_A_STEP - 1)}
        self._write({"kind": "steps", "since_step": since_step, **numbers})
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _rounded(values: Sequence[float] | npt.NDArray[Any], digits: int) -> list[float | str]:
    """Round numbers for JSON to `digits` significant digits; NaN and infinities become names, as in the wire format."""
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    texts = (f"{value:.{digits}g}" for value in np.asarray(values, dtype=np.float64).reshape(-1).tolist())
    return [names[text] if text in names else float(text) for text in texts]
