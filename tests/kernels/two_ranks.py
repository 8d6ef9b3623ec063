"""One of two processes, for tests: python -P two_ranks.py RANK FOLDER trains a layer of attention under DDP and FSDP2.

On two GPUs by NCCL, else on the CPU by gloo. Both ranks save their loss, gradients and statistics to FOLDER/RANK.pt.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import flash_attention, new_state

HEADS, DIM, ROWS, LENGTH = 4, 16, 2, 40
"""Heads and their size; rows of a rank; tokens of a row."""


class Attention(nn.Module):
    """Causal attention between two projections, in bf16; its state and modes are buffers that no wrapper touches."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.to(device)
        self.state = new_state(HEADS, device)
        self.modes = torch.tensor([0, Mode.EXACT_DELTA, Mode.PAPER_SOFTMAX, 0], dtype=torch.int32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in self.into(x).chunk(3, -1))
        out = flash_attention(query, key, value, causal=True, state=self.state, modes=self.modes)
        mixed: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return mixed


def rows(device: torch.device) -> Tensor:
    """The rows of both ranks, [2 * ROWS, LENGTH, HEADS * DIM]."""
    return torch.randn(2 * ROWS, LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(1)).to(device)


def step(layer: Attention, wrapped: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One forward and backward: loss, state, and whole gradients by parameter, all on the CPU."""
    loss = wrapped(x).square().mean()
    loss.backward()
    found = {"loss": loss.detach(), "state": layer.state}
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # a DTensor under FSDP2
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def main(rank: int, folder: Path) -> None:
    """Train this rank's half of the rows in both ways."""
    on_gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    mine = rows(device)[rank * ROWS : (rank + 1) * ROWS]
    replica = Attention(device)
    found = {"DDP": step(replica, DistributedDataParallel(replica), mine)}
    sharded = Attention(device)
    fully_shard(sharded, mesh=init_device_mesh(device.type, (2,)))
    found["FSDP2"] = step(sharded, sharded, mine)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), Path(sys.argv[2]))
