"""The processes of one host that train one run together: each takes its rows of every batch."""

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
    """This process among `world`; by default it trains alone."""

    rank: int = 0
    world: int = 1

    def rows(self, batch: int, most: int | None = None) -> tuple[slice, int]:
        """Which rows of a batch this process takes, and how many of them at once: a divisor, at most `most`.

        The batch is the same whatever the number of processes: these only share it out. Raises ValueError where they
        cannot.
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
        """`values` of all processes, averaged. Every process calls it at the same place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values / self.world

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks, in the first one; nothing in the others."""
        if self.world == 1:
            return [value]
        heard: list[Any] = [None] * self.world
        dist.gather_object(value, heard if self.rank == 0 else None)
        return heard if self.rank == 0 else []


@contextmanager
def launched() -> Iterator[Ranks]:
    """This process among those that torchrun started on this host, each with a GPU of its own where there are any."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # raises for more processes than GPUs
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
