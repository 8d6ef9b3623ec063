"""The Triton suite needs a GPU or Triton's interpreter, which must be chosen before Triton is first imported.

Without either, its files are left to test_interpreter.py, which runs them in a process of their own.
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
    from tests.kernels.lighter_interpreter import lighten

    lighten()
_ADDRESS: Final = "address"


def _kind(tensor: Tensor | int | None) -> object:
    """What a launch may not differ in. Of memory that a backward cuts up for itself no more than the address comes."""
    if isinstance(tensor, int):
        assert tensor % 256 == 0, f"the address {tensor} is not aligned as that of a tensor is"
        return _ADDRESS
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


@pytest.fixture(autouse=True)
def launches_are_remembered_by_all_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which two launches that go by one name differ in more than their pointers.

    From its second time on a launch is made as the first one was (Call.launch). The interpreter remembers none, so that
    a name which says too little would show on a GPU alone.
    """
    if not TRITON:
        return
    from foreshock.kernels.flash_attention.launch import Call

    first: dict[Any, tuple[object, Any]] = {}
    launch = Call.launch

    def compared(self: Any, name: Any, tensors: tuple[Tensor | int | None, ...], settle: Callable[[], Any]) -> None:
        made = settle()
        known = (id(self), name, *[tensor is None for tensor in tensors])
        kinds = list(map(_kind, tensors))
        read = [
            _ADDRESS if isinstance(tensor, int) else (tensor.shape, tensor.stride())
            for place in made.tiles
            if (tensor := tensors[place]) is not None
        ]
        _, (made_first, kinds_first, read_first) = first.setdefault(known, (self, (made, kinds, read)))
        kinds = [before if kind is _ADDRESS else kind for kind, before in zip(kinds, kinds_first, strict=True)]
        read = [before if kind is _ADDRESS else kind for kind, before in zip(read, read_first, strict=True)]
        assert (made_first, kinds_first, read_first) == (made, kinds, read), f"the launch {name} differs from its first"
        launch(self, name, tensors, lambda: made)

    monkeypatch.setattr(Call, "launch", compared)


@pytest.fixture
def kernels_serve_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the operators take the reference; where a test asks for this, they take the kernels."""
    from foreshock.kernels.flash_attention import op

    if not torch.cuda.is_available():
        monkeypatch.setattr(op, "_kernels", lambda query, spec: op._triton() if spec.numerics == "kernel" else None)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are made as on a GPU of compute capability 9.0 by who asks for nothing; none is remembered, nothing was
    given up yet, and gradients may differ in their bits."""
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
