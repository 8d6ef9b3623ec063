"""Speed of attention beside its peers, all in one process and interleaved: `foreshock bench attention --json FILE`.

Every contender's call is timed with device events after the cache was flushed, in turn with the others; a figure is the
median of its calls. Forward counts 4 B H Sq Sk D operations, half of it when causal; backward 2.5 times as many.
"""

import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foreshock.benchmarks import machine
from foreshock.benchmarks.stopwatch import PASSES, Contender, Stopwatch, passes
from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels.backward import launch_backward
from foreshock.kernels.flash_attention.triton_kernels.forward import launch_fastest
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

TOKENS = 16_384
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
_OPERATIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
_PEERS = {"sdpa_flash": "flash", "sdpa_cudnn": "cuDNN", "flex": "flex"}
"""How the tables call the peers, by the names of their cells."""


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
    shapes = [
        Shape(head_dim, heads, heads, length, causal)
        for head_dim, heads in ((64, 32), (128, 16))
        for causal in (True, False)
        for length in lengths
    ]
    grouped = [Shape(d, h, h // 8, n, True) for d, h in ((64, 32), (128, 16)) for n in lengths if n in (2048, 8192)]
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


def _ratio(cell: dict[str, Any], peer: str) -> str:
    return f"{cell[peer] / cell['foreshock']:.2f}" if cell.get(peer) else "-"


def markdown(cells: list[dict[str, Any]]) -> str:
    """A table of kernels/flash_attention/README.md: milliseconds (TFLOP/s), then peer / foreshock for each peer that
    was timed."""
    peers = [name for name in _PEERS if any(name in cell for cell in cells)]
    ratios = "/ " + " / ".join(_PEERS[name] for name in peers)
    columns = ["D, heads", "mask", "S", *(column for which in PASSES for column in (which, ratios))]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for start in range(0, len(cells), len(PASSES)):
        first = cells[start]
        shape = Shape(*(first[key] for key in ("head_dim", "heads", "kv_heads", "seq_len", "causal")))
        columns = [f"{shape.head_dim}, {shape.heads}/{shape.kv_heads}", "causal" if shape.causal else "full"]
        columns.append(str(shape.seq_len))
        for cell in cells[start : start + len(PASSES)]:
            rate = _OPERATIONS[cell["pass"]] * shape.flops / cell["foreshock"] / 1e9
            columns.append(f"{cell['foreshock']:.3f} ({rate:.0f})")
            columns.append(" / ".join(_ratio(cell, peer) for peer in peers))
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


def main(json_path: str | None = None, repeats: int = 15, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Measure the grid, print it, and write it to `json_path`. Needs a CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("foreshock bench attention needs a CUDA GPU, and this machine has none that PyTorch sees")
    began, stopwatch = time.monotonic(), Stopwatch(repeats)
    cells: list[dict[str, Any]] = []
    varlen: list[dict[str, Any]] = []

    def keep() -> None:
        if json_path is None:
            return
        result = {
            **machine.header(f"foreshock bench attention --repeats {repeats} --json {Path(json_path).name}"),
            "unit": "milliseconds, median",
            "seconds": round(time.monotonic() - began),
            "summary": summary(cells),
            "cells": cells,
            "varlen_cells": varlen,
        }
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")

    for shape in grid(lengths):
        found = timed(shape, stopwatch, contenders(shape))
        *head, line = markdown(found).splitlines()
        print("\n".join([line] if cells else [*head, line]), flush=True)
        cells += found
        keep()
    for head_dim, heads in ((64, 32), (128, 16)):
        varlen += measure_varlen(head_dim, heads, stopwatch)
        keep()
    for cell in varlen:
        print(
            f"varlen D {cell['head_dim']} {cell['pass']:<8} foreshock {cell['foreshock']:.3f} ms, "
            f"torch varlen {cell['torch_varlen']:.3f} ms, ratio {_ratio(cell, 'torch_varlen')}"
        )
    for name, value in summary(cells).items():
        print(f"{name}: {value:.3f}")
