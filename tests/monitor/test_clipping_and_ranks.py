"""QK-Clip in two processes (gloo, on the CPU): replicas of a head get one gamma, and nobody scales alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.monitor import ranks
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.latent_models import two_latent_layers
from tests.monitor.tiny_models import batch, train_step
from tests.monitor.torchrun import trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from foreshock.monitor import Agent, AgentConfig, attach

pytestmark = pytest.mark.full
WORLD = 2
Weights = list[list[Tensor]]
STEPS = 3
TAU = 0.05
SMALL = TAU / 1000
"""For transformers' Conv1D, whose initial weights are small."""
SETTINGS = EVERY_STEP | {"numerics": "float32", "run": "clipped", "qk_clip_threshold": TAU, "strict": False}
KEPT: dict[str, Any] = {"attention": "keep", "probe_rows": 1}
WARNING = verdict(0, 0, cause="score growth", signal="score")


def clipped(
    model: nn.Module,
    *,
    rank: int | None,
    between: Callable[[Agent, int], None] = lambda *_: None,
    **settings: Any,
) -> dict[str, Any]:
    """Weights after each of some steps that no optimizer makes, by the clip alone, and what the agent tells of it.

    rank: takes its own rows of each batch; None: all rows of all ranks.
    """
    weights, rows = [], ranks.ROWS
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    with patch.object(AgentConfig, "qk_clip_every_steps", 1), attach(model, **SETTINGS | settings) as agent:
        for step in range(STEPS):
            between(agent, step)
            ids = batch(step, rows=rows * WORLD)
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


def tensor_parallel_latent() -> nn.Module:
    """Heads of latent attention over ranks: both up-projections by columns, the output by rows."""
    model = two_latent_layers()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        block.n_heads = block.n_heads // WORLD  # type: ignore[operator,assignment]
        plan: Any = {"wq_b": ColwiseParallel(), "wkv_b": ColwiseParallel(), "wo": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def alone_in(group: Any) -> Callable[[Agent, int], None]:
    """Before the first step, tell that no other process holds the same heads."""

    def tell(agent: Agent, step: int) -> None:
        if step == 0:
            agent.qk_clip_with(group=group)

    return tell


def ways_of_a_rank() -> dict[str, dict[str, Any]]:
    """All checks, in the same order on every rank."""
    rank = dist.get_rank()
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    always: dict[str, Any] = {"rank": rank, "qk_clip": "always"}
    of_all = always | {"rank": None}
    return {
        "replicas": clipped(ranks.nano(), **always),
        "kept": clipped(ranks.nano(), **always, **KEPT),
        "FSDP2": clipped(ranks.sharded(ranks.nano()), **always),
        "FSDP2, separate": clipped(ranks.sharded(ranks.grouped()), **always),
        "FSDP2, Conv1D": clipped(ranks.sharded(ranks.conv1d()), qk_clip_threshold=SMALL, **always),
        "FSDP2, latent": clipped(ranks.sharded(two_latent_layers()), **always, **KEPT),
        "warned": clipped(ranks.nano(), rank=rank, qk_clip="warned", policy="auto", between=warned_on(1)),
        "fault": clipped(ranks.nano(), between=fails_on(1), **always),
        "tensor parallel": clipped(ranks.tensor_parallel(ranks.grouped(), WORLD), **of_all),
        "tensor parallel, a group of one": clipped(
            ranks.tensor_parallel(ranks.grouped(), WORLD), between=alone_in(alone), **of_all
        ),
        "tensor parallel, latent": clipped(tensor_parallel_latent(), between=alone_in(alone), **of_all, **KEPT),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank tells of every way."""
    return trained(ways_of_a_rank, WORLD, tmp_path_factory.mktemp("ranks"), seconds=240)


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
    threshold = SMALL if single == "conv1d" else TAU
    settings = KEPT if way in ("kept", "FSDP2, latent") else {}
    one = clipped(model, rank=None, qk_clip="always", qk_clip_threshold=threshold, **settings)
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
    assert "off at 0.05, an error occurred while finding the weights" in ways[1]["report"]
    assert [way["faults"] for way in ways] == [{}, {"qk_clip": 1}]


def test_heads_that_are_sharded_are_refused_until_the_processes_that_share_them_are_named(told: Any) -> None:
    for rank in range(WORLD):
        way = told[rank]["tensor parallel"]
        assert not changes(way, 1)
        assert "off at 0.05, the processes have different heads, layers or settings" in way["report"]
        assert "agent.qk_clip_with(group=...)" in way["report"]
    one = clipped(ranks.grouped(), rank=None, qk_clip="always")
    for rank in range(WORLD):
        way = told[rank]["tensor parallel, a group of one"]
        assert way["faults"] == {}
        torch.testing.assert_close(way["weights"], one["weights"])


def test_latent_attention_that_tensor_parallelism_spreads_is_refused_and_left_as_it_is(told: Any) -> None:
    before = [[parameter.detach() for parameter in two_latent_layers().parameters()]]
    for rank in range(WORLD):
        way = told[rank]["tensor parallel, latent"]
        assert "no known layout shows how the outputs of its projections" in way["report"]
        assert way["faults"] == {}
        assert same(way["weights"][-1:], before)
