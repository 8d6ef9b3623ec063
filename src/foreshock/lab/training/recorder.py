"""Hands a run to a trace while it trains."""

from typing import TYPE_CHECKING

from foreshock.lab.recording.trace_writer import TraceWriter

if TYPE_CHECKING:
    from foreshock.lab.training.run import Training

HISTORY_STEPS = 100
"""Steps whose loss and gradient norm wait on the device."""


class Recorder:
    """Hands a run to a trace: the agent's events, and loss and gradient norm of every step."""

    def __init__(self, training: "Training", writer: TraceWriter) -> None:
        self._training, self._writer = training, writer
        self._since = training.step
        training.agent.subscribe(lambda event: writer(event, training.agent.readings))

    def step(self) -> None:
        """Call it after every step."""
        if self._training.step - self._since == HISTORY_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait."""
        training, count = self._training, self._training.step - self._since
        if count:
            losses, norms = training.history(count)
            self._writer.steps(self._since, losses, norms)
            self._since = training.step
