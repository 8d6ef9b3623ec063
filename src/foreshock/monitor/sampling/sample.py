"""Samples as the training thread leaves them: raw arrays, built into messages elsewhere."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.sampling.collector import Counted, largest, mean, nonfinite


@dataclass(frozen=True, slots=True)
class SampleDraft:
    """What one sample will hold. `risk` is float64 [N]; None where the detectors are off."""

    counted: Counted
    risk: Floats | None
    unix_seconds: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays as they will travel."""
        raw = self.counted.words.nbytes + self.counted.modes.nbytes
        raw += sum(values.nbytes for values in self.counted.norms.values())
        raw += 0 if self.risk is None else self.risk.nbytes // 2  # travels as float32
        return raw * 4 // 3

    def build(self) -> wire.Sample:
        """The message."""
        counted = self.counted
        return wire.Sample(
            step=counted.step,
            since_step=counted.since_step,
            unix_seconds=self.unix_seconds,
            states=_array(counted.words),
            modes=_array(counted.modes),
            loss=mean(counted.losses),
            loss_max=largest(counted.losses),
            loss_nonfinite_steps=nonfinite(counted.losses),
            grad_norm=largest(counted.grad_norms),
            grad_norm_nonfinite_steps=nonfinite(counted.grad_norms),
            learning_rate=counted.learning_rate,
            step_seconds=counted.step_seconds,
            agent_seconds=counted.agent_seconds,
            risk=_single(self.risk),
            query_norm=_array(counted.norms.get("query_norm")),
            key_norm=_array(counted.norms.get("key_norm")),
            query_key_norm=_array(counted.norms.get("query_key_norm")),
            clip_factor=_single(counted.norms.get("clip_factor")),
            clipped_steps=_single(counted.norms.get("clipped_steps")),
        )


def _array(values: npt.NDArray[Any] | None) -> wire.Array | None:
    return None if values is None else _encoded(values)


def _single(values: npt.NDArray[Any] | None) -> wire.Array | None:
    return None if values is None else _encoded(values.astype(np.float32))


def _encoded(values: npt.NDArray[Any]) -> wire.Array:
    """As wire.Array.of, without decoding again what was just encoded: these bytes are our own."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    dtype: Any = little.dtype.str
    return wire.Array.model_construct(dtype=dtype, shape=values.shape, data=pybase64.b64encode_as_string(little.data))
