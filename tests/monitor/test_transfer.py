"""What leaves several devices is read when the copy from each of them has arrived, whichever is the current one."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foreshock.contract.slots import identity_row
from foreshock.monitor.sampling import collector
from foreshock.monitor.sampling.collector import Collector, Transfer, ungathered

STALE = -7.0
PLAIN = np.zeros(2, dtype=np.int32)


class OnDevice(Tensor):
    """A tensor that says it lies on `place`; what is computed of it lies there too."""

    place = torch.device("cuda:0")
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = torch.tensor(self.tolist()).to(*args, **kwargs)
        return moved if "cpu" in args else moved.as_subclass(type(self))


class OnSecondDevice(OnDevice):
    place = torch.device("cuda:1")


class Devices:
    """Two devices that copy when they are told to run; the host reads what is stale until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: dict[torch.device, list[Callable[[], object]]] = {}
        self.recorded: list[torch.device] = []
        monkeypatch.setattr(collector, "_copied", self.copied)
        monkeypatch.setattr(collector, "_recorded", self.event)

    def copied(self, source: OnDevice) -> Tensor:
        now = torch.tensor(source.tolist(), dtype=source.dtype)
        host = torch.full_like(now, STALE)
        self.queued.setdefault(source.device, []).append(lambda: host.copy_(now))
        return host

    def event(self, device: torch.device) -> Any:
        self.recorded.append(device)
        devices = self

        class Event:
            def query(self) -> bool:
                return not devices.queued.get(device)

            def synchronize(self) -> None:
                devices.run(device)

        return Event()

    def run(self, device: torch.device) -> None:
        for copy in self.queued.pop(device, []):
            copy()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def on(kind: type[OnDevice], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype).as_subclass(kind)


def host_state() -> Tensor:
    return torch.from_numpy(identity_row()).repeat(2, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_sample_is_read_when_every_device_has_copied_and_not_before(devices: Devices, first: int) -> None:
    collector = Collector(host_state())
    collector.note(on(OnDevice, 1.0), on(OnSecondDevice, 5.0), None)
    collector.note(on(OnSecondDevice, 2.0), 6.0, None)
    collector.note(3.0, torch.tensor(7.0), None)
    collector.snapshot(3, PLAIN)
    assert sorted(map(str, devices.recorded)) == ["cuda:0", "cuda:1"]
    devices.run(torch.device("cuda", first))
    assert collector.landed() == []
    devices.run(torch.device("cuda", 1 - first))
    [sample] = collector.landed()
    assert (sample.losses.tolist(), sample.grad_norms.tolist()) == ([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])


def test_a_loss_on_a_device_beside_a_state_on_the_host_is_waited_for(devices: Devices) -> None:
    """As where the model was moved after attach, or its weights are offloaded."""
    collector = Collector(host_state())
    collector.note(on(OnDevice, math.nan), None, None)
    collector.snapshot(1, PLAIN)
    assert collector.landed() == []
    [sample] = collector.landed(wait=True)
    assert math.isnan(sample.losses[0])


def test_numbers_of_the_host_alone_wait_for_nothing(devices: Devices) -> None:
    moved = Transfer()
    groups = moved.gather([1.0, torch.tensor(2.0)])
    moved.seal()
    assert (moved.arrived(), ungathered(groups).tolist(), devices.recorded) == (True, [1.0, 2.0], [])


@given(
    drawn=st.lists(
        st.tuples(st.floats(width=16), st.sampled_from([float, torch.float32, torch.bfloat16, torch.float64])),
        max_size=9,
    )
)
def test_numbers_of_all_types_come_back_in_their_order(drawn: list[tuple[float, Any]]) -> None:
    given = [value if kind is float else torch.tensor(value, dtype=kind) for value, kind in drawn]
    moved = Transfer()
    groups = moved.gather(given)
    moved.seal()
    np.testing.assert_array_equal(ungathered(groups), np.array([float(value) for value in given], dtype=np.float64))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: their streams are what is waited for")
@pytest.mark.parametrize("current", [0, 1])
def test_what_a_busy_gpu_copies_late_is_not_read_before_it_is_there(current: int) -> None:
    with torch.cuda.device(current):
        source = torch.zeros(1, device="cuda:1", dtype=torch.float64)
        for cycles in (
            1,
            2_000_000_000,
        ):  # about a second; kernels that are loaded meanwhile would wait until it is over
            with torch.cuda.device(1):
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            source += 2.5
            moved = Transfer()
            groups = moved.gather([source[0], torch.tensor(2.0, device="cuda:0"), 3.0])
            moved.seal()
        assert not moved.arrived()
        assert moved.arrived(wait=True)
    assert ungathered(groups).tolist() == [5.0, 2.0, 3.0]
