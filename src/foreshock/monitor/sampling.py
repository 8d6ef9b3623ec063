"""Samples: when one is due, its way from the device to the detectors and back, and its message.

At a step boundary, in stream order, the packed state is copied and zeroed. On CUDA the copy is asynchronous and is read
steps later, when its events are complete, so the host never waits. Losses and gradient norms that are tensors are
copied together with the state, so that they do not need a synchronisation either.

The detectors evaluate a sample in a thread, during the following step. A sample that is handed over at one step
boundary is taken at the next, with its verdicts. If the thread is late by a whole step, the boundary waits for it, so
that the same samples give the same verdicts at the same steps. It waits at most a second; after a wait in vain, it does
not wait again until the thread has caught up.
"""

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Words, identity_row
from foreshock.monitor.crisis import ParametersFound
from foreshock.monitor.detect.readings import Readings
from foreshock.monitor.guard import Guard, logger
from foreshock.monitor.model.layers import is_sharded
from foreshock.monitor.model.norms import ModelNorms

MAX_NOTES: Final = 1024
"""Limit of losses between two samples; when it is reached, a sample is due."""
MAX_FLIGHTS: Final = 4
"""Limit of concurrent copies; at the limit, no sample is taken and the state continues to count."""


def passes(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` is in (before, after], so that skipped step numbers do not skip a multiple."""
    return after // every > before // every


class SamplingSchedule:
    """Decides when a sample is due; the agent reports every step, sample and measurement to it."""

    def __init__(
        self, every_steps: int, *, least_seconds: float = 0.0, norms_every_steps: int = 0, close_watch_steps: int = 0
    ) -> None:
        """least_seconds: `every_steps` is doubled until samples are this far apart. norms_every_steps: 0 for never."""
        self._every_steps: Final = every_steps
        self._least_seconds: Final = least_seconds
        self._norms_every_steps: Final = norms_every_steps
        self._close_watch_steps: Final = close_watch_steps
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
        self.watch_until = step + self._close_watch_steps

    def due(self, since_step: int, *, notes_full: bool) -> bool:
        """Whether to sample the last step. since_step: the last sampled step. notes_full: whether the collector cannot
        store more values."""
        since = self.step - since_step
        if not self._sampled or self.step <= self.watch_until or notes_full:
            return since > 0
        return since > 0 and passes(self.before, self.step, self._stride(since))

    def _stride(self, since: int) -> int:
        """Return the stride: a sample is due when a step number passes a multiple of it.

        Ranks step together, so their strides are equal or differ by factors of two, and the service gets samples of all
        ranks at common steps, without communication between the ranks.
        """
        stride = self._every_steps
        step_seconds = (time.monotonic() - self._last_sample_at) / since
        while 0 < stride * step_seconds < self._least_seconds:
            stride *= 2
        return stride

    @property
    def norms_due(self) -> bool:
        """Whether a sample of the last step should contain norms."""
        every = self._norms_every_steps
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All counts and values of the steps (since_step, step], on the host."""

    step: int
    since_step: int
    words: Words
    """int64 [N, SLOT_COUNT]."""
    modes: npt.NDArray[np.int32]
    losses: Floats
    """Raw loss of each step that reported one, non-finite ones included."""
    grad_norms: Floats
    norms: dict[str, npt.NDArray[np.float32]]
    """query_norm, key_norm, query_key_norm, each [N], NaN if not measured; empty if none were due. If QK-Clip was on,
    also clip_factor and clipped_steps [N], and its processes' wishes [2]."""
    learning_rate: float | None
    step_seconds: float | None
    agent_seconds: float | None
    parameters: ParametersFound | None = None
    """Result of inspecting gradients and weights after a nonfinite step."""

    @property
    def loss(self) -> float | None:
        """The mean loss, NaN or infinite if one is; None without losses."""
        # Python's sum does not warn of infinities
        return sum(self.losses.tolist()) / self.losses.size if self.losses.size else None

    @property
    def grad_norm(self) -> float | None:
        """The largest gradient norm, NaN if one is; None without norms."""
        return float(self.grad_norms.max()) if self.grad_norms.size else None

    @property
    def nonfinite_losses(self) -> int:
        """Number of NaN and infinite losses."""
        return int(np.count_nonzero(~np.isfinite(self.losses)))

    @property
    def nonfinite_grad_norms(self) -> int:
        """Number of NaN and infinite gradient norms."""
        return int(np.count_nonzero(~np.isfinite(self.grad_norms)))

    @property
    def broken_step(self) -> int | None:
        """The first step with a nonfinite loss or gradient norm; if some steps have no value, the earliest possible."""
        known = [values for values in (self.losses, self.grad_norms) if values.size]
        places = [int(broken[0]) for values in known if (broken := np.flatnonzero(~np.isfinite(values))).size]
        if not places:
            return None
        return self.since_step + 1 + (min(places) if self._whole else 0)

    @property
    def broken_loss(self) -> float | None:
        """The loss of `broken_step`; None if some steps have no value, because the first such step is then unknown."""
        step = self.broken_step
        return None if step is None or not self._whole else float(self.losses[step - self.since_step - 1])

    @property
    def _whole(self) -> bool:
        """Whether every step has a loss, and either every step or none has a gradient norm."""
        steps = self.step - self.since_step
        return self.losses.size == steps and self.grad_norms.size in (0, steps)

    @property
    def suspect_step(self) -> int | None:
        """The first step whose update may have broken the weights; None if all losses and gradient norms are finite.

        A step's loss is computed with the weights from before its update. If gradients overflow but the next loss is
        finite, a GradScaler skipped the update; only the last step's gradients may have broken the weights. If some
        steps have no value, it is the earliest possible step.
        """
        losses, norms = (np.flatnonzero(~np.isfinite(values)) for values in (self.losses, self.grad_norms))
        if not losses.size and self.losses.size:
            return self.step if norms.size and norms[-1] == self.grad_norms.size - 1 else None
        broken, size, lag = (losses, self.losses.size, 1) if losses.size else (norms, self.grad_norms.size, 0)
        if not broken.size:
            return None
        place = int(broken[0]) if size <= self.step - self.since_step else 0
        return max(self.since_step + 1 + place - lag, 1)


Gathered = list[tuple[list[int], Tensor | list[float]]]
"""Numbers grouped by device and type: the indices of each group's numbers, and the group, on the host after arrival."""


class Transfer:
    """Copies that were started together. Each device has an event that shows when its copies are complete."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._events: list[Any] = []

    def start(self, source: Tensor) -> Tensor:
        """Start to copy `source`; return a host tensor that is valid once the transfer has `arrived`."""
        if not source.is_cuda:
            return source.detach().to("cpu", copy=True)
        self._devices.add(source.device)
        return _copied(source)

    def gather(self, given: Sequence[Tensor | float]) -> Gathered:
        """Start to copy one-element tensors and numbers from any devices; `ungathered` restores their order."""
        groups: dict[tuple[torch.device, torch.dtype] | None, list[int]] = {}
        for place, value in enumerate(given):
            group = (value.device, value.dtype) if isinstance(value, Tensor) else None
            groups.setdefault(group, []).append(place)
        return [
            (places, [float(given[place]) for place in places] if group is None else self._stacked(given, places))
            for group, places in groups.items()
        ]

    def _stacked(self, given: Sequence[Tensor | float], places: list[int]) -> Tensor:
        stacked = torch.stack([value for place in places if isinstance(value := given[place], Tensor)])
        # Apple's MPS does not support float64; float32 is exact enough for a loss
        return self.start(stacked if stacked.device.type == "mps" else stacked.to(torch.float64))

    def seal(self) -> None:
        """Record the events after all copies were started; required before `arrived`."""
        self._events = [_recorded(device) for device in self._devices]

    def arrived(self, *, wait: bool = False) -> bool:
        """Whether every copy is on the host; `wait` waits for it."""
        for event in self._events:
            if wait:
                event.synchronize()
            elif not event.query():
                return False
        return True


def ungathered(groups: Gathered) -> Floats:
    """Return the gathered numbers in their original order, float64 [n]."""
    values: Floats = np.empty(sum(len(places) for places, _ in groups), dtype=np.float64)
    for places, numbers in groups:
        values[places] = numbers.numpy() if isinstance(numbers, Tensor) else numbers
    return values


def _copied(source: Tensor) -> Tensor:
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)


def _recorded(device: torch.device) -> Any:
    """Record an event after all work of this device, which may differ from the current device."""
    return torch.cuda.current_stream(device).record_event()


class Collector:
    """Collects the values of steps between two samples, and the copies in flight. `state` is int64 [N, SLOT_COUNT]."""

    def __init__(self, state: Tensor) -> None:
        self._state = state
        self._identity_row = identity_row()
        self._identity = torch.from_numpy(self._identity_row).to(state.device).expand_as(state).clone()
        self._losses: list[Tensor | float] = []
        self._grad_norms: list[Tensor | float] = []
        self._learning_rate: float | None = None
        self._parameters: ParametersFound | None = None
        self._flights: deque[tuple[Transfer, Callable[[], Counted]]] = deque()
        """Copies in flight, each with a function that builds its sample after arrival."""
        self._warned_of_parts = False
        self.since_step = 0
        """Last step of the last sample; the next sample starts after it."""

    @property
    def notes_full(self) -> bool:
        """Whether the limit of losses or gradient norms is reached; then a sample is due regardless of the schedule."""
        return max(len(self._losses), len(self._grad_norms)) >= MAX_NOTES

    def note(self, loss: object, grad_norm: object, learning_rate: float | None) -> None:
        """Store one step's numbers; tensors stay on their device. Raises ValueError unless each is one number."""
        if loss is not None:
            self._losses.append(self._scalar(loss, "loss"))
        grad_norm = self._whole(grad_norm)
        if grad_norm is not None:
            self._grad_norms.append(self._scalar(grad_norm, "grad_norm"))
        if learning_rate is not None:
            self._learning_rate = float(self._scalar(learning_rate, "learning_rate"))

    def note_parameters(self, found: ParametersFound) -> None:
        """Store the result of inspecting gradients and weights for the next sample."""
        self._parameters = found

    def _whole(self, norm: Any) -> Any:
        """Return the norm; None if this process has only a part of it, as from clip_grad_norm_ under FSDP2."""
        if not is_sharded(norm):
            return norm
        if all(placement.is_replicate() for placement in norm.placements):
            return norm.to_local()
        if not self._warned_of_parts:
            self._warned_of_parts = True
            logger.warning(
                "foreshock: grad_norm is sharded over processes and is not recorded; pass grad_norm.full_tensor(), "
                "because that is a collective, and the agent never calls one"
            )
        return None

    def _scalar(self, value: Any, name: str) -> Tensor | float:
        if not isinstance(value, Tensor):
            try:
                return float(value)
            except (TypeError, ValueError):
                hint = ", as scheduler.get_last_lr()[0]" if name == "learning_rate" else ""
                raise ValueError(f"{name} is {repr(value)[:100]}; give one number{hint}") from None
        if value.numel() != 1:
            raise ValueError(f"{name} has shape {list(value.shape)}; give one number, for example its mean")
        scalar: Tensor = value.detach() if value.dim() == 0 else value.detach().reshape(())
        return scalar.clone()  # a captured step overwrites its loss at the next replay

    def snapshot(
        self,
        step: int,
        modes: npt.NDArray[np.int32],
        *,
        norms: Callable[[], dict[str, Tensor]] | None = None,
        step_seconds: float | None = None,
        agent_seconds: float | None = None,
    ) -> bool:
        """Start to copy all counts up to `step`, and zero the state after the copy; False if too many are in flight.

        norms: returns the norms of the weights, on their device.
        """
        if len(self._flights) >= MAX_FLIGHTS:
            return False
        measured = norms() if norms is not None else {}
        transfer = Transfer()
        losses, grad_norms = transfer.gather(self._losses), transfer.gather(self._grad_norms)
        weights = {name: transfer.start(t) for name, t in measured.items()}
        state = self._take_state(transfer)
        transfer.seal()
        since_step, learning_rate, modes = self.since_step, self._learning_rate, modes.copy()
        parameters, self._parameters = self._parameters, None

        def arrived() -> Counted:
            return Counted(
                step=step,
                since_step=since_step,
                words=state.numpy() if isinstance(state, Tensor) else state,
                modes=modes,
                losses=ungathered(losses),
                grad_norms=ungathered(grad_norms),
                norms={name: norms.numpy() for name, norms in weights.items()},
                learning_rate=learning_rate,
                step_seconds=step_seconds,
                agent_seconds=agent_seconds,
                parameters=parameters,
            )

        self._flights.append((transfer, arrived))
        self._losses, self._grad_norms, self.since_step = [], [], step
        return True

    def _take_state(self, transfer: Transfer) -> Tensor | Words:
        """Start to copy the counts to the host, and reset the state."""
        if not self._state.is_cpu:
            taken = transfer.start(self._state)
            self._state.copy_(self._identity)
            return taken
        words: Words = self._state.numpy()  # NumPy is faster than PyTorch for small arrays on a CPU
        copied = words.copy()
        words[...] = self._identity_row
        return copied

    def landed(self, *, wait: bool = False) -> list[Counted]:
        """Return the samples that have arrived, oldest first. `wait` waits for all of them."""
        arrived = []
        while self._flights and self._flights[0][0].arrived(wait=wait):
            arrived.append(self._flights.popleft()[1]())
        return arrived


class Sampler:
    """Takes an agent's samples, and contains errors of the collector, the norms and QK-Clip.

    before_sample: returns tensors, by name, that are added to the sample.
    """

    def __init__(
        self,
        schedule: SamplingSchedule,
        state: Tensor,
        norms: ModelNorms,
        guards: Mapping[str, Guard],
        before_sample: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.schedule: Final = schedule
        self.collector: Final = Collector(state)
        self.norms: Final = norms
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


LONGEST_WAIT_SECONDS: Final = 1.0
LONGEST_LAST_WAIT_SECONDS: Final = 5.0


class DetectorResult(NamedTuple):
    """A sample with the detectors' verdicts on it; `risk` is float64 [N], None where they are off.

    active: the verdicts that are not cleared. Other threads must read these instead of the detectors' own, which may
    change at any time.
    """

    counted: Counted
    verdicts: list[wire.Verdict]
    risk: Floats | None
    active: tuple[wire.Verdict, ...] = ()
    readings: Readings | None = None
    """None if the detectors failed"""
    undecided: bool = False
    """whether more frequent samples could show the cause of a drift"""


class DetectorThread:
    """Calls `detect` for one sample after another, in a daemon thread that starts with the first sample."""

    def __init__(self, detect: Callable[..., DetectorResult]) -> None:
        self._detect = detect
        self._waiting: queue.SimpleQueue[Callable[[], DetectorResult] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[DetectorResult | BaseException] = queue.SimpleQueue()
        self._under_way = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, *sample: object) -> None:
        """Hand over a sample, as the arguments of `detect`; a later `take` returns its verdicts."""
        self._under_way += 1
        self._waiting.put(functools.partial(self._detect, *sample))
        if self._thread is None:
            queues = self._waiting, self._results
            thread = threading.Thread(target=_work, args=queues, name="foreshock-detectors", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter exits or cannot start a thread, so this thread does the work
                self._waiting.put(None)
                _work(*queues)
            else:
                self._thread = thread

    def take(self, *, last: bool = False) -> list[DetectorResult]:
        """Return every sample handed over before, with its verdicts, oldest first. Raises errors of `detect` (strict
        mode).

        last: wait longer, for a checkpoint or the end of the training.
        """
        taken: list[DetectorResult] = []
        while self._under_way:
            seconds = LONGEST_LAST_WAIT_SECONDS if last else 0.0 if self._late else LONGEST_WAIT_SECONDS
            try:
                result = self._results.get(timeout=seconds)
            except queue.Empty:  # the machine stalls; a later boundary takes these samples
                self._late = True
                return taken
            self._under_way -= 1
            if isinstance(result, BaseException):
                raise result
            taken.append(result)
        self._late = False
        return taken

    @property
    def idle(self) -> bool:
        """Whether all samples that were handed over are taken, so that the thread does not access any state."""
        return not self._under_way

    def close(self) -> None:
        """End the thread after the samples that are waiting."""
        self._waiting.put(None)


def _work(
    waiting: "queue.SimpleQueue[Callable[[], DetectorResult] | None]",
    results: "queue.SimpleQueue[DetectorResult | BaseException]",
) -> None:
    """Run the thread. Between two samples, it does not have a reference that would keep a dropped agent alive."""
    while (detect := waiting.get()) is not None:
        try:
            results.put(detect())
        except BaseException as fault:  # the thread must not end while a boundary waits for it
            results.put(fault)
        del detect


@dataclass(frozen=True, slots=True)
class SampleDraft:
    """Content of a sample before it is encoded. `risk` is float64 [N]; None if the detectors are off."""

    counted: Counted
    risk: Floats | None
    unix_seconds: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        """Size of its arrays in the message, in bytes."""
        raw = self.counted.words.nbytes + self.counted.modes.nbytes
        raw += sum(values.nbytes for values in self.counted.norms.values())
        raw += 0 if self.risk is None else self.risk.nbytes // 2  # sent as float32
        return raw * 4 // 3

    def build(self) -> wire.Sample:
        """Build the message."""
        counted = self.counted
        names = "query_norm", "key_norm", "query_key_norm", "clip_factor", "clipped_steps"
        norms: dict[str, Any] = {name: _array(counted.norms.get(name), np.float32) for name in names}
        return wire.Sample(
            step=counted.step,
            since_step=counted.since_step,
            unix_seconds=self.unix_seconds,
            states=_array(counted.words),
            modes=_array(counted.modes),
            loss=counted.loss,
            loss_nonfinite_steps=counted.nonfinite_losses,
            grad_norm=counted.grad_norm,
            grad_norm_nonfinite_steps=counted.nonfinite_grad_norms,
            learning_rate=counted.learning_rate,
            step_seconds=counted.step_seconds,
            agent_seconds=counted.agent_seconds,
            risk=_array(self.risk, np.float32),
            **norms,
        )


def _array(values: npt.NDArray[Any] | None, dtype: Any = None) -> wire.Array | None:
    """As wire.Array.of, but without validation by decoding, because these bytes were just encoded."""
    if values is None:
        return None
    little = np.ascontiguousarray(values, dtype=np.dtype(dtype or values.dtype).newbyteorder("<"))
    kind: Any = little.dtype.str
    return wire.Array.model_construct(dtype=kind, shape=values.shape, data=pybase64.b64encode_as_string(little.data))
