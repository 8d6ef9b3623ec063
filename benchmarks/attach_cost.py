"""What it costs to attach, and what the default costs a step on a CPU.

The command: `python -P -m foreshock.benchmarks.attach_cost`. Attach is timed on a model of 32 layers, detach with it.
Steps of a GPT of two layers at S = 1024 are timed in interleaved blocks, each as long as the probe's cadence, with no
agent, with `attach(model)`, and with `attach(model, attention="kernels")`; printed are medians and their ratios.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.monitor import attach

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
    ways: dict[str, dict[str, Any] | None] = {"none": None, "auto": {}, "kernels": {"attention": "kernels"}}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    template = model(2, 256, 4)
    for _ in range(blocks):
        for way, settings in ways.items():
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7, help="blocks of steps of each way")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block; a multiple of the probe's cadence, 10")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    chosen = parser.parse_args()
    attaches = attach_seconds(10)
    print(f"attach to 32 layers: first {attaches[0]:.3f} s, median {statistics.median(attaches):.3f} s")
    medians = {way: statistics.median(s) for way, s in step_seconds(chosen.blocks, chosen.steps, chosen.length).items()}
    for way, median in medians.items():
        print(f"{way:8} {1e3 * median:8.1f} ms a step, {median / medians['none']:.3f} of none")


if __name__ == "__main__":
    main()
