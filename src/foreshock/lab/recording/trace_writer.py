"""Writes a run as it happens, in the format of foreshock.lab.recording.trace."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import READ
from foreshock.lab.recording.whole_file import whole_file
from foreshock.monitor.detect.readings import Readings

_LEFT_OUT: Final = {"risk", "unix_seconds", "step_seconds", "agent_seconds"}
"""Of a sample: a replay makes the risk again, and what a clock shows differs from run to run."""
_DIGITS_OF_A_STEP: Final = 3
"""Of a single step's loss; its gradient norm has one fewer. What is read of them are means and z-scores."""


class TraceWriter:
    """A sink for an agent's events that writes a trace; use it in a with block.

    Samples are written to the bit, with what the detectors read of them. Give `steps` the loss and gradient norm of
    every step, which only harm and the baselines read: they are rounded.
    """

    def __init__(self, path: Path, header: dict[str, Any], earlier: Iterable[dict[str, Any]] = ()) -> None:
        """`earlier`: lines of an older trace of the same run, whose place this file takes once they are written."""
        with whole_file(path) as part:
            self._file = gzip.GzipFile(part, "wb", compresslevel=9, mtime=0)
            self._write({"foreshock_trace": 1, **header})
            for line in earlier:
                self._write(line)
            self._file.flush()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __call__(self, event: wire.Event, readings: Readings | None = None) -> None:
        """Write one event; `readings` are what the detectors read of a sample."""
        if isinstance(event, wire.AgentHealth):
            return
        left_out = _LEFT_OUT if isinstance(event, wire.Sample) else None
        line = event.model_dump(mode="json", exclude_defaults=True, exclude=left_out) | {"kind": event.kind}
        if readings is not None and readings.step == event.step:
            line["read"] = {name: getattr(readings, name) for name in READ}
        self._write(line)

    def steps(self, since_step: int, loss: Sequence[float] | Floats, grad_norm: Sequence[float] | Floats) -> None:
        """The loss and the gradient norm before clipping of steps since_step + 1, since_step + 2, ...

        What was written until then outlives this process.
        """
        numbers = {"loss": _rounded(loss, _DIGITS_OF_A_STEP), "grad_norm": _rounded(grad_norm, _DIGITS_OF_A_STEP - 1)}
        self._write({"kind": "steps", "since_step": since_step, **numbers})
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def lines_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The lines of a trace up to a step, without its header and its end; of a torn one those that are whole."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            next(file, None)
            for line in map(json.loads, file):
                if line["kind"] == "steps" and (count := step - line["since_step"]) > 0:
                    yield line | {name: line[name][:count] for name in ("loss", "grad_norm")}
                elif line["kind"] not in ("steps", "finished") and line["step"] <= step:
                    yield line
    except (EOFError, json.JSONDecodeError):
        return


def _rounded(values: Sequence[float] | npt.NDArray[Any], digits: int) -> list[float | str]:
    """Numbers for JSON, with `digits` significant digits; a non-finite one by its name, as on the wire."""
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    texts = (f"{value:.{digits}g}" for value in np.asarray(values, dtype=np.float64).reshape(-1).tolist())
    return [names[text] if text in names else float(text) for text in texts]
