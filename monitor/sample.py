"""A sample as the training thread leaves it: raw arrays. The message is built from them where there is time."""

import base64
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.monitor.collector import Counted, Floats, largest, mean, nonfinite


@dataclass(frozen=True, slots=True)
class SampleDraft:
    """What one sample will say. `risk` is float64 [N]; None where the detectors are off."""

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
            risk=_array(None if self.risk is None else self.risk.astype(np.float32)),
            query_norm=_array(counted.norms.get("query_norm")),
            key_norm=_array(counted.norms.get("key_norm")),
            query_key_norm=_array(counted.norms.get("query_key_norm")),
        )


def _array(values: npt.NDArray[Any] | None) -> wire.Array | None:
    if values is None:
        return None
    # as wire.Array.of, without decoding again what was just encoded: these bytes are our own
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    dtype: Any = little.dtype.str
    return wire.Array.model_construct(dtype=dtype, shape=values.shape, data=base64.b64encode(little.data).decode())
