"""What it costs to attach, to prove the kernels, and what each way to watch costs a step.

The command: `python -P -m foreshock.benchmarks.attach_cost --json benchmarks/results/attach_cost.json`; about two
minutes on two quiet cores. Attach is timed on a model of 32 layers. Steps of a GPT of two layers at S = 1024 are timed
in interleaved blocks of a multiple of the probe's cadence, with no agent and with each value of `attention`; told are
medians and their ratios to none. The proof is what the first steps of `auto` take longer, where it proves: on a GPU by
itself, on a CPU because it is told to here, with the reference in the kernels' place, which is the slower of the two.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

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
    ways: dict[str, dict[str, Any] | None] = {"none": None, "keep": {"attention": "keep"}, "auto": {}}
    ways["kernels"] = {"attention": "kernels"}
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


def proof_steps(repeats: int, length: int) -> list[float]:
    """What the proof of all layers takes, in steps of the model alone: steps with it less as many without."""
    x, first = torch.randn(2, length, 256), 4
    template, costs = model(2, 256, 4), []
    template(x)  # what only the first call of all pays
    for _ in range(repeats):
        seconds = []
        for proves in (False, True):
            trained = copy.deepcopy(template)
            with mock.patch.dict(attach.__globals__, {"_accelerated": lambda device: True}):
                agent = attach(trained, **ALONE, probe_every_steps=10**6) if proves else None
            began = time.perf_counter()
            for _ in range(first):
                loss = trained(x).square().mean()
                torch.autograd.backward(loss)
                if agent is not None:
                    if all(proof.done for proof in agent._instruments.keeper.proofs):  # type: ignore[union-attr]
                        break  # our kernels would serve from here on
                    agent.step(loss.detach())
            seconds.append(time.perf_counter() - began)
            if agent is not None:
                agent.close()
        done = 2  # calls of a layer that a proof takes, one in each step
        costs.append((seconds[1] - seconds[0] * done / first) / (seconds[0] / first))
    return costs


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7, help="blocks of steps of each way")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block; a multiple of the probe's cadence, 10")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    attaches = attach_seconds(10)
    proof = statistics.median(proof_steps(3, chosen.length))
    medians = {way: statistics.median(s) for way, s in step_seconds(chosen.blocks, chosen.steps, chosen.length).items()}
    print(f"attach to 32 layers: first {attaches[0]:.3f} s, median {statistics.median(attaches):.3f} s (0.5 at most)")
    print(f"proof of all layers: the time of {proof:.1f} steps (3 at most)")
    for way, median in medians.items():
        print(f"{way:8} {1e3 * median:8.1f} ms a step, {median / medians['none']:.3f} of none")
    if chosen.json is not None:
        figures = {
            "command": "python -P -m foreshock.benchmarks.attach_cost " + " ".join(sys.argv[1:]),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attach_seconds": attaches,
            "proof_in_steps": proof,
            "step_seconds": medians,
            "ratio_to_none": {way: median / medians["none"] for way, median in medians.items()},
        }
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
