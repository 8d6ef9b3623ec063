"""What the host spends on one small attention, forward and backward: `foreshock bench attention --host-only`.

This is what a step of a small model waits for. Needs a CUDA GPU.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreshock.benchmarks import machine
from foreshock.kernels.flash_attention import flash_attention, new_state

_HEADS = 4


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


def measure(device: str = "cuda", rounds: int = 9, calls: int = 100) -> dict[str, float]:
    """Microseconds of the host for a forward, and for both passes, of foreshock with statistics and modes and of
    PyTorch's own attention, in turn, on [1, 4, 64, 64]."""
    drawn = [torch.randn(1, 64, _HEADS, 64).bfloat16().to(device).transpose(1, 2) for _ in range(4)]
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
    return {name: round(_microseconds(call, device, rounds, calls), 1) for name, call in calls_of.items()}


def main(file: Path | None = None) -> None:
    """Measure, print, and write to `file`."""
    if not torch.cuda.is_available():
        raise SystemExit("foreshock bench attention --host-only needs a CUDA GPU, and PyTorch sees none here")
    runs = [measure() for _ in range(3)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name, value in found.items():
        print(f"{name}: {value:.0f} us of the host")
    if file is not None:
        header: dict[str, Any] = machine.header(f"foreshock bench attention --host-only --json {file.name}")
        file.write_text(json.dumps(header | {"unit": "microseconds"} | found, indent=1) + "\n")
