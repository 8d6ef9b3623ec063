"""FSDP2 under transformers' Trainer and under Accelerate, in two processes: the same with foreshock and without."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor import trainer_ranks

from foreshock.contract.slots import Slot, slot_values

WORLD = 2

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank tells."""
    folder: Path = tmp_path_factory.mktemp("trainers")
    processes = []
    for rank in range(WORLD):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        environment = os.environ | place | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        with (folder / f"log{rank}").open("w") as log:
            command = [sys.executable, "-P", trainer_ranks.__file__, str(WORLD), str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        ended = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert ended == [0] * WORLD, "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(WORLD))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


TRAINERS = ("Trainer", "Accelerate")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_sharded_training_that_stops_and_resumes_is_the_same_to_the_last_bit_with_keep(
    trainer: str, told: list[dict[Any, Any]]
) -> None:
    for rank in told:
        plain, watched = rank[trainer, False], rank[trainer, True]
        assert plain["sharded"]
        assert watched["sharded"]
        assert plain["steps"] == watched["steps"] == trainer_ranks.STEPS
        assert [float(loss) for loss in watched["losses"]] == [float(loss) for loss in plain["losses"]]
        assert all(torch.equal(a, b) for a, b in zip(watched["weights"], plain["weights"], strict=True))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_rank_measures_its_own_rows_at_every_step(trainer: str, told: list[dict[Any, Any]]) -> None:
    words = [rank[trainer, True]["words"] for rank in told]
    for of_rank in words:
        assert len(of_rank) == trainer_ranks.STEPS
        assert all(set(slot_values(sample, Slot.ROWS).tolist()) == {5} for sample in of_rank)
    assert not any(np.array_equal(mine, theirs) for mine, theirs in zip(*words, strict=True))
