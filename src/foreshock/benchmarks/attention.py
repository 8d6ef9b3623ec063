"""Speed of foreshock's attention kernels compared with PyTorch's: `foreshock bench attention --json FILE`.

With `--modes`: the cost of each mode if every head has it, compared with plain heads and cuDNN. All implementations run
in one process and take turns. Each call is timed with CUDA events after the cache was flushed; the result is the median
over the calls of an implementation.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foreshock.benchmarks import machine
from foreshock.contract.modes import MODES, Mode
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels.backward import launch_backward
from foreshock.kernels.flash_attention.triton_kernels.forward import launch_fastest
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

TOKENS = 16_384
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
WIDTHS = ((64, 32), (128, 16))
"""Pairs of head dim and number of heads, for a width of 2048."""
MODE_LENGTHS = ((1024, True), (2048, True), (8192, True), (4096, False))
_OWN, _PLAIN_HEADS = "foreshock", "plain"
_MODES = {mode.name: mode.flag for mode in MODES}
Cell = dict[str, Any]
"""Result of one shape and pass: fields of the shape, and `milliseconds` per contender, None if it failed."""


PASSES = ("forward", "backward", "both")

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An implementation: query [B, H, Sq, D], key and value [B, Hkv, Sk, D] to the output [B, H, Sq, D]."""
Timed = tuple[Callable[[], object], Callable[[], object]]
"""Untimed preparation of a call, and the timed call."""


class Stopwatch:
    """Times interleaved calls, each after a write of 256 MB that flushes the cache."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def medians(self, calls: dict[str, Timed]) -> dict[str, float]:
        """Return the median time of each call in milliseconds."""
        for prepare, call in calls.values():
            for _ in range(2):
                prepare()
                call()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()  # as timeit does, because a garbage collection takes longer than any of these calls
        for _ in range(self.repeats):
            for name, (prepare, call) in calls.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                prepare()
                self.flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        gc.enable()
        torch.cuda.synchronize()
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def passes(call: Contender, tensors: tuple[Tensor, ...], grad: Tensor) -> dict[str, Timed]:
    """Return the forward, the backward and both of one contender on the same tensors.

    Each backward follows its own, untimed forward, because a second backward through a retained graph does not count
    rows.
    """
    made: list[Tensor] = []

    def forward() -> object:
        with torch.no_grad():
            return call(*tensors)

    forward()
    return {
        "forward": (lambda: None, forward),
        "backward": (lambda: made.append(call(*tensors)), lambda: torch.autograd.grad(made.pop(), tensors, grad)),
        "both": (lambda: None, lambda: torch.autograd.grad(call(*tensors), tensors, grad)),
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the grid: tensors [TOKENS / seq_len, heads, seq_len, head_dim] with [B, S, H, D] in memory."""

    head_dim: int
    heads: int
    kv_heads: int
    seq_len: int
    causal: bool


def grid() -> list[Shape]:
    """Return the measured shapes: the full grid, and grouped-query attention at two lengths."""
    shapes = [Shape(d, h, h, n, causal) for d, h in WIDTHS for causal in (True, False) for n in LENGTHS]
    grouped = [Shape(d, h, h // 8, n, True) for d, h in WIDTHS for n in (2048, 8192)]
    return shapes + grouped


class _Plain(torch.autograd.Function):
    """Foreshock's kernels without statistics: they do not count rows, nor store the rounding residual."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        spec = AttentionSpec(scale=query.shape[3] ** -0.5, causal="top_left" if causal else "none")
        given = Arguments(None, None, None, query.shape[2], key.shape[2], None, spec)
        call = call_of(query, key, value, given)
        chosen = configs(call.capability, call.block_d, call.mean_keys)
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:-1], device=query.device)
        row_max = torch.empty_like(lse)
        launch_fastest(call, (query, key, value), (out, None, lse, row_max, None), given)
        ctx.save_for_backward(query, key, value, out, lse, row_max)
        ctx.call, ctx.chosen = call, chosen
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, row_max = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        given = Tensors(grad, query, key, value, out, None, lse, row_max, None, None, None, None, None, None)
        launch_backward(ctx.call, ctx.chosen, given, grads)
        return (*grads, None)


def foreshock(shape: Shape, mode: Mode, device: str = "cuda") -> Contender:
    """Return foreshock's attention with statistics of all rows, with all heads in `mode`."""
    state = new_state(shape.heads, device)
    modes = torch.full((shape.heads,), int(mode), dtype=torch.int32, device=device)
    note_modes(modes, [mode] * shape.heads)  # as an agent does
    causal = "top_left" if shape.causal else "none"
    return lambda q, k, v: flash_attention(  # type: ignore[call-overload]
        q, k, v, causal=causal, state=state, modes=modes
    )


def sdpa(shape: Shape, backend: SDPBackend) -> Contender:
    """Return PyTorch's attention with one of its backends."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query, key, value, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    return call


def contenders(shape: Shape) -> dict[str, Contender]:
    """Return the implementations that are timed on a shape, by column name."""
    return {
        "foreshock": foreshock(shape, Mode.PLAIN),
        "foreshock_plain": lambda q, k, v: _Plain.apply(q, k, v, shape.causal),  # type: ignore[no-untyped-call]
        "sdpa_flash": sdpa(shape, SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": sdpa(shape, SDPBackend.CUDNN_ATTENTION),
    }


def modes_beside_plain(shape: Shape, device: str) -> dict[str, Contender]:
    """Return attention with plain heads and with each mode, with statistics of all rows, and cuDNN."""
    ours = {name: foreshock(shape, mode, device) for name, mode in {_PLAIN_HEADS: Mode.PLAIN, **_MODES}.items()}
    return {**ours, "sdpa_cudnn": sdpa(shape, SDPBackend.CUDNN_ATTENTION)}


def timed(
    shape: Shape,
    stopwatch: Stopwatch,
    found: Mapping[str, Contender],
    which_passes: Iterable[str],
    device: str,
) -> list[Cell]:
    """Time one shape and return a cell per pass. A contender that fails has None; its error is printed on stderr."""
    generator = torch.Generator(device).manual_seed(0)
    batch = max(1, TOKENS // shape.seq_len)

    def draw(heads: int) -> Tensor:
        sizes = (batch, shape.seq_len, heads, shape.head_dim)
        tensor = torch.randn(sizes, dtype=torch.bfloat16, device=device, generator=generator)
        return tensor.transpose(1, 2).requires_grad_()

    tensors = (draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads))
    grad = draw(shape.heads).detach()
    runs = {}
    for name, call in found.items():
        try:
            runs[name] = passes(call, tensors, grad)
        except Exception as error:  # a contender may not support a shape; this does not fail the benchmark
            print(f"{name} does not take {shape}: {error}", file=sys.stderr)
    cells = []
    for which in which_passes:
        medians = stopwatch.medians({name: run[which] for name, run in runs.items()})
        cells.append(asdict(shape) | {"pass": which, "milliseconds": {name: medians.get(name) for name in found}})
    return cells


def line(cell: Cell, own: str) -> str:
    """Format one cell: milliseconds of each contender, and their ratio to those of `own`."""
    taken = cell["milliseconds"]
    shape = f"D {cell['head_dim']}, {cell['heads']}/{cell['kv_heads']} heads, S {cell['seq_len']}"
    mask = "causal" if cell["causal"] else "full"
    found = (
        f"{name} -" if ms is None else f"{name} {ms:.3f}" + (f" ({ms / taken[own]:.2f})" if name != own else "")
        for name, ms in taken.items()
    )
    return f"{shape}, {mask}, {cell['pass']}: {', '.join(found)}"


def ratios(cells: Sequence[Cell], own: str) -> dict[str, dict[str, float]]:
    """Return the ratio of each contender's time to that of `own` for S >= 2048, by head dim, pass and contender.

    Each result has the geometric mean, the least and the largest ratio. Failed cells are ignored.
    """
    found: dict[str, list[float]] = {}
    for cell in cells:
        for name, ms in cell["milliseconds"].items():
            if cell["seq_len"] >= 2048 and ms and name != own:
                key = f"D {cell['head_dim']} {cell['pass']} {name}"
                found.setdefault(key, []).append(ms / cell["milliseconds"][own])
    return {
        key: {"mean": statistics.geometric_mean(each), "least": min(each), "most": max(each)}
        for key, each in found.items()
    }


def main(file: Path | None = None, repeats: int = 15, *, modes: bool = False) -> None:
    """Measure the grid, or with `modes` the cost of each mode; print and write it to `file`. Needs a CUDA GPU."""
    option = " --modes" if modes else ""
    if not torch.cuda.is_available():
        raise SystemExit(f"foreshock bench attention{option} needs a CUDA GPU, and PyTorch sees none here")
    command = f"foreshock bench attention{option} --repeats {repeats}" + (f" --json {file.name}" if file else "")
    of_modes = [Shape(d, h, h, n, causal) for n, causal in MODE_LENGTHS for d, h in WIDTHS]
    run(Stopwatch(repeats), file, machine.header(command), of_modes if modes else grid(), modes=modes)


def run(
    stopwatch: Stopwatch,
    file: Path | None,
    header: dict[str, Any],
    shapes: Sequence[Shape],
    *,
    modes: bool,
    device: str = "cuda",
) -> None:
    """Time each shape and print its results; after each shape, write all results so far to `file`."""
    began, own = time.monotonic(), _PLAIN_HEADS if modes else _OWN
    cells: list[Cell] = []

    for shape in shapes:
        given = modes_beside_plain(shape, device) if modes else contenders(shape)
        found = timed(shape, stopwatch, given, PASSES[1:] if modes else PASSES, device)
        cells += found
        print("\n".join(line(cell, own) for cell in found), flush=True)
        if file is not None:
            result = {"unit": "milliseconds, median", "seconds": round(time.monotonic() - began)}
            result |= {f"ratios to {own}": ratios(cells, own), "cells": cells}
            file.write_text(json.dumps(header | result, indent=1) + "\n")
    for name, each in ratios(cells, own).items():
        print(f"{name}: {each['mean']:.3f} ({each['least']:.3f} to {each['most']:.3f}) times as long as {own}")
