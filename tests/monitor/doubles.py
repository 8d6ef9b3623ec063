"""Test doubles: detectors that return scripted verdicts, and a listener that records the agent's events."""

from typing import Any

import numpy as np

from foreshock.contract import wire
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.readings import Readings


class ScriptedDetectors(Detectors):
    """Returns the given verdicts at the given steps and records all readings."""

    def __init__(self, heads: int, script: dict[int, list[wire.Verdict]] | None = None) -> None:
        self.readings: list[Readings] = []
        self._heads = heads
        self._script = dict(script or {})
        self.standing: list[wire.Verdict] = []
        self.undecided_until = -1
        """The last step at which `undecided` is true."""

    def update(self, readings: Readings) -> list[wire.Verdict]:
        self.readings.append(readings)
        due = [step for step in self._script if step <= readings.step]
        return [verdict for step in sorted(due) for verdict in self._script.pop(step)]

    @property
    def active(self) -> list[wire.Verdict]:
        return self.standing

    @property
    def undecided(self) -> bool:
        return bool(self.readings) and self.readings[-1].step <= self.undecided_until

    @property
    def risk(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.zeros(self._heads)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.readings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def verdict(layer: int | None, head: int | None, **changes: Any) -> wire.Verdict:
    """A warning about one head."""
    fields: dict[str, Any] = {
        "id": f"verdict-{layer}-{head}",
        "step": 1,
        "state": "raised",
        "severity": "warning",
        "layer": layer,
        "head": head,
        "cause": "rounding",
        "signal": "offset",
        "sentence": f"layer {layer} head {head} drifts",
    }
    return wire.Verdict(**{**fields, **changes})


class Listener:
    """Records all events in order."""

    def __init__(self) -> None:
        self.events: list[wire.Event] = []

    def __call__(self, event: wire.Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
