"""The Hopper forward of attention on a GPU: is it right, then how fast is it beside cuDNN, Triton and its prototype.

`python -P -m foreshock.benchmarks.hopper_forward --json FILE` takes about two minutes on an H100 or H200. Every case
runs in a process that is killed where it says nothing for long: a barrier that nobody arrives at would wait for ever.
`compiled` needs no GPU.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from foreshock.benchmarks import hopper_prototype, machine
from foreshock.benchmarks.stopwatch import Stopwatch
from foreshock.benchmarks.watched import BROKEN, Watched
from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments, Saved, residual_scale
from foreshock.kernels.flash_attention.triton_kernels import backward, forward
from foreshock.kernels.flash_attention.triton_kernels.hopper_forward import (
    BLOCK,
    STAGES,
    hopper_forward_kernel,
    launch_hopper_forward,
    serves,
)
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

Outputs = tuple[Tensor, Tensor | None, Tensor, Tensor]


def compiled(
    dim: int,
    *,
    causal: bool,
    residual: bool = True,
    modes: bool = True,
    tail: bool = False,
    dtype: str = "bf16",
    stages: int = STAGES,
    turns: bool = True,
) -> Any:
    """The kernel as Triton compiles it for compute capability 9.0, on any machine."""
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], kind)
        return f"tensordesc<{dtype}[1, 1, {rows}, {dim}],{layout!r}>"

    half, whole = descriptor(BLOCK // 2), descriptor(BLOCK)
    constants = {"BLOCK": BLOCK, "DIM": dim, "STAGES": stages, "CAUSAL": causal, "TAIL": tail, "TURNS": turns}
    signature: dict[str, Any] = {
        **dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), (half, whole, whole, half), strict=True)),
        "r_desc": half if residual else "constexpr",
        **dict.fromkeys(("lse", "row_max"), "*fp32"),
        "modes": "*i32" if modes else "constexpr",
        **dict.fromkeys(("blocks", "planes", "heads", "group", "length_q", "length_k", "tiles"), "i32"),
        **dict.fromkeys(("unit", "score_unit"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = list(signature)
    nothing = {name: None for name, given in (("r_desc", residual), ("modes", modes)) if not given}
    fixed = {(places.index(name),): value for name, value in {**constants, **nothing}.items()}
    source = GluonASTSource(hopper_forward_kernel, signature, fixed, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


class Case(NamedTuple):
    """One call that is checked. `odd`: a key makes scores minus infinity, and the scale is not the usual one."""

    dim: int
    causal: bool
    length_q: int
    length_k: int
    heads: tuple[int, int] = (4, 4)
    batch: int = 2
    dtype: str = "bfloat16"
    layout: str = "heads of rows"
    odd: bool = False
    turns: bool = True
    stages: int = STAGES


CASES: Final = (
    *(Case(128, causal, n, n) for causal, n in itertools.product((False, True), (1024, 128, 1, 129, 640, 1000, 1920))),
    *(Case(128, causal, 1024, 1024, (16, 16), 16) for causal in (False, True)),
    *(Case(128, causal, 1111, 1111, (8, 2), 3, layout="rows of heads") for causal in (False, True)),
    *(Case(128, causal, 777, 777, dtype="float16") for causal in (False, True)),
    *(Case(128, causal, 400, 400, odd=True) for causal in (False, True)),
    *(Case(128, causal, n, n, turns=False) for causal, n in itertools.product((False, True), (1024, 1000))),
    Case(128, False, 333, 777, (4, 1)),
    Case(128, False, 777, 333),
    Case(128, True, 8192, 8192, (3, 3), 1),
    Case(128, False, 4096, 4096, (3, 3), 1),
    *(Case(64, causal, n, n) for causal, n in itertools.product((False, True), (1024, 129, 1000))),
    *(Case(64, causal, n, n, stages=3) for causal, n in itertools.product((False, True), (1024, 1000))),
    *(Case(64, causal, 1111, 1111, (8, 2), 3, "float16", "rows of heads") for causal in (False, True)),
)


def tensors_of(case: Case) -> list[Tensor]:
    """Query, key, value and the gradient of O."""
    torch.manual_seed(case.length_q + case.length_k)
    made = []
    for heads, length in ((0, case.length_q), (1, case.length_k), (1, case.length_k), (0, case.length_q)):
        shape = (case.batch, case.heads[heads], length, case.dim)
        if case.layout == "rows of heads":
            shape = (shape[0], shape[2], shape[1], shape[3])
        tensor = torch.randn(shape, device="cuda").to(getattr(torch, case.dtype))
        made.append(tensor.transpose(1, 2) if case.layout == "rows of heads" else tensor)
    if case.odd:
        made[0].abs_()
        made[1][:, :, 0] = -math.inf
    return made


def blank_outputs(query: Tensor, *, residual: bool) -> tuple[Outputs, list[Tensor]]:
    """Outputs, and what they lie in, which is longer: all of it holds 7."""
    batch, heads, length, dim = query.shape
    wide = [torch.full((batch, heads, length + 64, dim), 7.0, dtype=query.dtype, device="cuda") for _ in range(2)]
    narrow = [torch.full((batch * heads * length + 128,), 7.0, device="cuda") for _ in range(2)]
    out, lost = (x[:, :, :length] for x in wide)
    lse, row_max = (x[: batch * heads * length].view(batch, heads, length) for x in narrow)
    return (out, lost if residual else None, lse, row_max), [*wide, *narrow]


def untouched(outputs: Outputs, around: list[Tensor]) -> bool:
    """Whether nothing was written outside of the outputs."""
    length = outputs[0].shape[2]
    rows = outputs[2].numel()
    return all(bool((x[:, :, length:] == 7.0).all() if x.dim() == 4 else (x[rows:] == 7.0).all()) for x in around)


def check(case: Case) -> dict[str, Any]:
    """What is wrong in one case, in words, and the figures that say so."""
    query, key, value, grad = tensors_of(case)
    spec = AttentionSpec(0.3 if case.odd else case.dim**-0.5, "top_left" if case.causal else "none")
    wrong: list[str] = []

    def run(modes: Tensor | None = None, *, residual: bool = True, remembered: bool = True) -> Outputs:
        given = Arguments(modes, None, None, case.length_q, case.length_k, None, spec)
        outputs, around = blank_outputs(query, residual=residual)
        call = call_of(query, key, value, given)
        if not remembered:
            call.ready.clear()
        tensors = [x for x in (query, key, value, *outputs[:2]) if x is not None]
        if not serves(call, *tensors):
            wrong.append("not served")
        launch_hopper_forward(call, (query, key, value), outputs, modes, stages=case.stages, turns=case.turns)
        torch.cuda.synchronize()
        if not untouched(outputs, around):
            wrong.append("wrote outside of its outputs")
        return outputs

    def same(what: str, ours: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        if not all(a is None or b is None or torch.equal(a, b) for a, b in zip(ours, others, strict=True)):
            wrong.append(what)

    first = run(remembered=False)
    kept = [x for x in first if x is not None]
    plain = Arguments(None, None, None, case.length_q, case.length_k, None, spec)
    served = forward.attention_forward(query, key, value, plain)
    exact = truth(query, key, value, spec)
    figures: dict[str, Any] = {}
    scale = residual_scale(query.dtype)
    for name, ours, theirs, right in zip(("out", "residual", "lse", "row_max"), first, served, exact, strict=True):
        both = [x for x in (ours, theirs) if x is not None]
        if name == "residual":  # O and what was lost of it together are nearer to the truth than O
            both = [hi.double() + lo.double() / scale for hi, lo in zip((first[0], served[0]), both, strict=True)]
        error, allowed = (distance(x, right) for x in both)
        figures[name] = [error, allowed]
        if not error <= 1.1 * allowed + 2e-6:
            wrong.append(f"{name} errs by {error:.2e}, Triton's by {allowed:.2e}")
    if case.batch == 3 or case.length_q == 1000:  # the backward's kernels take long to compile
        grads, others = (gradients(query, key, value, grad, outputs, plain) for outputs in (first, served))
        for name, a, b in zip(("dq", "dk", "dv"), grads[0], others[0], strict=True):
            figures[name] = distance(a, b.double())
            if not figures[name] < (1e-2 if case.dtype == "bfloat16" else 2e-3):
                wrong.append(f"{name} is {figures[name]:.2e} from Triton's")
        figures["rows, tied rows"] = [grads[1], others[1]]
    for _ in range(10):
        same("other bits at a repetition, or when remembered", run(), first)
    same("other bits without the residual", run(residual=False), first)
    modes = torch.zeros(case.heads[0], dtype=torch.int32, device="cuda")
    same("other bits with modes", run(modes), first)
    given = (Mode.ROW_CORRECTED, Mode.STABLE_SOFTMAX, Mode.EXACT_DELTA, Mode.PAPER_SOFTMAX | Mode.ROW_CORRECTED)
    modes.copy_(torch.tensor([int(mode) for mode in (*given, *[0] * case.heads[0])])[: case.heads[0]])
    shifts = (modes & int(Mode.STABLE_SOFTMAX | Mode.PAPER_SOFTMAX)) != 0
    switched = [x for x in run(modes) if x is not None]
    same("other bits beside a head that shifts", [x[:, ~shifts] for x in switched], [x[:, ~shifts] for x in kept])
    if not all(bool((x[:, shifts] == 7.0).all()) for x in switched):
        wrong.append("a head that shifts was written")
    modes.fill_(int(Mode.STABLE_SOFTMAX))
    if not all(bool((x == 7.0).all()) for x in run(modes) if x is not None):
        wrong.append("heads that all shift were written")
    return {"case": case._asdict(), "wrong": sorted(set(wrong)), **figures}


def truth(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O twice, log-sum-exp and row maximum in float64."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = spec.scale * (q @ k.transpose(-1, -2))
    if spec.causal != "none":
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    lse, row_max = scores.logsumexp(-1), scores.amax(-1)
    out = torch.exp(scores.sub_(lse.nan_to_num(neginf=0.0)[..., None])) @ v
    return out, out, lse, row_max


def distance(given: Tensor, exact: Tensor) -> float:
    """Of numbers of a row the largest, of tiles relative to the norm; infinite where infinities differ."""
    given = given.double()
    finite = exact.isfinite()
    if not torch.equal(finite, given.isfinite()) or not torch.equal(exact[~finite], given[~finite]):
        return math.inf
    difference = (given - exact)[finite]
    return float(difference.abs().max() if exact.dim() == 3 else difference.norm() / exact[finite].norm())


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, outputs: Any, given: Arguments
) -> tuple[tuple[Tensor, ...], list[float]]:
    """The backward of what a forward stored, and how many rows it counted as tied."""
    state = new_state(query.shape[1], "cuda")
    grads = backward.attention_backward(grad, Saved(query, key, value, *outputs), state, given)
    counts = state.cpu().numpy()
    ties = [slot_values(counts, slot).sum() for slot in (Slot.ROWS, Slot.TIED_ROWS_BF16)]
    return grads, [float(x) for x in ties]


def contenders(dim: int, length: int, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Forwards of 16,384 tokens of width 2048. They keep no residual where none is named; `free` take no turns."""
    torch.manual_seed(dim + length + causal)
    shape = (16_384 // length, 2048 // dim, length, dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lost = torch.empty_like(query), torch.empty_like(query)
    lse, row_max = (torch.empty(shape[:3], device="cuda") for _ in range(2))
    modes = torch.zeros(shape[1], dtype=torch.int32, device="cuda")
    spec = AttentionSpec(dim**-0.5, "top_left" if causal else "none")

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    def ours(kernel: str, given_modes: Tensor | None = None, residual: Tensor | None = None, **options: Any) -> None:
        given = Arguments(given_modes, None, None, length, length, None, spec)
        call = call_of(query, key, value, given)
        outputs = (out, residual, lse, row_max)
        if kernel == "triton":
            config = configs(call.capability, call.block_d, call.mean_keys).forward
            forward.launch_forward(call, config, (query, key, value), outputs, given)
        else:
            launch_hopper_forward(call, (query, key, value), outputs, given_modes, **options)

    calls: dict[str, Callable[[], object]] = {
        "cudnn": cudnn,
        "served": lambda: flash_attention(query, key, value, causal=causal),
        "triton": partial(ours, "triton"),
        "triton, residual": partial(ours, "triton", None, lost),
        "triton, residual, modes": partial(ours, "triton", modes, lost),
        "prototype": lambda: hopper_prototype.forward(query, key, value, causal=causal),
        "gluon": partial(ours, "gluon"),
        "gluon, residual": partial(ours, "gluon", None, lost),
        "gluon, residual, modes": partial(ours, "gluon", modes, lost),
        "free": partial(ours, "gluon", turns=False),
        "free, residual": partial(ours, "gluon", None, lost, turns=False),
    }
    if dim == 64:
        calls["gluon, 3 stages"] = partial(ours, "gluon", stages=3)
    return calls


CELLS: Final = tuple(itertools.product((128, 64), (False, True), (1024, 4096, 8192)))


GROUPS: Final = ("cudnn served triton prototype", "gluon", "free")
"""First words of the contenders. Kernels that wait in different ways are tried apart: one may wait for ever."""


def measure(cell: int, repeats: int, *groups: int) -> dict[str, Any]:
    """Milliseconds of one cell's contenders of these groups; 0 repeats make their kernels, so that they lie on disk."""
    dim, causal, length = CELLS[cell]
    words = " ".join(GROUPS[group] for group in groups).split()
    calls = {k: v for k, v in contenders(dim, length, causal=causal).items() if k.split(",")[0] in words}
    wrong = []
    for name, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            del calls[name]
            wrong.append(f"{name}: {type(error).__name__}: {error}"[-300:])
    said: dict[str, Any] = {"wrong": wrong, "head_dim": dim, "causal": causal, "length": length}
    if repeats:
        with torch.no_grad():
            took = Stopwatch(repeats).medians(calls)
        work = 4 * 16_384 * length * 2048 * (0.5 if causal else 1.0)
        said |= {"milliseconds": took, "TFLOP/s": {name: round(work / ms / 1e9, 1) for name, ms in took.items()}}
    return said


def carry_out(tasks: list[str]) -> None:
    """What a part's process does: one line of JSON for each task."""
    for task in tasks:
        name, *numbers = task.split()
        try:
            first, *rest = map(int, numbers)
            said = check(CASES[first]) if name == "check" else measure(first, *rest)
        except Exception as error:
            said = {"wrong": [f"{type(error).__name__}: {error}"[-600:]]}
        print(json.dumps(said), flush=True)
        if any("CUDA error" in x or "AcceleratorError" in x for x in said.get("wrong", ())):
            sys.exit(BROKEN)


def in_processes(tasks: list[str], count: int, ends: float) -> list[dict[str, Any]]:
    """What the tasks say, shared among as many processes, each killed where it says nothing for 75 seconds."""
    command = [sys.executable, "-P", "-m", "foreshock.benchmarks.hopper_forward", "--tasks"]
    parts = [Watched(command, tasks[i::count], 75.0, ends) for i in range(count)]
    return [said for part in parts for said in part.wait()]


def main() -> None:
    """Check every case in eight processes, then measure the grid in one. Needs a GPU of compute capability 9.0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--seconds", type=float, default=200.0, help="when to stop")
    parser.add_argument("--tasks", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this needs an H100 or H200; on other machines `compiled` shows that the kernel compiles")
    if given.tasks:
        carry_out(given.tasks)
        return
    begun = time.monotonic()
    made = [(cell, group) for group in range(len(GROUPS)) for cell in range(len(CELLS))]
    tasks = [*(f"check {i}" for i in range(len(CASES))), *(f"measure {cell} 0 {group}" for cell, group in made)]
    result: dict[str, Any] = machine.header("python -P -m foreshock.benchmarks.hopper_forward --json FILE")
    checks = in_processes(tasks, 8, begun + 0.7 * given.seconds)
    wrong = [x for x in checks if x["wrong"]]
    hung = {x["task"].split()[-1] for x in wrong if x["task"].startswith("measure") and "head_dim" not in x}
    groups = " ".join(str(group) for group in range(len(GROUPS)) if str(group) not in hung)
    timed = [f"measure {cell} 25 {groups}" for cell in range(len(CELLS))]
    cells = in_processes(timed, 1, begun + given.seconds)
    result |= {"tasks": len(tasks), "wrong": wrong, "cells": cells, "checks": checks}
    result["seconds"] = round(time.monotonic() - begun)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(wrong)} of {len(checks)} tasks went wrong, of {len(tasks)} that were given", flush=True)


if __name__ == "__main__":
    main()
