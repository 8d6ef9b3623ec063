"""One rank of data-parallel training over gloo: python -P rank.py URL SPOOL RANK RANKS RENDEZVOUS FIRST LAST.

Trains steps FIRST + 1 to LAST. If another rank exits first, the collective raises an exception and the process ends.
"""

import datetime
import sys
import time

import torch
from tests.faults.training import BUSY, Attention
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from foreshock.monitor import attach


def main(url: str, spool: str, rank_text: str, ranks_text: str, rendezvous: str, first: str, last: str) -> None:
    """Train with the arguments of the command line."""
    rank, ranks = int(rank_text), int(ranks_text)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    model = Attention()
    agent = attach(
        model,
        run="ranks",
        rank=rank,
        world_size=ranks,
        url=url,
        spool_directory=spool,
        **BUSY,
    )
    agent.begin_at(int(first))
    parallel = DistributedDataParallel(model)
    with agent:
        for step in range(int(first) + 1, int(last) + 1):
            parallel(torch.ones(1, 4, 8)).square().mean().backward()
            agent.step(float(step))
            time.sleep(0.02)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
