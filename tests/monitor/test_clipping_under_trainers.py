"""Transformers' Trainer and torchtitan with Muon, at too high a rate: QK-Clip, as one argument, holds the scores.

On a CPU and on a GPU, in one process and in two: sharded by FSDP2, and for Trainer as replicas of DDP too.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.muon_ranks import STEPS
from tests.monitor.torchrun import trained

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).parent / "muon_ranks.py"
TAU = 100.0
"""What QK-Clip leaves alone where nobody says otherwise."""
DEVICES = [("cpu", 1), ("cpu", 2), *(("cuda", world) for world in range(1, 1 + min(2, torch.cuda.device_count())))]
TRAINERS = [
    "Trainer",
    "Trainer with DDP",
    pytest.param(
        "torchtitan",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan 0.2.2, which is optional"
        ),
    ),
]


@pytest.mark.parametrize(("device", "world"), DEVICES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_scores_that_muon_lets_grow_stay_below_twice_the_threshold_with_qk_clip_as_one_argument(
    trainer: str, device: str, world: int, tmp_path: Path
) -> None:
    ranks = trained(PROGRAM, world, tmp_path, device, trainer)
    assert max(_scores(ranks, "free")) > 2 * TAU
    assert TAU < max(_scores(ranks, "clipped")) < 2 * TAU
    told = [event for event in ranks[0]["clipped"]["events"] if event.heads]
    assert told
    assert all(event.on and max(event.factors) < 1 for event in told)
    assert told[-1].total == sum(sum(event.times) for event in told) > 0
    for rank in ranks:
        assert "heads were scaled" in rank["clipped"]["report"]
        assert "QK-Clip" not in rank["free"]["report"]
        for way, course in rank.items():
            assert course["sharded"] == (trainer == "Trainer" or (trainer == "torchtitan" and world > 1))
            assert course["faults"] == {}
            assert "watched 2 of 2 attention layers" in course["report"]
            assert "left out" not in course["report"]
            assert len(course["losses"]) == STEPS
            assert all(map(math.isfinite, course["losses"]))
            for own, first in zip(course["weights"], ranks[0][way]["weights"], strict=True):
                assert torch.isfinite(own).all()
                assert torch.equal(own, first)


def _scores(ranks: list[dict[str, dict[str, Any]]], way: str) -> list[float]:
    """The largest score of every step, of all ranks."""
    assert all(len(rank[way]["scores"]) == STEPS for rank in ranks)
    return [max(scores) for scores in zip(*(rank[way]["scores"] for rank in ranks), strict=True)]
