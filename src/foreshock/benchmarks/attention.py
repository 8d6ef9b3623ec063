"""Speed of attention beside its peers, all in one process and interleaved: `foreshock bench attention --json FILE`.
With `--modes`: what each mode costs if every head has it, beside plain heads and cuDNN.

Every contender's call is timed with device events after the cache was flushed, in turn with the others; a figure is the
median of its calls. Forward counts 4 B H Sq Sk D operations, half of it when causal; backward 2.5 times as many.
"""

import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foreshock.benchmarks import machine
from foreshock.benchmarks.stopwatch import PASSES, Contender, Stopwatch, passes
from foreshock.contract.modes import MODES, Mode
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels.backward import launch_backward
from foreshock.kernels.flash_attention.triton_kernels.forward import launch_fastest
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

TOKENS = 16_384
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
WIDTHS = ((64, 32), (128, 16))
"""Head dims, each with the heads of a width of 2048."""
MODE_LENGTHS = ((1024, True), (2048, True), (8192, True), (4096, False))
_OPERATIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
_PEERS = {"sdpa_flash": "flash", "sdpa_cudnn": "cuDNN", "flex": "flex"}
"""How the tables call the peers, by the names of their cells."""
_OWN, _PLAIN_HEADS = "foreshock", "plain"
_MODES = {mode.name: mode.flag for mode in MODES}
_BESIDE_PLAIN = {**{name: name for name in _MODES}, "sdpa_cudnn": "cuDNN"}


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the grid: tensors [TOKENS / seq_len, heads, seq_len, head_dim], laid out [B, S, H, D]."""

    head_dim: int
    heads: int
    kv_heads: int
    seq_len: int
    causal: bool

    @property
    def flops(self) -> float:
        """Operations of one forward."""
        pairs = TOKENS * self.seq_len * (0.5 if self.causal else 1.0)
        return 4 * self.heads * pairs * self.head_dim


def grid(lengths: Iterable[int] = LENGTHS) -> list[Shape]:
    """The shapes that are measured: the full grid, and grouped key heads at three lengths."""
    shapes = [Shape(d, h, h, n, causal) for d, h in WIDTHS for causal in (True, False) for n in lengths]
    grouped = [Shape(d, h, h // 8, n, True) for d, h in WIDTHS for n in lengths if n in (2048, 8192)]
    return shapes + grouped


class _Plain(torch.autograd.Function):
    """The same kernels with every statistic off: nothing is counted, and no rounding residual is kept."""

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
    """With statistics of all rows."""
    state = new_state(shape.heads, device)
    modes = torch.full((shape.heads,), int(mode), dtype=torch.int32, device=device)
    causal = "top_left" if shape.causal else "none"
    return lambda q, k, v: flash_attention(  # type: ignore[call-overload]
        q, k, v, causal=causal, state=state, modes=modes
    )


def sdpa(shape: Shape, backend: SDPBackend) -> Contender:
    """PyTorch's attention by one of its backends."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query, key, value, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    return call


def _flex(shape: Shape) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if shape.causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, shape.seq_len, shape.seq_len, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = shape.heads != shape.kv_heads
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def contenders(shape: Shape) -> dict[str, Contender]:
    """Who is timed on a shape, by the name of its column."""
    return {
        "foreshock": foreshock(shape, Mode.PLAIN),
        "foreshock_plain": lambda q, k, v: _Plain.apply(q, k, v, shape.causal),  # type: ignore[no-untyped-call]
        "sdpa_flash": sdpa(shape, SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": sdpa(shape, SDPBackend.CUDNN_ATTENTION),
        "flex": _flex(shape),
    }


def modes_beside_plain(shape: Shape, device: str = "cuda") -> dict[str, Contender]:
    """Plain heads, heads in every mode that kernels serve, and cuDNN, all with statistics of all rows."""
    ours = {name: foreshock(shape, mode, device) for name, mode in {_PLAIN_HEADS: Mode.PLAIN, **_MODES}.items()}
    return {**ours, "sdpa_cudnn": sdpa(shape, SDPBackend.CUDNN_ATTENTION)}


def timed(
    shape: Shape,
    stopwatch: Stopwatch,
    found: Mapping[str, Contender],
    which_passes: Iterable[str] = PASSES,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """The cells of one shape, one per pass. A contender that refuses the shape has None and its words on stderr."""
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
        except Exception as error:  # a peer's refusal is a result, not a failure of the benchmark
            print(f"{name} does not take {shape}: {error}", file=sys.stderr)
    cells = []
    for which in which_passes:
        medians = stopwatch.medians({name: run[which] for name, run in runs.items()})
        cells.append(asdict(shape) | {"pass": which} | {name: medians.get(name) for name in found})
    return cells


def measure_varlen(head_dim: int, heads: int, stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """Packed causal sequences of mixed lengths, against torch's own varlen attention, on [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = [256, 4096, 512, 2048, 1024, 128, 384, 1024, 2816, 4096]
    cumulative = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    tensors = tuple(
        torch.randn(TOKENS, heads, head_dim, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)
    )
    grad = torch.randn_like(tensors[0])
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )
    state, modes = new_state(heads, "cuda"), torch.zeros(heads, dtype=torch.int32, device="cuda")
    longest = max(lengths)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            causal="bottom_right",
            state=state,
            modes=modes,
            cu_seqlens_q=cumulative,
            cu_seqlens_k=cumulative,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        return out.squeeze(0).transpose(0, 1)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(query, key, value, cumulative, cumulative, longest, longest, **causal)  # type: ignore

    runs = {"foreshock": passes(ours, tensors, grad), "torch_varlen": passes(theirs, tensors, grad)}
    return [
        {"head_dim": head_dim, "heads": heads, "lengths": lengths, "causal": True, "pass": which}
        | stopwatch.medians({name: run[which] for name, run in runs.items()})
        for which in PASSES
    ]


def _ratio(cell: dict[str, Any], peer: str, own: str) -> str:
    return f"{cell[peer] / cell[own]:.2f}" if cell.get(peer) else "-"


def markdown(cells: list[dict[str, Any]]) -> str:
    """A table of lab/NOTEBOOK.md: milliseconds (TFLOP/s) of foreshock or of plain heads, then how
    many times as long each peer or mode takes."""
    own, named = (_OWN, _PEERS) if _OWN in cells[0] else (_PLAIN_HEADS, _BESIDE_PLAIN)
    timed_passes = [which for which in PASSES if any(cell["pass"] == which for cell in cells)]
    peers = [name for name in named if any(name in cell for cell in cells)]
    ratios = "/ " + " / ".join(named[name] for name in peers)
    columns = ["D, heads", "mask", "S", *(column for which in timed_passes for column in (which, ratios))]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for start in range(0, len(cells), len(timed_passes)):
        first = cells[start]
        shape = Shape(*(first[key] for key in ("head_dim", "heads", "kv_heads", "seq_len", "causal")))
        columns = [f"{shape.head_dim}, {shape.heads}/{shape.kv_heads}", "causal" if shape.causal else "full"]
        columns.append(str(shape.seq_len))
        for cell in cells[start : start + len(timed_passes)]:
            rate = _OPERATIONS[cell["pass"]] * shape.flops / cell[own] / 1e9
            columns.append(f"{cell[own]:.3f} ({rate:.0f})")
            columns.append(" / ".join(_ratio(cell, peer, own) for peer in peers))
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def summary(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over `both` from S = 2048, and the least and mean ratio to each peer over every cell."""
    both = [c for c in cells if c["pass"] == PASSES[-1] and c["seq_len"] >= 2048 and c["kv_heads"] == c["heads"]]
    result = {}
    if ratios := [c["foreshock"] / c["foreshock_plain"] for c in both if c.get("foreshock_plain")]:
        result = {
            "statistics_cost": statistics.geometric_mean(ratios) - 1,
            "statistics_cost_worst_cell": max(ratios) - 1,
        }
    for which in PASSES:
        for peer in _PEERS:
            ratios = [c[peer] / c["foreshock"] for c in cells if c["pass"] == which and c.get(peer)]
            if ratios:
                result[f"{which}_least_ratio_to_{peer}"] = min(ratios)
                result[f"{which}_mean_ratio_to_{peer}"] = statistics.geometric_mean(ratios)
    return result


def mode_costs(cells: list[dict[str, Any]]) -> dict[str, float]:
    """The mean and the largest ratio of each mode and of cuDNN to plain heads from S = 2048 on, for each head dim and
    pass. A cell that was refused is left out."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        for name in _BESIDE_PLAIN:
            if cell["seq_len"] >= 2048 and cell.get(name):
                key = f"D {cell['head_dim']} {cell['pass']} {name}"
                found.setdefault(key, []).append(cell[name] / cell[_PLAIN_HEADS])
    means = {f"{key} mean": statistics.geometric_mean(ratios) for key, ratios in found.items()}
    return means | {f"{key} worst": max(ratios) for key, ratios in found.items()}


def main(file: Path | None = None, repeats: int = 15, *, modes: bool = False, lengths: Sequence[int] = LENGTHS) -> None:
    """Measure the grid, or what each mode costs, print it, and write it to `file`. Needs a CUDA GPU."""
    option = " --modes" if modes else ""
    if not torch.cuda.is_available():
        raise SystemExit(f"foreshock bench attention{option} needs a CUDA GPU, and PyTorch sees none here")
    command = f"foreshock bench attention{option} --repeats {repeats}" + (f" --json {file.name}" if file else "")
    of_modes = [Shape(d, h, h, n, causal) for n, causal in MODE_LENGTHS for d, h in WIDTHS]
    run(Stopwatch(repeats), file, machine.header(command), of_modes if modes else grid(lengths), modes=modes)


def run(
    stopwatch: Stopwatch,
    file: Path | None,
    header: dict[str, Any],
    shapes: Sequence[Shape],
    *,
    modes: bool,
    device: str = "cuda",
) -> None:
    """Time every shape in turn, print its line, and write all that is known to `file`."""
    began = time.monotonic()
    cells: list[dict[str, Any]] = []
    varlen: list[dict[str, Any]] = []
    summed = mode_costs if modes else summary

    def keep() -> None:
        if file is not None:
            result = {"unit": "milliseconds, median", "seconds": round(time.monotonic() - began)}
            result |= {"summary": summed(cells), "cells": cells} | ({} if modes else {"varlen_cells": varlen})
            file.write_text(json.dumps(header | result, indent=1) + "\n")

    for shape in shapes:
        if modes:
            found = timed(shape, stopwatch, modes_beside_plain(shape, device), PASSES[1:], device)
        else:
            found = timed(shape, stopwatch, contenders(shape), device=device)
        *head, line = markdown(found).splitlines()
        print("\n".join([line] if cells else [*head, line]), flush=True)
        cells += found
        keep()
    for head_dim, heads in () if modes else WIDTHS:
        varlen += measure_varlen(head_dim, heads, stopwatch)
        keep()
    for cell in varlen:
        print(
            f"varlen D {cell['head_dim']} {cell['pass']:<8} foreshock {cell['foreshock']:.3f} ms, "
            f"torch varlen {cell['torch_varlen']:.3f} ms, ratio {_ratio(cell, 'torch_varlen', _OWN)}"
        )
    for name, value in summed(cells).items():
        print(f"{name}: {value:.3f}")
