"""Transformers' Trainer, Accelerate and torchtitan, sharded and not: the same with foreshock and without, also resumed.

On a CPU in two processes; on one GPU and, where there are more, on two, in bf16.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.monitor.resumed_courses import assert_foreshock_changed_no_bit
from tests.monitor.torchrun import trained

pytestmark = pytest.mark.full

PROGRAMS = Path(__file__).parent
GPUS = [("cuda", world) for world in range(1, 1 + min(2, torch.cuda.device_count()))]


@pytest.mark.parametrize(
    ("trainer", "device", "world"),
    [
        ("Trainer", "cpu", 2),
        ("Accelerate", "cpu", 2),
        *((trainer, *gpus) for trainer in ("Trainer", "Accelerate", "Accelerate with DDP") for gpus in GPUS),
    ],
)
def test_a_training_that_stops_and_resumes_is_the_same_with_foreshock_to_the_last_bit(
    trainer: str, device: str, world: int, tmp_path: Path
) -> None:
    told = trained(PROGRAMS / "trainer_ranks.py", world, tmp_path, device, trainer)
    assert all(course["sharded"] == ("DDP" not in trainer) for rank in told for course in rank.values())
    assert_foreshock_changed_no_bit(told, device)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan 0.2.2, which is optional")
@pytest.mark.parametrize(("device", "world"), [("cpu", 1), ("cpu", 2), *GPUS])
def test_a_training_by_torchtitan_that_stops_and_resumes_is_the_same_with_foreshock_to_the_last_bit(
    device: str, world: int, tmp_path: Path
) -> None:
    told = trained(PROGRAMS / "titan_ranks.py", world, tmp_path, device)
    assert all(course["sharded"] == (world > 1) for rank in told for course in rank.values())
    assert_foreshock_changed_no_bit(told, device)
