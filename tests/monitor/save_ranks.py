"""One process of several, for tests: torchrun ... save_ranks.py FOLDER trains with DDP; the second process alone warns.

FOLDER/RANK.pt says after which steps it was asked for a checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from tests.monitor.test_save_requests import warn
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.monitor import attach


def main() -> None:
    """Forty steps, each of which may save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(tiny_gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    asked = []
    with attach(model, run="r", quiet=True, strict=True, sample_every_steps=1, sample_every_seconds=0.0) as agent:
        if rank == 1:
            warn(agent)
        for step in range(40):
            agent.step(train_step(model, optimizer, step))
            if agent.should_save:
                asked.append(agent.current_step)
                dist.barrier()
    torch.save(asked, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
