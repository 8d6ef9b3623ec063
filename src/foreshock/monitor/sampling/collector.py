"""Samples: the counts leave the device, travel while training runs, and are sent as messages.

At a step boundary, in stream order, the packed state is copied and zeroed. On CUDA the copy is asynchronous and is read
steps later, when its events have passed; the host never waits. Losses and gradient norms that are tensors ride along,
so that reading them costs no synchronisation either.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pybase64
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Words, identity_row
from foreshock.monitor.crisis import ParametersFound
from foreshock.monitor.guard import logger
from foreshock.monitor.model.layers import is_sharded


def passes(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` is in (before, after], so that numbers that skip some meet each stride once."""
    return after // every > before // every


Gathered = list[tuple[list[int], Tensor | list[float]]]
"""Numbers in groups of one device and type: their places among all, and the group, on the host once arrived."""


class Transfer:
    """Copies that were started together. A device runs its own in the order of its stream, and its event shows when."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._events: list[Any] = []

    def start(self, source: Tensor) -> Tensor:
        """A tensor on the host that holds what `source` holds now, once the transfer has `arrived`."""
        if not source.is_cuda:
            return source.detach().to("cpu", copy=True)
        self._devices.add(source.device)
        return _copied(source)

    def gather(self, given: Sequence[Tensor | float]) -> Gathered:
        """Start with numbers of one element each, on whatever devices they are; `ungathered` joins them again."""
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
        # float64 exists on every device but Apple's; float32 there holds a loss exactly enough
        return self.start(stacked if stacked.device.type == "mps" else stacked.to(torch.float64))

    def seal(self) -> None:
        """All is started: from here on `arrived` is asked."""
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
    """The numbers in their order, float64 [n]."""
    values: Floats = np.empty(sum(len(places) for places, _ in groups), dtype=np.float64)
    for places, numbers in groups:
        values[places] = numbers.numpy() if isinstance(numbers, Tensor) else numbers
    return values


def _copied(source: Tensor) -> Tensor:
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)


def _recorded(device: torch.device) -> Any:
    """An event behind all that this device was given; the current device may be another."""
    return torch.cuda.current_stream(device).record_event()


MAX_NOTES: Final = 1024
"""Losses kept between two samples; a step beyond it makes a sample due."""
MAX_FLIGHTS: Final = 4
"""Copies under way at once; while all are, counting simply goes on in the device's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Everything counted in the steps (since_step, step], on the host."""

    step: int
    since_step: int
    words: Words
    """int64 [N, SLOT_COUNT]."""
    modes: npt.NDArray[np.int32]
    losses: Floats
    """Raw loss of each step that reported one, non-finite ones included."""
    grad_norms: Floats
    norms: dict[str, npt.NDArray[np.float32]]
    """query_norm, key_norm, query_key_norm, each [N], NaN where unmeasured; empty when none were due. Where QK-Clip has
    been on, what it did: clip_factor, clipped_steps [N] and its processes' wishes [2]."""
    learning_rate: float | None
    step_seconds: float | None
    agent_seconds: float | None
    parameters: ParametersFound | None = None
    """What was found of gradients and weights, after a step that was not finite."""

    @property
    def broken_step(self) -> int | None:
        """The first step whose loss or gradient norm is not finite; the earliest it can be if some steps gave none."""
        known = [values for values in (self.losses, self.grad_norms) if values.size]
        places = [int(broken[0]) for values in known if (broken := np.flatnonzero(~np.isfinite(values))).size]
        if not places:
            return None
        return self.since_step + 1 + (min(places) if self._whole else 0)

    @property
    def broken_loss(self) -> float | None:
        """The loss of `broken_step`; None if some steps gave no number, since another may be the first then."""
        step = self.broken_step
        return None if step is None or not self._whole else float(self.losses[step - self.since_step - 1])

    @property
    def _whole(self) -> bool:
        """Whether every step gave its loss, and its gradient norm unless none did."""
        steps = self.step - self.since_step
        return self.losses.size == steps and self.grad_norms.size in (0, steps)

    @property
    def suspect_step(self) -> int | None:
        """The first step whose update may have broken the weights; None if no loss and no gradient norm shows it.

        The loss of a step is computed with the weights that the step before left. Gradients that overflow before a
        finite loss were skipped by a GradScaler; those of the last step may have broken the weights. If some steps gave
        nothing it is the earliest that it can have been.
        """
        losses, norms = (np.flatnonzero(~np.isfinite(values)) for values in (self.losses, self.grad_norms))
        if not losses.size and self.losses.size:
            return self.step if norms.size and norms[-1] == self.grad_norms.size - 1 else None
        broken, size, lag = (losses, self.losses.size, 1) if losses.size else (norms, self.grad_norms.size, 0)
        if not broken.size:
            return None
        place = int(broken[0]) if size <= self.step - self.since_step else 0
        return max(self.since_step + 1 + place - lag, 1)


class Collector:
    """Owns the notes between two samples and the copies under way. `state` is int64 [N, SLOT_COUNT], on any device."""

    def __init__(self, state: Tensor) -> None:
        self._state = state
        self._identity_row = identity_row()
        self._identity = torch.from_numpy(self._identity_row).to(state.device).expand_as(state).clone()
        self._losses: list[Tensor | float] = []
        self._grad_norms: list[Tensor | float] = []
        self._learning_rate: float | None = None
        self._parameters: ParametersFound | None = None
        self._flights: deque[tuple[Transfer, Callable[[], Counted]]] = deque()
        """Copies under way, and what makes the sample of each once it has arrived."""
        self._warned_of_parts = False
        self.since_step = 0
        """Last step of the last sample; the next one starts after it."""

    @property
    def notes_full(self) -> bool:
        """Whether there are the most notes that may be; then a sample is due whatever the schedule is."""
        return max(len(self._losses), len(self._grad_norms)) >= MAX_NOTES

    def note(self, loss: object, grad_norm: object, learning_rate: float | None) -> None:
        """Keep one step's numbers; tensors stay on their device. Raises ValueError unless each is one number."""
        if loss is not None:
            self._losses.append(self._scalar(loss, "loss"))
        grad_norm = self._whole(grad_norm)
        if grad_norm is not None:
            self._grad_norms.append(self._scalar(grad_norm, "grad_norm"))
        if learning_rate is not None:
            self._learning_rate = float(self._scalar(learning_rate, "learning_rate"))

    def note_parameters(self, found: ParametersFound) -> None:
        """Keep what was found of gradients and weights, for the next sample."""
        self._parameters = found

    def _whole(self, norm: Any) -> Any:
        """The norm, or None where this process holds a part of it only, as clip_grad_norm_ returns it under FSDP2."""
        if not is_sharded(norm):
            return norm
        if all(placement.is_replicate() for placement in norm.placements):
            return norm.to_local()
        if not self._warned_of_parts:
            self._warned_of_parts = True
            logger.warning(
                "foreshock: grad_norm is spread over processes and is not recorded; give grad_norm.full_tensor(): that "
                "is a collective, and the agent never calls one"
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
        return scalar.clone()  # a graphed step writes its loss into the same memory again

    def snapshot(
        self,
        step: int,
        modes: npt.NDArray[np.int32],
        *,
        norms: Callable[[], dict[str, Tensor]] | None = None,
        step_seconds: float | None = None,
        agent_seconds: float | None = None,
    ) -> bool:
        """Start copying everything counted up to `step`, and zero the state behind the copy.

        `norms` gives what the weights show, on their device. False when too many copies are still under way.
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
        """The counts, on their way to the host; the state starts anew behind them."""
        if not self._state.is_cpu:
            taken = transfer.start(self._state)
            self._state.copy_(self._identity)
            return taken
        words: Words = self._state.numpy()  # here NumPy, which costs the training thread less than PyTorch
        copied = words.copy()
        words[...] = self._identity_row
        return copied

    def landed(self, *, wait: bool = False) -> list[Counted]:
        """The copies that have arrived, oldest first. `wait` waits for all of them."""
        arrived = []
        while self._flights and self._flights[0][0].arrived(wait=wait):
            arrived.append(self._flights.popleft()[1]())
        return arrived


def nonfinite(values: Floats) -> int:
    """How many of the values are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(values)))


def mean(values: Floats) -> float | None:
    """The mean, NaN or infinite when a value is; None without values."""
    return sum(values.tolist()) / values.size if values.size else None  # Python's sum warns of no infinity


def largest(values: Floats) -> float | None:
    """The largest value, NaN when one is; None without values."""
    return float(values.max()) if values.size else None


@dataclass(frozen=True, slots=True)
class SampleDraft:
    """What one sample will hold. `risk` is float64 [N]; None where the detectors are off."""

    counted: Counted
    risk: Floats | None
    unix_seconds: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays as they will travel."""
        raw = self.counted.words.nbytes + self.counted.modes.nbytes
        raw += sum(values.nbytes for values in self.counted.norms.values())
        raw += 0 if self.risk is None else self.risk.nbytes // 2  # travels as float32
        return raw * 4 // 3

    def build(self) -> wire.Sample:
        """The message."""
        counted = self.counted
        names = "query_norm", "key_norm", "query_key_norm", "clip_factor", "clipped_steps"
        norms: dict[str, Any] = {name: _array(counted.norms.get(name), np.float32) for name in names}
        return wire.Sample(
            step=counted.step,
            since_step=counted.since_step,
            unix_seconds=self.unix_seconds,
            states=_array(counted.words),
            modes=_array(counted.modes),
            loss=mean(counted.losses),
            loss_nonfinite_steps=nonfinite(counted.losses),
            grad_norm=largest(counted.grad_norms),
            grad_norm_nonfinite_steps=nonfinite(counted.grad_norms),
            learning_rate=counted.learning_rate,
            step_seconds=counted.step_seconds,
            agent_seconds=counted.agent_seconds,
            risk=_array(self.risk, np.float32),
            **norms,
        )


def _array(values: npt.NDArray[Any] | None, dtype: Any = None) -> wire.Array | None:
    """As wire.Array.of, without decoding again what was just encoded: these bytes are our own."""
    if values is None:
        return None
    little = np.ascontiguousarray(values, dtype=np.dtype(dtype or values.dtype).newbyteorder("<"))
    kind: Any = little.dtype.str
    return wire.Array.model_construct(dtype=kind, shape=values.shape, data=pybase64.b64encode_as_string(little.data))
