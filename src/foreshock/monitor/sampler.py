"""Takes the samples of one agent: counts, values of its steps, and sometimes the norms of its weights."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.kernels.spectral import SpectralNorms, head_grams
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard, logger
from foreshock.monitor.model.layers import Held, Projection, UnreadableWeightError
from foreshock.monitor.sampling.collector import MAX_NOTES, Collector, Counted, passes

NORM_NAMES: Final = ("query_norm", "key_norm", "query_key_norm")


class ModelNorms:
    """Tracks the norms of W_Q, W_K and W_Q W_K^T of every head whose rows are complete in this process."""

    def __init__(self, layers: Sequence[Layer], projections: Sequence[Callable[[], Projection | None]]) -> None:
        """projections: for each layer, a function that returns the location of its weights, or None if unknown."""
        sizes = [len(layer.heads) for layer in layers]
        starts = itertools.accumulate(sizes, initial=0)
        self._total = sum(sizes)
        self._layers = list(zip(starts, projections, strict=False))
        self._followers: dict[object, tuple[SpectralNorms, Tensor]] = {}
        """By the layers' common shape and their positions: the object that tracks them, and the rows of their heads."""

    def measure(self) -> dict[str, Tensor]:
        """Return the norms by name, each float32 [N] on the weights' device; NaN if not measured, {} if none are."""
        groups: dict[tuple[torch.Size, torch.Size, torch.device], list[tuple[int, Tensor, Tensor]]] = {}
        for start, located in self._layers:
            if (projection := located()) is None:
                continue
            try:
                sides = [(side.read(), len(side.starts)) for side in (projection.query, projection.key)]
            except UnreadableWeightError:
                continue
            if any(held.heads for held, _ in sides):
                # Gram matrices are formed layer by layer, so that only one layer's sharded weights are gathered at once
                query, key = (_grams(*side) for side in sides)
                groups.setdefault((query.shape, key.shape, query.device), []).append((start, query, key))
        if not groups:
            return {}
        device = next(iter(groups))[2]
        measured = torch.full((len(NORM_NAMES), self._total), float("nan"), dtype=torch.float32, device=device)
        for shape, group in groups.items():
            starts, queries, keys = zip(*group, strict=True)
            if (shape, starts) not in self._followers:
                rows = [start + head for start in starts for head in range(len(queries[0]))]
                self._followers[shape, starts] = SpectralNorms(), torch.tensor(rows, device=device)
            norms, index = self._followers[shape, starts]
            both = norms(torch.stack(queries), torch.stack(keys))
            measured[:, index] = torch.stack([norm.flatten() for norm in both]).to(device)
        return dict(zip(NORM_NAMES, measured.unbind(), strict=True))


def _grams(held: Held, heads: int) -> Tensor:
    """Return W W^T of all heads, [heads, D, D]; NaN for heads that are not in this process, which have norm NaN."""
    dim = held.weights.shape[1]
    grams = torch.full((heads, dim, dim), float("nan"), dtype=torch.float32, device=held.weights.device)
    if held.heads:
        grams[held.heads.start : held.heads.stop] = head_grams(held.weights)
    return grams


class SamplingSchedule:
    """Decides when a sample is due; the agent reports every step, sample and measurement to it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config: Final = config
        self.step = self.before = 0
        """The last completed optimizer step, and its value at the agent's previous call."""
        self._offset = self._repeats = 0
        self._sampled = False
        self._last_sample_at = self._last_step_at = time.monotonic()
        self._steps, self._seconds = 0, 0.0
        self._agent_seconds = 0.0
        self._norms_at: int | None = None
        self.watch_until = -1
        """Up to this step, every step is sampled."""

    def begin_at(self, step: int) -> None:
        """Set the number of steps that were completed before."""
        self.step = self.before = step

    def step_done(self, given: int | None) -> None:
        """Record the end of an optimizer step with this number in the training; None: one more than the last."""
        self.before, self.step = self.step, self.step + 1 if given is None else self._number(int(given))
        now = time.monotonic()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - self._last_step_at
        self._last_step_at = now

    def _number(self, given: int) -> int:
        """Return the step's number: as given, but continued if numbers go back, such as at a new epoch."""
        number = given + self._offset
        self._repeats = self._repeats + 1 if number == self.step else 0
        if number < self.step or self._repeats >= MAX_NOTES:  # the notes of one step would not fit
            if not self._offset:
                logger.warning(
                    "foreshock: agent.step was given step %d after step %d; counting continues from %d",
                    *(given, self.step, self.step + 1),
                )
            self._offset, number, self._repeats = self.step + 1 - given, self.step + 1, 0
        return number

    @property
    def next_step(self) -> int:
        """The number of the next step, if numbers continue with the same difference."""
        return self.step + max(self.step - self.before, 1)

    def agent_took(self, seconds: float) -> None:
        """Add the time that the agent itself took in a step."""
        self._agent_seconds += seconds

    def watch_closely(self, step: int) -> None:
        """Sample every step for a while after `step`: a warning was raised, or the cause of a drift is undecided."""
        self.watch_until = step + self._config.close_watch_steps

    def due(self, since_step: int, *, notes_full: bool) -> bool:
        """Whether to sample the last step. since_step: the last sampled step. notes_full: whether the collector cannot
        store more values."""
        since = self.step - since_step
        if not self._sampled or self.step <= self.watch_until or notes_full:
            return since > 0
        return since > 0 and passes(self.before, self.step, self._stride(since))

    def _stride(self, since: int) -> int:
        """Return the stride: a sample is due when a step number passes a multiple of it.

        It is the user's sample_every_steps, or a default that is doubled until samples are some time apart. Ranks step
        together, so their strides are equal or differ by factors of two, and the service gets samples of all ranks at
        common steps, without communication between the ranks.
        """
        stride = self._config.stride
        if self._config.sample_every_steps is not None:
            return stride
        step_seconds = (time.monotonic() - self._last_sample_at) / since
        while 0 < stride * step_seconds < self._config.sampled_seconds:
            stride *= 2
        return stride

    @property
    def norms_due(self) -> bool:
        """Whether a sample of the last step should contain norms."""
        every = self._config.norms_every_steps
        if not every or self._norms_at is None:
            return bool(every)
        return self.step - self._norms_at >= every

    def norms_measured(self) -> None:
        """Record that the norms were measured."""
        self._norms_at = self.step

    def seconds_per_step(self) -> tuple[float, float]:
        """Return the mean wall time of a step since the last sample, and the agent's share of it."""
        steps = max(self._steps, 1)
        return self._seconds / steps, self._agent_seconds / steps

    def sampled(self) -> None:
        """Record that a sample was taken."""
        self._sampled = True
        self._last_sample_at = time.monotonic()
        self._steps, self._seconds, self._agent_seconds = 0, 0.0, 0.0


class Sampler:
    """The sampling schedule of an agent, its collector and its norms.

    before_sample: returns tensors, by name, that are added to the sample.
    """

    def __init__(
        self,
        config: AgentConfig,
        attached: AttachedModel,
        guards: Mapping[str, Guard],
        before_sample: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.schedule: Final = SamplingSchedule(config)
        self.collector: Final = Collector(attached.state)
        self.norms: Final = ModelNorms(attached.layers, [layout.current for layout in attached.layouts])
        self._guards: Final = guards
        self._before_sample: Final = before_sample

    def note(self, loss: object, grad_norm: object, learning_rate: float | None) -> None:
        """Store one step's numbers for the next sample."""
        if self._guards["collector"].on:  # otherwise the numbers would accumulate
            self._guards["loss"].run(self.collector.note, loss, grad_norm, learning_rate)

    @property
    def due(self) -> bool:
        """Whether to sample the last step."""
        return self.schedule.due(self.collector.since_step, notes_full=self.collector.notes_full)

    def collect(self, modes: npt.NDArray[np.int32], *, sample: bool, wait: bool = False) -> list[Counted]:
        """Start a sample with the modes [N] that ran, if `sample`; return the samples that have arrived."""
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
        seconds = dict(zip(("step_seconds", "agent_seconds"), self.schedule.seconds_per_step(), strict=True))
        if self.collector.snapshot(self.schedule.step, modes, norms=self._measure_weights, **seconds):
            self.schedule.sampled()

    def _measure_weights(self) -> dict[str, Tensor]:
        """Return norms, if they are due, and QK-Clip's scalings."""
        clipped = self._guards["qk_clip"].run(self._before_sample) or {}
        if self.schedule.norms_due and (measured := self._guards["norms"].run(self.norms.measure)) is not None:
            self.schedule.norms_measured()
            return measured | clipped
        return clipped
