"""What the agent needs of its detectors."""

from typing import Any, Protocol

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import Readings


class Detecting(Protocol):
    """`Detectors` is one."""

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """What one merged sample says: verdicts raised, updated or cleared."""

    @property
    def risk(self) -> Floats:
        """How near a warning each head is, [N] in [0, 1]."""

    @property
    def pressure(self) -> Floats:
        """How near a warning each signal of each head is, [len(SIGNALS), N], 0 or more; at 1 it warns."""

    @property
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state."""
