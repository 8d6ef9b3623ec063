"""Cost of the spectral norms of a large model's heads: `foreshock bench spectral --json FILE`. Needs a CUDA GPU.

32 layers of 32 heads, d_model 4096, the size of a 7B model. A call is timed with device events; the median of its
repeats, spread over the steps of the agent's default cadence, is what a training step pays. The norms are compared with
the singular values of some heads, taken in float64.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreshock.benchmarks import machine
from foreshock.kernels.spectral import SpectralNorms
from foreshock.monitor.config import AgentConfig

LAYERS, HEADS, HEAD_DIM, WIDTH = 32, 32, 128, 4096
_CHECKED_HEADS = 8


def _milliseconds(norms: SpectralNorms, query: list[Tensor], key: list[Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    norms(query, key)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _worst_error(norms: SpectralNorms, query: list[Tensor], key: list[Tensor]) -> float:
    """Largest relative error of W_Q, W_K and W_Q W_K^T of some heads of the last layer, against singular values."""
    found = torch.stack([norm[-1, :_CHECKED_HEADS] for norm in norms(query, key)]).double()
    q, k = (weights[-1][:_CHECKED_HEADS].double() for weights in (query, key))
    # The singular values of W_Q^T W_K are those of R_Q R_K^T, [D, D], where W^T = Q R.
    r_q, r_k = (torch.linalg.qr(weights.mT).R for weights in (q, k))
    truth = torch.stack([torch.linalg.matrix_norm(x, 2) for x in (q, k, r_q @ r_k.mT)])
    return (found / truth - 1).abs().max().item()


def measure(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """One model's weights, random and in `dtype`, followed through `repeats` small changes."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(HEADS, HEAD_DIM, WIDTH, device="cuda", generator=generator).mul_(WIDTH**-0.5).to(dtype)

    query, key = [draw() for _ in range(LAYERS)], [draw() for _ in range(LAYERS)]
    norms = SpectralNorms()
    _milliseconds(SpectralNorms(), query, key)  # what a first call loads is no cost of this one
    first = _milliseconds(norms, query, key)
    later, extra = [], 0
    for _ in range(repeats):
        for weights in query + key:
            weights.add_(weights.roll(1, -1), alpha=0.02)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        later.append(_milliseconds(norms, query, key))
        extra = max(extra, torch.cuda.max_memory_allocated() - before)
    every = AgentConfig.model_fields["norms_every_steps"].default
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "first_call_milliseconds": first,
        "later_call_milliseconds": statistics.median(later),
        "every_steps": every,
        "milliseconds_a_step": statistics.median(later) / every,
        "extra_bytes": extra,
        "worst_relative_error": _worst_error(norms, query, key),
    }


def main(json_path: str | None = None, repeats: int = 9) -> None:
    """Measure weights in float32 and bfloat16, print, and write `json_path`."""
    if not torch.cuda.is_available():
        raise SystemExit("foreshock bench spectral needs a CUDA GPU, and this machine has none that PyTorch sees")
    models = [measure(dtype, repeats) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        print(
            f"{LAYERS} layers x {HEADS} heads, d_model {WIDTH}, {model['dtype']}: first call "
            f"{model['first_call_milliseconds']:.2f} ms, later {model['later_call_milliseconds']:.2f} ms; every "
            f"{model['every_steps']} steps, {model['milliseconds_a_step']:.3f} ms a step; "
            f"worst error {model['worst_relative_error']:.4f}"
        )
    if json_path is not None:
        result = {
            **machine.header(f"foreshock bench spectral --repeats {repeats} --json {Path(json_path).name}"),
            "layers": LAYERS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "d_model": WIDTH,
            "models": models,
        }
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
