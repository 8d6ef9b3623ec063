"""What it costs to attach, to compare the kernels before they serve, and what each way to watch costs a step.

The command: `python -P -m foreshock.benchmarks.attach_cost --json benchmarks/results/attach_cost.json`; about two
minutes on two quiet cores. Attach is timed on a model of 32 layers. Steps of a GPT of two layers at S = 1024 are timed
in interleaved blocks of a multiple of the probe's cadence, with no agent and with each value of `attention`; told are
medians and their ratios to none. The proof is one comparison of the kind of calls that the model makes.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.monitor import attach
from foreshock.monitor.attention.proof import Kind, difference

ALONE: dict[str, Any] = {"url": None, "quiet": True, "spool_directory": None}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, E]."""
        query, key, value = (
            t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).split(x.shape[2], dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed(x)
        return out


def model(layers: int, width: int, heads: int) -> nn.Module:
    """Blocks alone: the embedding and the head would only add to what is not measured."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, heads) for _ in range(layers)))


def attach_seconds(repeats: int) -> list[float]:
    """Seconds of each attach to a model of 32 layers."""
    watched, seconds = model(32, 64, 4), []
    for _ in range(repeats):
        began = time.perf_counter()
        agent = attach(watched, **ALONE)
        seconds.append(time.perf_counter() - began)
        agent.close()
    return seconds


def step_seconds(blocks: int, steps: int, length: int) -> dict[str, list[float]]:
    """Mean seconds of a step in each block, by what serves the attention."""
    x = torch.randn(2, length, 256)
    ways: dict[str, dict[str, Any] | None] = {way: {"attention": way} for way in ("keep", "kernels")}
    ways["none"] = None
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    template = model(2, 256, 4)
    for block in range(blocks):
        turned = [*ways, *ways][block % len(ways) :][: len(ways)]  # whatever one leaves behind meets each other
        for way in turned:
            settings = ways[way]
            trained = copy.deepcopy(template)
            optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
            agent = attach(trained, **ALONE, **settings) if settings is not None else None

            def step(trained: nn.Module = trained, optimizer: Any = optimizer, agent: Any = agent) -> None:
                loss = trained(x).square().mean()
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if agent is not None:
                    agent.step(loss.detach())

            step()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            seconds[way].append((time.perf_counter() - began) / steps)
            if agent is not None:
                agent.close()
    return seconds


def proof_seconds(repeats: int) -> list[float]:
    """Seconds of each comparison of our kernels with PyTorch's attention, in calls as the model makes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = Kind(device, "bfloat16", "kernel", 64, 1, "top_left")
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        told = difference(kind)
        assert told is None, told
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7, help="blocks of steps of each way")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block; a multiple of the probe's cadence, 10")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    attaches = attach_seconds(10)
    proofs = proof_seconds(3)
    medians = {way: statistics.median(s) for way, s in step_seconds(chosen.blocks, chosen.steps, chosen.length).items()}
    print(f"attach to 32 layers: first {attaches[0]:.3f} s, median {statistics.median(attaches):.3f} s (0.5 at most)")
    print(f"proof of a kind of calls: first {proofs[0]:.3f} s, median {statistics.median(proofs):.3f} s")
    for way, median in medians.items():
        print(f"{way:8} {1e3 * median:8.1f} ms a step, {median / medians['none']:.3f} of none")
    if chosen.json is not None:
        figures = {
            "command": "python -P -m foreshock.benchmarks.attach_cost " + " ".join(sys.argv[1:]),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attach_seconds": attaches,
            "proof_seconds": proofs,
            "step_seconds": medians,
            "ratio_to_none": {way: median / medians["none"] for way, median in medians.items()},
        }
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
