"""QK-Clip in two processes (gloo, on the CPU): replicas of a head get one gamma, and nobody scales alone."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.monitor import clip_ranks, ranks
from tests.monitor.latent_models import two_latent_layers
from torch import Tensor

WORLD = 2
Weights = list[list[Tensor]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank tells of every way."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    processes = []
    for rank in range(WORLD):
        with (folder / f"log{rank}").open("w") as log:
            command = [sys.executable, "-P", clip_ranks.__file__, str(WORLD), str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=log))
    ended = [process.wait(timeout=240) for process in processes]
    assert ended == [0] * WORLD, "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(WORLD))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def same(one: Weights, other: Weights) -> bool:
    """Whether weights are the same to the bit after every step."""
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def changes(way: dict[str, Any], step: int) -> bool:
    """Whether the clip after this step changed a weight."""
    return not same([way["weights"][step - 1]], [way["weights"][step]])


@pytest.mark.parametrize(
    ("way", "single"),
    [
        ("replicas", "nano"),
        ("kept", "nano"),
        ("FSDP2", "nano"),
        ("FSDP2, separate", "grouped"),
        ("FSDP2, Conv1D", "conv1d"),
        ("FSDP2, latent", "latent"),
    ],
)
def test_two_processes_give_what_one_gives_with_both_batches_to_the_bit(way: str, single: str, told: Any) -> None:
    model = two_latent_layers() if single == "latent" else getattr(ranks, single)()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    threshold = clip_ranks.SMALL if single == "conv1d" else clip_ranks.TAU
    settings = clip_ranks.KEPT if way in ("kept", "FSDP2, latent") else {}
    one = clip_ranks.clipped(model, world=WORLD, rank=None, qk_clip="always", qk_clip_threshold=threshold, **settings)
    assert not same([before], one["weights"][:1])
    for rank in range(WORLD):
        assert same(told[rank][way]["weights"], one["weights"])
        assert told[rank][way]["faults"] == {}


def test_a_warning_in_one_process_switches_all_on_at_the_same_step(told: Any) -> None:
    ways = [told[rank]["warned"] for rank in range(WORLD)]
    assert same(ways[0]["weights"], ways[1]["weights"])
    assert same(ways[0]["weights"][:1], [[parameter.detach() for parameter in ranks.nano().parameters()]])
    assert changes(ways[0], 1)  # the step after the warning
    assert all("QK-Clip is on" in way["report"] for way in ways)


def test_a_fault_in_one_process_ends_it_in_all_before_any_scales_alone(told: Any) -> None:
    ways = [told[rank]["fault"] for rank in range(WORLD)]
    assert same(ways[0]["weights"], ways[1]["weights"])
    assert changes(ways[0], 1)
    assert not changes(ways[0], 2)
    assert "off at 0.05, another process cannot take part" in ways[0]["report"]
    assert "off at 0.05, a fault in finding the weights" in ways[1]["report"]
    assert [way["faults"] for way in ways] == [{}, {"qk_clip": 1}]


def test_heads_that_are_sharded_are_refused_until_the_processes_that_share_them_are_named(told: Any) -> None:
    for rank in range(WORLD):
        way = told[rank]["tensor parallel"]
        assert not changes(way, 1)
        assert "off at 0.05, the processes hold different heads or layers" in way["report"]
        assert "agent.qk_clip_with(group=...)" in way["report"]
    one = clip_ranks.clipped(ranks.grouped(), world=WORLD, rank=None, qk_clip="always")
    for rank in range(WORLD):
        way = told[rank]["tensor parallel, a group of one"]
        assert way["faults"] == {}
        torch.testing.assert_close(way["weights"], one["weights"])


def test_latent_attention_that_tensor_parallelism_spreads_is_refused_and_left_as_it_is(told: Any) -> None:
    before = [[parameter.detach() for parameter in two_latent_layers().parameters()]]
    for rank in range(WORLD):
        way = told[rank]["tensor parallel, latent"]
        assert "its projections are spread over processes by tensor parallelism" in way["report"]
        assert way["faults"] == {}
        assert same(way["weights"][-1:], before)
