"""What the host spends on one small attention, forward and backward: `foreshock bench attention --host-only`.

This is what a step of a small model waits for. Where there is no GPU the launches are left out: checks, autograd,
operators, allocations and the looking up of what is known stay.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreshock.kernels.flash_attention import flash_attention, new_state, op
from foreshock.kernels.flash_attention.launch import Call

_HEADS = 4


@contextmanager
def _served(device: str) -> Iterator[None]:
    """By the Triton kernels; on a CPU without their launches."""
    if device != "cpu":
        yield
        return
    served = patch.object(op, "_kernels", lambda query, spec: op._triton())
    remembered = patch.object(Call, "takes_addresses", lambda call: True)
    with served, patch.object(Call, "launch", _no_launch), remembered:
        yield


def _no_launch(*_: object) -> None:
    pass


def _microseconds(call: Callable[[], object], device: str, rounds: int, calls: int) -> float:
    """Of one call: the least of some rounds, in which the device is waited for after the clock was read."""
    took = []
    for _ in range(rounds + 1):  # the first warms up
        began = time.perf_counter()
        for _ in range(calls):
            call()
        took.append((time.perf_counter() - began) / calls)
        if device != "cpu":
            torch.cuda.synchronize()
    return 1e6 * min(took[1:])


def measure(device: str, rounds: int = 9, calls: int = 100) -> dict[str, float]:
    """Microseconds of the host for a forward, and for both passes, of foreshock with statistics and modes and of
    PyTorch's own attention, in turn, on [1, 4, 64, 64]; on a CPU, where PyTorch's computes, on [1, 4, 1, 8]."""
    rows, dim = (1, 8) if device == "cpu" else (64, 64)
    drawn = [torch.randn(1, rows, _HEADS, dim).bfloat16().to(device).transpose(1, 2) for _ in range(4)]
    query, key, value = leaves = tuple(x.requires_grad_() for x in drawn[:3])
    grad = drawn[3]
    state, modes = new_state(_HEADS, device), torch.zeros(_HEADS, dtype=torch.int32, device=device)

    def ours() -> Tensor:
        return flash_attention(query, key, value, causal=True, state=state, modes=modes)

    def theirs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    calls_of: dict[str, Callable[[], object]] = {
        "foreshock_forward": ours,
        "sdpa_forward": theirs,
        "foreshock_both": lambda: torch.autograd.grad(ours(), leaves, grad),
        "sdpa_both": lambda: torch.autograd.grad(theirs(), leaves, grad),
    }
    with _served(device):
        return {name: round(_microseconds(call, device, rounds, calls), 1) for name, call in calls_of.items()}


def main(json_path: str | None = None) -> None:
    """Measure, print, and write to `json_path`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = [measure(device) for _ in range(3)]
    found: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    left_out = " (launches left out: no GPU)" if device == "cpu" else ""
    for name, value in found.items():
        print(f"{name}: {value:.0f} us of the host{left_out if name.startswith('foreshock') else ''}")
    if json_path is not None:
        result = {"device": device, "unit": "microseconds", "torch": torch.__version__} | found
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
