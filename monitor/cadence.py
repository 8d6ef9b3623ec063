"""When a step is sampled, and when the norms of the weights ride on a sample."""

import time
from typing import Final

from foreshock.monitor.config import AgentConfig


class Cadence:
    """Counts steps and seconds since the last sample. The agent tells it of every step, sample and measurement."""

    def __init__(self, config: AgentConfig) -> None:
        self._config: Final = config
        self.step = 0
        """The last optimizer step that is done."""
        self._sampled = False
        self._last_sample_at = self._last_step_at = time.monotonic()
        self._steps, self._seconds = 0, 0.0
        self._agent_seconds = 0.0
        self._norms_at: int | None = None
        self.watch_until = -1
        """Up to this step every step is sampled, since a warning is fresh."""

    def step_done(self) -> None:
        """An optimizer step has ended."""
        now = time.monotonic()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - self._last_step_at
        self._last_step_at = now

    def agent_took(self, seconds: float) -> None:
        """What the agent itself took of a step."""
        self._agent_seconds += seconds

    def watch_closely(self, step: int) -> None:
        """A warning was raised at `step`."""
        self.watch_until = step + self._config.close_watch_steps

    def due(self, step: int, since_step: int, *, crowded: bool) -> bool:
        """Whether `step` is sampled; since_step: the last one that was. crowded: what is counted must be taken now."""
        since = step - since_step
        if not self._sampled or step <= self.watch_until or crowded:
            return since > 0
        return since > 0 and step % self._stride(since) == 0

    def _stride(self, since: int) -> int:
        """Samples are due at multiples of it: sample_every_steps, doubled until they take sample_every_seconds.

        Ranks make their steps together, so each comes to the same number or to another's double: the service finds the
        samples of all ranks at the same steps, without a word between them.
        """
        step_seconds = (time.monotonic() - self._last_sample_at) / since
        stride = self._config.sample_every_steps
        while 0 < stride * step_seconds < self._config.sample_every_seconds:
            stride *= 2
        return stride

    def norms_due(self, step: int) -> bool:
        """Whether a sample of `step` carries norms."""
        every = self._config.norms_every_steps
        if not every or self._norms_at is None:
            return bool(every)
        return step - self._norms_at >= every

    def norms_measured(self, step: int) -> None:
        """The norms were measured."""
        self._norms_at = step

    def seconds_per_step(self) -> tuple[float, float]:
        """Mean wall time of a step since the last sample, and the agent's share of it."""
        steps = max(self._steps, 1)
        return self._seconds / steps, self._agent_seconds / steps

    def sampled(self) -> None:
        """A sample was taken."""
        self._sampled = True
        self._last_sample_at = time.monotonic()
        self._steps, self._seconds, self._agent_seconds = 0, 0.0, 0.0
