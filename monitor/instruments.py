"""What stands in a watched model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.attention.keep_attention import Keeper
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE
from foreshock.monitor.detect.readings import Readings
from foreshock.monitor.detect.signals import HeadSignal
from foreshock.monitor.detect.thresholds import DetectorConfig
from foreshock.monitor.model.layers import Projection
from foreshock.monitor.sampling import collector as collecting
from foreshock.monitor.sampling.collector import Counted
from foreshock.monitor.sampling.thinning import DRIFTING, NEAR, Thinning


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What `attach` put into the model. `state` int64 [N, SLOT_COUNT] and `modes` int32 [N] lie on its device."""

    state: Tensor
    modes: Tensor
    layers: tuple[wire.Layer, ...]
    watched: tuple[nn.Module, ...]
    projections: tuple[Projection | None, ...]
    report: str
    keeper: Keeper | None = None
    """Who serves each layer; None in tests without a model."""
    thinning: Thinning | None = None
    """Of how many rows each layer counts what costs; None where that is all of them always."""
    unwatched: int = 0
    """Attention modules that were found and cannot be watched."""

    def readings(self, counted: Counted) -> Readings:
        """What was counted, as the detectors read it."""
        layers = (getattr(module, LAYER_ATTRIBUTE, None) for module in self.watched)
        return Readings.from_words(
            step=counted.step,
            since_step=counted.since_step,
            words=counted.words,
            modes=counted.modes,
            loss=collecting.mean(counted.losses),
            grad_norm=collecting.largest(counted.grad_norms),
            suspect_step=counted.suspect_step,
            learning_rate=counted.learning_rate,
            rounds=any(layer.rounds for layer in layers if layer is not None),
            **{name: values.astype(np.float64) for name, values in counted.norms.items()},
        )


def thinning_of(cadence: Tensor, heads: Sequence[int], every_blocks: int, config: DetectorConfig) -> Thinning:
    """The thinning that goes with these detectors: it holds on for as long as they take to believe what they see."""
    hold = config.persist_blocks * config.block_steps
    return Thinning(cadence, heads, every_blocks=every_blocks, hold_steps=hold, young_steps=config.settle_steps)


def near_a_warning(risk: Floats, pressure: Floats) -> npt.NDArray[np.bool_]:
    """Whether each head is, [N], by what the detectors tell: `risk` [N] and `pressure` [len(SIGNALS), N]."""
    near: npt.NDArray[np.bool_] = (risk >= NEAR) | (pressure[HeadSignal.OFFSET] >= DRIFTING)
    return near
