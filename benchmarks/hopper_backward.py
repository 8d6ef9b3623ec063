"""The prototype of the Hopper backward of attention on a GPU: is it right, then how fast is it beside cuDNN and Triton.

`python -P -m foreshock.benchmarks.hopper_backward --json FILE` takes about a minute on an H100 or H200, and stops after
85 seconds. Every case runs in a process that is killed where it says nothing for long: a barrier that nobody arrives at
would wait for ever.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foreshock.benchmarks import machine
from foreshock.benchmarks.hopper_backward_prototype import launch_hopper_backward, launch_main
from foreshock.benchmarks.stopwatch import Stopwatch, passes
from foreshock.benchmarks.watched import BROKEN, Watched
from foreshock.kernels.flash_attention import AttentionSpec, new_state
from foreshock.kernels.flash_attention.launch import Call, call_of
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels.backward import launch_backward
from foreshock.kernels.flash_attention.triton_kernels.forward import launch_forward
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.rows import launch_rows
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

DIM: Final = 128


class Case(NamedTuple):
    """One backward that is checked."""

    causal: bool
    length: int
    heads: tuple[int, int] = (4, 4)
    batch: int = 2
    layout: str = "heads of rows"


CASES: Final = tuple(
    Case(causal, *rest)
    for rest in (
        # Alternately of lengths that Triton compiles for and of others, so that in_processes parts them.
        (128,), (1000,), (64,), (2,), (1024, (16, 16), 16), (129,),
        (4096, (3, 3), 1), (1111, (8, 2), 3, "rows of heads"),
    )
    for causal in (False, True)
)  # fmt: skip


class Problem:
    """One call's tensors, as its forward leaves them."""

    def __init__(self, case: Case, *, counted: bool = False) -> None:
        torch.manual_seed(case.length)
        made = []
        for heads in (0, 1, 1, 0):
            shape = (case.batch, case.heads[heads], case.length, DIM)
            if case.layout == "rows of heads":
                made.append(torch.randn((shape[0], shape[2], shape[1], DIM), device="cuda").bfloat16().transpose(1, 2))
            else:
                made.append(torch.randn(shape, device="cuda").bfloat16())
        query, key, value, self.grad_out = made
        self.inputs = query, key, value
        self.spec = AttentionSpec(DIM**-0.5, "top_left" if case.causal else "none")
        given = Arguments(None, None, None, case.length, case.length, None, self.spec)
        call = call_of(*self.inputs, given)
        lse, row_max = (torch.empty(query.shape[:3], device="cuda") for _ in range(2))
        out, residual = torch.empty_like(query), torch.empty_like(query) if counted else None
        outputs = (out, residual, lse, row_max)
        self.chosen = configs(call.capability, call.block_d, call.mean_keys)
        launch_forward(call, self.chosen.forward, self.inputs, outputs, given)
        state = new_state(case.heads[0], "cuda") if counted else None
        self.tensors = Tensors(self.grad_out, *self.inputs, out, residual, lse, row_max, state, None, None, None, None)
        self.call: Call = call_of(*self.inputs, given, self.grad_out, *outputs, state)
        self.grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        self.sums = torch.empty_like(query, dtype=torch.float32)

    def triton(self) -> None:
        """The three passes of the kernels that are served, and the statistics where they are counted."""
        launch_backward(self.call, self.chosen, self.tensors, self.grads)

    def gluon(self, *, late: bool) -> None:
        """All that the prototype takes."""
        launch_hopper_backward(self.call, self.tensors, self.grads, self.sums, late=late)

    def truth(self) -> list[Tensor]:
        """dQ, dK and dV in float64."""
        query, key, value, grad = (x.double() for x in (*self.inputs, self.grad_out))
        group = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = self.spec.scale * (query @ k.transpose(-1, -2))
        if self.spec.causal != "none":
            scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
        weights = scores.softmax(-1)
        grad_p = grad @ v.transpose(-1, -2)
        grad_s = weights * (grad_p - (weights * grad_p).sum(-1, keepdim=True)) * self.spec.scale
        shared = (key.shape[0], key.shape[1], group, *key.shape[2:])
        grad_k, grad_v = grad_s.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
        return [grad_s @ k, grad_k.view(shared).sum(2), grad_v.view(shared).sum(2)]


def check(case: Case) -> dict[str, Any]:
    """What is wrong in one case, in words, and the figures that say so: errors of these and of Triton's gradients."""
    problem = Problem(case)
    exact = problem.truth()
    problem.triton()
    allowed = [distance(x, y) for x, y in zip(problem.grads, exact, strict=True)]
    wrong: list[str] = []
    figures: dict[str, Any] = {}
    for late in (False, True):
        first: list[Tensor] = []
        for repeat in range(6):
            for grad in problem.grads:
                grad.fill_(7.0)
            problem.gluon(late=late)
            torch.cuda.synchronize()
            errors = [distance(x, y) for x, y in zip(problem.grads, exact, strict=True)]
            if repeat == 0:
                first = [x.clone() for x in problem.grads[1:]]
                figures["late" if late else "early"] = [list(pair) for pair in zip(errors, allowed, strict=True)]
            for name, error, most in zip(("dq", "dk", "dv"), errors, allowed, strict=True):
                if not error <= 1.1 * most + 1e-5:
                    wrong.append(f"{name} errs by {error:.2e}, Triton's by {most:.2e}, late {late}")
            if not all(map(torch.equal, first, problem.grads[1:])):
                wrong.append(f"other bits of dK or dV at a repetition, late {late}")
    return {"case": case._asdict(), "wrong": sorted(set(wrong))[:8], **figures}


def distance(given: Tensor, exact: Tensor) -> float:
    """Relative to the norm."""
    return float((given.double() - exact).norm() / exact.norm())


def contenders(length: int, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Backwards of 16,384 tokens of width 2048. `main` is the pass alone that makes dK, dV and the sums of dQ."""
    case = Case(causal, length, (16, 16), 16_384 // length)
    plain, counted = Problem(case), Problem(case, counted=True)

    def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    leaves = tuple(x.detach().requires_grad_() for x in plain.inputs)
    rows = launch_rows(plain.call, plain.tensors)
    return {
        "cudnn": passes(cudnn, leaves, plain.grad_out)["backward"],
        "triton, counted": counted.triton,
        "triton": plain.triton,
        "gluon": partial(plain.gluon, late=False),
        "gluon, late": partial(plain.gluon, late=True),
        "main": partial(launch_main, plain.call, plain.tensors, rows, plain.grads, plain.sums),
        "main, late": partial(launch_main, plain.call, plain.tensors, rows, plain.grads, plain.sums, late=True),
    }


CELLS: Final = tuple(itertools.product((8192, 4096, 1024), (True, False)))


def measure(cell: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of one cell's contenders; 0 repeats make their kernels, so that they lie on disk."""
    length, causal = CELLS[cell]
    calls = contenders(length, causal=causal)
    wrong = []
    for name, call in list(calls.items()):
        try:
            if name != "cudnn":
                call()
            torch.cuda.synchronize()
        except Exception as error:
            del calls[name]
            wrong.append(f"{name}: {type(error).__name__}: {error}"[-300:])
    if not repeats:
        return {"wrong": wrong}
    took = Stopwatch(repeats).medians(calls)
    work = 10 * 16_384 * length * 2048 * (0.5 if causal else 1.0)
    speed = {name: round(work / ms / 1e9, 1) for name, ms in took.items()}
    return {"wrong": wrong, "length": length, "causal": causal, "milliseconds": took, "TFLOP/s": speed}


def carry_out(tasks: list[str]) -> None:
    """What a part's process does: one line of JSON for each task."""
    for task in tasks:
        name, *numbers = task.split()
        first, *rest = map(int, numbers)
        try:
            said = check(CASES[first]) if name == "check" else measure(first, *rest)
        except Exception as error:
            said = {"wrong": [f"{type(error).__name__}: {error}"[-600:]]}
        print(json.dumps(said), flush=True)
        if any("CUDA error" in x or "AcceleratorError" in x for x in said.get("wrong", ())):
            sys.exit(BROKEN)


def in_processes(parts: list[list[str]], ends: float) -> list[dict[str, Any]]:
    """What the tasks say, those of each part in a process that is killed where it says nothing for 50 seconds."""
    command = [sys.executable, "-P", "-m", "foreshock.benchmarks.hopper_backward", "--tasks"]
    watched = [Watched(command, tasks, 50.0, ends) for tasks in parts]
    return [said for part in watched for said in part.wait()]


def checks(count: int) -> list[list[str]]:
    """Every case, in as many parts."""
    return [[f"check {case}" for case in range(part, len(CASES), count)] for part in range(count)]


def main() -> None:
    """Check full and causal cases in a process each, then time the grid. Needs a GPU of compute capability 9.0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--seconds", type=float, default=85.0, help="when to stop")
    parser.add_argument("--tasks", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this needs an H100 or H200; on other machines `compiled` shows that the kernel compiles")
    if given.tasks:
        carry_out(given.tasks)
        return
    begun = time.monotonic()
    result: dict[str, Any] = machine.header("python -P -m foreshock.benchmarks.hopper_backward --json FILE")
    cells = range(len(CELLS))
    made = [[f"measure {cell} 0" for cell in cells[causal::2]] for causal in range(2)]
    said = in_processes([*checks(4), *made], begun + 0.65 * given.seconds)
    timed = in_processes([[f"measure {cell} 15" for cell in cells]], begun + given.seconds)
    result |= {"wrong": [x for x in said if x["wrong"]], "cells": timed, "checks": said}
    result["seconds"] = round(time.monotonic() - begun)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(result['wrong'])} of {len(said)} tasks went wrong, of {len(CASES) + len(CELLS)}", flush=True)


if __name__ == "__main__":
    main()
