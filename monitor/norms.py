"""Spectral norms of every head, one measurement at a time, in the order of the sample's heads."""

from collections.abc import Sequence

from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.monitor.layers import Projection


class SpectralNorms:
    def __init__(self, layers: Sequence[Layer], projections: Sequence[Projection | None]) -> None:
        pass

    def measure(self) -> dict[str, Tensor]:
        return {}
