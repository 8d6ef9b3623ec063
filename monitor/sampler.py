"""Takes the samples of one agent: what was counted, the numbers of its steps, and now and then the weights' norms."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.cadence import Cadence
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard
from foreshock.monitor.sampling.collector import Collector, Counted
from foreshock.monitor.sampling.norms import ModelNorms


class Sampler:
    """The cadence of an agent, its collector and its norms. before_sample: tensors that ride on a sample, by name."""

    def __init__(
        self,
        config: AgentConfig,
        attached: AttachedModel,
        guards: Mapping[str, Guard],
        before_sample: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.cadence: Final = Cadence(config)
        self.collector: Final = Collector(attached.state)
        self.norms: Final = ModelNorms(attached.layers, [layout.current for layout in attached.layouts])
        self._guards: Final = guards
        self._before_sample: Final = before_sample

    def note(self, loss: object, grad_norm: object, learning_rate: float | None) -> None:
        """Keep one step's numbers for the next sample."""
        if self._guards["collector"].on:  # else nothing takes the notes away again
            self._guards["loss"].run(self.collector.note, loss, grad_norm, learning_rate)

    @property
    def due(self) -> bool:
        """Whether the step that is done is sampled."""
        return self.cadence.due(self.cadence.step, self.collector.since_step, crowded=self.collector.crowded)

    def collect(self, modes: npt.NDArray[np.int32], *, sample: bool, wait: bool = False) -> list[Counted]:
        """The samples that have arrived, after starting another one, with the modes [N] that ran, where `sample`."""
        counted: list[Counted] = []

        def collect() -> None:
            if wait:  # makes room for one more
                counted.extend(self.collector.landed(wait=True))
            if sample:
                self._start(modes)
            counted.extend(self.collector.landed(wait=wait))

        self._guards["collector"].run(collect)
        return counted

    def _start(self, modes: npt.NDArray[np.int32]) -> None:
        step_seconds, agent_seconds = self.cadence.seconds_per_step()
        measured, seconds = self._measure_weights, {"step_seconds": step_seconds, "agent_seconds": agent_seconds}
        if self.collector.snapshot(self.cadence.step, modes, norms=measured, **seconds):
            self.cadence.sampled()

    def _measure_weights(self) -> dict[str, Tensor]:
        """Norms, where they are due, and what QK-Clip did."""
        clipped = self._guards["qk_clip"].run(self._before_sample) or {}
        due = self.cadence.norms_due(self.cadence.step)
        if due and (measured := self._guards["norms"].run(self.norms.measure)) is not None:
            self.cadence.norms_measured(self.cadence.step)
            return measured | clipped
        return clipped
