"""The Triton suite needs a GPU or Triton's interpreter, which must be chosen before Triton is first imported.

Without either, test_interpreter.py runs these files in separate processes.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
if not TRITON:
    collect_ignore_glob = ["test_triton_*.py"]
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.faster_interpreter import speed_up

    speed_up()
_ADDRESS: Final = "address"


def _kind(tensor: Tensor | int | None) -> object:
    """The properties that a cached launch depends on. A backward passes its scratch memory only as an address."""
    if isinstance(tensor, int):
        assert tensor % 256 == 0, f"the address {tensor} is not aligned like that of a tensor"
        return _ADDRESS
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


@pytest.fixture(autouse=True)
def check_launch_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which two launches with the same key differ in more than their pointers.

    From the second time on, a launch repeats the first one with the same key (Call.launch). The interpreter caches no
    launches, so an incomplete key would fail only on a GPU.
    """
    if not TRITON:
        return
    from foreshock.kernels.flash_attention.launch import Call

    first: dict[Any, tuple[object, Any]] = {}
    launch = Call.launch

    def compare_and_launch(
        self: Any, name: Any, tensors: tuple[Tensor | int | None, ...], settle: Callable[[], Any]
    ) -> None:
        settled = settle()
        known = (id(self), name, *[tensor is None for tensor in tensors])
        kinds = list(map(_kind, tensors))
        read = [
            _ADDRESS if isinstance(tensor, int) else (tensor.shape, tensor.stride())
            for place in settled.tiles
            if (tensor := tensors[place]) is not None
        ]
        _, (settled_first, kinds_first, read_first) = first.setdefault(known, (self, (settled, kinds, read)))
        kinds = [before if kind is _ADDRESS else kind for kind, before in zip(kinds, kinds_first, strict=True)]
        read = [before if kind is _ADDRESS else kind for kind, before in zip(read, read_first, strict=True)]
        assert (settled_first, kinds_first, read_first) == (settled, kinds, read), (
            f"launch {name} differs from the first one with the same key"
        )
        launch(self, name, tensors, lambda: settled)

    monkeypatch.setattr(Call, "launch", compare_and_launch)


@pytest.fixture
def operators_use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, operators use the reference; with this fixture they use the kernels."""
    from foreshock.kernels.flash_attention import op

    if not torch.cuda.is_available():
        monkeypatch.setattr(op, "_kernels", lambda query, spec: op._triton() if spec.numerics == "kernel" else None)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are made as on a GPU of compute capability 9.0 with default settings: the cache is empty, no kernel has
    failed, and gradients need not be deterministic."""
    from foreshock.kernels.flash_attention import launch
    from foreshock.kernels.flash_attention.triton_kernels import hopper

    monkeypatch.setattr(launch, "_CALLS", {})
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    for one in (hopper.FORWARD, hopper.BACKWARD):
        monkeypatch.setattr(one, "failed", set())
    monkeypatch.delenv("FORESHOCK_KERNELS", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)
