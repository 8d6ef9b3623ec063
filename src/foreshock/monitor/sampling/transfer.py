"""Tensors on their way to the host, from any device: started in stream order, and read once they have arrived."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreshock.contract.slots import Floats

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
