"""The Triton suite needs a GPU or Triton's interpreter, which must be chosen before Triton is first imported.

Without either, its files are left to test_interpreter.py, which runs them in a process of their own.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
if not TRITON:
    collect_ignore_glob = ["test_triton_*.py"]


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

    def compared(self: Any, name: Any, tensors: tuple[Tensor | None, ...], settle: Callable[[], Any]) -> None:
        made = settle()
        known = (id(self), name, *[tensor is None for tensor in tensors])
        kinds = [None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
        read = [(tensor.shape, tensor.stride()) for place in made.tiles if (tensor := tensors[place]) is not None]
        _, before = first.setdefault(known, (self, (made, kinds, read)))
        assert before == (made, kinds, read), f"the launch {name} differs from the one that was remembered"
        launch(self, name, tensors, lambda: made)

    monkeypatch.setattr(Call, "launch", compared)
