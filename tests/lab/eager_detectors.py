"""Detectors that warn about next to nothing, for runs of 200 steps; processes of their own can import them."""

from typing import ClassVar

from foreshock.monitor.detect.detectors import DetectorConfig


class EagerDetectors(DetectorConfig):
    """Asks for next to no growth."""

    offset_change: ClassVar[float] = 0.01
    settle_steps: ClassVar[int] = 0
