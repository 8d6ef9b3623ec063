"""One process of several, for tests: python -P clip_ranks.py WORLD RANK FOLDER clips in every way, saves what came."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from tests.monitor import ranks
from tests.monitor.doubles import ScriptedDetectors
from tests.monitor.latent_models import two_latent_layers
from tests.monitor.tiny_models import batch, train_step

from foreshock.contract import wire
from foreshock.monitor import Agent, attach

STEPS = 3
TAU = 0.05
SMALL = TAU / 1000
"""For transformers' Conv1D, whose initial weights are small."""
SETTINGS: dict[str, Any] = {
    "attention": "kernels", "numerics": "float32", "sample_every_steps": 1, "sample_every_seconds": 0.0, "quiet": True,
    "url": None, "run": "clipped", "qk_clip_threshold": TAU,
}  # fmt: skip
KEPT: dict[str, Any] = {"attention": "keep", "qk_clip_every_steps": 1, "probe_rows": 1}
WARNING = wire.Verdict(
    id="w", step=1, state="raised", severity="warning", layer=0, head=0, cause="score growth", signal="score",
    sentence="Layer 0 head 0: its scores grow.",
)  # fmt: skip


def clipped(
    model: nn.Module,
    *,
    world: int,
    rank: int | None,
    between: Callable[[Agent, int], None] = lambda *_: None,
    **settings: Any,
) -> dict[str, Any]:
    """Weights after each of some steps that no optimizer makes, by the clip alone, and what the agent tells of it.

    rank: takes its own rows of each batch; None: all rows of all ranks.
    """
    weights, rows = [], ranks.ROWS
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model, **SETTINGS | settings) as agent:
        for step in range(STEPS):
            between(agent, step)
            ids = batch(step, rows=rows * world)
            mine = ids if rank is None else ids[rank * rows : (rank + 1) * rows]
            agent.step(train_step(model, still, step, mine).detach())
            agent.state_dict()  # its verdicts have come
            weights.append([_whole(parameter) for parameter in model.parameters()])
        return {"weights": weights, "report": agent.report(), "faults": dict(agent.faults)}


def _whole(parameter: Tensor) -> Tensor:
    whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()  # type: ignore[no-any-return]


def warned_on(own: int | None) -> Callable[[Agent, int], None]:
    """Before the first step, detectors that warn in one process alone."""

    def script(agent: Agent, step: int) -> None:
        if step == 0:
            agent.detectors = ScriptedDetectors(4, {1: [WARNING]} if agent.config.rank == own else {})

    return script


def fails_on(own: int) -> Callable[[Agent, int], None]:
    """Before the third step, a fault in finding the weights, in one process alone."""

    def fail(agent: Agent, step: int) -> None:
        if step == 2 and agent.config.rank == own:
            agent._clipping._look_again = lambda: [][0]  # type: ignore[method-assign]

    return fail


def main(world: int, rank: int, folder: Path) -> None:
    """All checks, in the same order on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    spread: dict[str, Any] = {"world": world, "rank": rank}
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    told = {
        "replicas": clipped(ranks.nano(), qk_clip="always", **spread),
        "kept": clipped(ranks.nano(), qk_clip="always", **KEPT, **spread),
        "FSDP2": clipped(ranks.sharded(ranks.nano()), qk_clip="always", **spread),
        "FSDP2, separate": clipped(ranks.sharded(ranks.grouped()), qk_clip="always", **spread),
        "FSDP2, Conv1D": clipped(ranks.sharded(ranks.conv1d()), qk_clip="always", qk_clip_threshold=SMALL, **spread),
        "FSDP2, latent": clipped(ranks.sharded(two_latent_layers()), qk_clip="always", **KEPT, **spread),
        "warned": clipped(ranks.nano(), qk_clip="warned", policy="auto", between=warned_on(1), **spread),
        "fault": clipped(ranks.nano(), qk_clip="always", between=fails_on(1), **spread),
        "tensor parallel": clipped(
            ranks.tensor_parallel(ranks.grouped(), world), qk_clip="always", world=world, rank=None
        ),
        "tensor parallel, a group of one": clipped(
            ranks.tensor_parallel(ranks.grouped(), world), qk_clip="always", world=world, rank=None,
            between=alone_in(alone),
        ),
        "tensor parallel, latent": clipped(
            tensor_parallel_latent(world), qk_clip="always", world=world, rank=None, between=alone_in(alone), **KEPT
        ),
    }  # fmt: skip
    torch.save(told, folder / f"{rank}.pt")
    dist.destroy_process_group()


def tensor_parallel_latent(world: int) -> nn.Module:
    """Heads of latent attention over ranks: both up-projections by columns, the output by rows."""
    model = two_latent_layers()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        block.n_heads = block.n_heads // world  # type: ignore[operator,assignment]
        plan: Any = {"wq_b": ColwiseParallel(), "wkv_b": ColwiseParallel(), "wo": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def alone_in(group: Any) -> Callable[[Agent, int], None]:
    """Before the first step, tell that no other process holds the same heads."""

    def tell(agent: Agent, step: int) -> None:
        if step == 0:
            agent.qk_clip_with(group=group)

    return tell


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
