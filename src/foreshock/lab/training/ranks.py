"""Data-parallel training on one host: each process computes its rows of every batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among `world` processes; by default the only one."""

    rank: int = 0
    world: int = 1

    def rows(self, batch: int, most: int | None = None) -> tuple[slice, int]:
        """Return this process's rows of a batch, and its micro-batch size: the largest divisor that is at most `most`.

        The global batch does not depend on the number of processes. Raises ValueError if they cannot split it evenly.
        """
        if batch % self.world:
            raise ValueError(
                f"a batch of {batch} sequences cannot be shared by {self.world} processes; start a number of processes "
                f"that divides {batch}"
            )
        own = batch // self.world
        at_once = max(count for count in range(1, min(own, most or own) + 1) if own % count == 0)
        return slice(self.rank * own, (self.rank + 1) * own), at_once

    def mean(self, values: Tensor) -> Tensor:
        """Average `values` over all processes, which must all call it. May overwrite `values`."""
        if self.world > 1:
            dist.all_reduce(values)
        return values / self.world

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of ranks on rank 0, and an empty list on the other ranks."""
        if self.world == 1:
            return [value]
        heard: list[Any] = [None] * self.world
        dist.gather_object(value, heard if self.rank == 0 else None)
        return heard if self.rank == 0 else []


@contextmanager
def launched() -> Iterator[Ranks]:
    """In a with block, join the process group that torchrun started on this host, with one GPU per process if any."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # raises if there are more processes than GPUs
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
