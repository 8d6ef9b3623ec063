"""QK-Clip in two processes (gloo, on the CPU): all replicas of a head get the same gamma."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.monitor import ranks
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.latent_models import two_latent_layers
from tests.monitor.tiny_models import batch, train_step
from tests.monitor.torchrun import run_on_ranks
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
"""A threshold for transformers' Conv1D, whose initial weights are small."""
SETTINGS = EVERY_STEP | {"numerics": "float32", "run": "clipped", "qk_clip_threshold": TAU, "strict": False}
NATIVE: dict[str, Any] = {"attention": "keep", "probe_rows": 1}
WARNING = verdict(0, 0, cause="score growth", signal="score")


def clipped(
    model: nn.Module,
    *,
    rank: int | None,
    before_step: Callable[[Agent, int], None] = lambda *_: None,
    **settings: Any,
) -> dict[str, Any]:
    """Weights after each of some steps with learning rate 0, which only QK-Clip changes, and the agent's report.

    rank: trains on its rows of each batch; None: on the rows of all ranks.
    """
    weights, rows = [], ranks.ROWS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with patch.object(AgentConfig, "qk_clip_every_steps", 1), attach(model, **SETTINGS | settings) as agent:
        for step in range(STEPS):
            before_step(agent, step)
            ids = batch(step, rows=rows * WORLD)
            own_rows = ids if rank is None else ids[rank * rows : (rank + 1) * rows]
            agent.step(train_step(model, optimizer, step, own_rows).detach())
            agent.state_dict()  # waits for the verdicts
            weights.append([_whole(parameter) for parameter in model.parameters()])
        return {"weights": weights, "report": agent.report(), "faults": dict(agent.faults)}


def _whole(parameter: Tensor) -> Tensor:
    whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()  # type: ignore[no-any-return]


def warned_on(rank: int | None) -> Callable[[Agent, int], None]:
    """Before the first step, installs detectors that warn on one rank only."""

    def script(agent: Agent, step: int) -> None:
        if step == 0:
            agent.detectors = ScriptedDetectors(4, {1: [WARNING]} if agent.config.rank == rank else {})

    return script


def fails_on(rank: int) -> Callable[[Agent, int], None]:
    """Before the third step, makes one rank fail to find the weights."""

    def fail(agent: Agent, step: int) -> None:
        if step == 2 and agent.config.rank == rank:
            agent._clipping._look_again = lambda: [][0]  # type: ignore[method-assign]

    return fail


def tensor_parallel_latent() -> nn.Module:
    """Shards heads of latent attention: both up-projections by columns, the output by rows."""
    model = two_latent_layers()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        block.n_heads = block.n_heads // WORLD  # type: ignore[operator,assignment]
        plan: Any = {"wq_b": ColwiseParallel(), "wkv_b": ColwiseParallel(), "wo": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def with_group(group: Any) -> Callable[[Agent, int], None]:
    """Before the first step, sets the process group that shares the same heads."""

    def set_group(agent: Agent, step: int) -> None:
        if step == 0:
            agent.qk_clip_with(group=group)

    return set_group


def results_of_this_rank() -> dict[str, dict[str, Any]]:
    """All trainings, in the same order on every rank."""
    rank = dist.get_rank()
    group_of_one, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    always: dict[str, Any] = {"rank": rank, "qk_clip": "always"}
    all_rows = always | {"rank": None}
    return {
        "replicas": clipped(ranks.nano(), **always),
        "native": clipped(ranks.nano(), **always, **NATIVE),
        "FSDP2": clipped(ranks.sharded(ranks.nano()), **always),
        "FSDP2, separate": clipped(ranks.sharded(ranks.grouped()), **always),
        "FSDP2, Conv1D": clipped(ranks.sharded(ranks.conv1d()), qk_clip_threshold=SMALL, **always),
        "FSDP2, latent": clipped(ranks.sharded(two_latent_layers()), **always, **NATIVE),
        "warned": clipped(ranks.nano(), rank=rank, qk_clip="warned", policy="auto", before_step=warned_on(1)),
        "fault": clipped(ranks.nano(), before_step=fails_on(1), **always),
        "tensor parallel": clipped(ranks.tensor_parallel(ranks.grouped(), WORLD), **all_rows),
        "tensor parallel, a group of one": clipped(
            ranks.tensor_parallel(ranks.grouped(), WORLD), before_step=with_group(group_of_one), **all_rows
        ),
        "tensor parallel, latent": clipped(
            tensor_parallel_latent(), before_step=with_group(group_of_one), **all_rows, **NATIVE
        ),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    return run_on_ranks(results_of_this_rank, WORLD, tmp_path_factory.mktemp("ranks"), seconds=240)


def same_bits(single_process: Weights, other: Weights) -> bool:
    """Whether weights are bit-identical after every step."""
    return all(torch.equal(a, b) for x, y in zip(single_process, other, strict=True) for a, b in zip(x, y, strict=True))


def clip_changed(way: dict[str, Any], step: int) -> bool:
    """Whether QK-Clip changed a weight after this step."""
    return not same_bits([way["weights"][step - 1]], [way["weights"][step]])


@pytest.mark.parametrize(
    ("way", "single"),
    [
        ("replicas", "nano"),
        ("native", "nano"),
        ("FSDP2", "nano"),
        ("FSDP2, separate", "grouped"),
        ("FSDP2, Conv1D", "conv1d"),
        ("FSDP2, latent", "latent"),
    ],
)
def test_two_ranks_scale_like_one_process_with_both_batches_bit_for_bit(way: str, single: str, results: Any) -> None:
    model = two_latent_layers() if single == "latent" else getattr(ranks, single)()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    threshold = SMALL if single == "conv1d" else TAU
    settings = NATIVE if way in ("native", "FSDP2, latent") else {}
    single_process = clipped(model, rank=None, qk_clip="always", qk_clip_threshold=threshold, **settings)
    assert not same_bits([before], single_process["weights"][:1])
    for rank in range(WORLD):
        assert same_bits(results[rank][way]["weights"], single_process["weights"])
        assert results[rank][way]["faults"] == {}


def test_warning_on_one_rank_starts_clipping_on_all_at_the_same_step(results: Any) -> None:
    outcomes = [results[rank]["warned"] for rank in range(WORLD)]
    assert same_bits(outcomes[0]["weights"], outcomes[1]["weights"])
    assert same_bits(outcomes[0]["weights"][:1], [[parameter.detach() for parameter in ranks.nano().parameters()]])
    assert clip_changed(outcomes[0], 1)  # the step after the warning
    assert all("QK-Clip is on" in way["report"] for way in outcomes)


def test_fault_on_one_rank_stops_clipping_on_all_ranks(results: Any) -> None:
    outcomes = [results[rank]["fault"] for rank in range(WORLD)]
    assert same_bits(outcomes[0]["weights"], outcomes[1]["weights"])
    assert clip_changed(outcomes[0], 1)
    assert not clip_changed(outcomes[0], 2)
    assert "off at 0.05, another process cannot take part" in outcomes[0]["report"]
    assert "off at 0.05, an error occurred while finding the weights" in outcomes[1]["report"]
    assert [way["faults"] for way in outcomes] == [{}, {"qk_clip": 1}]


def test_sharded_heads_are_clipped_only_after_qk_clip_with_group(results: Any) -> None:
    for rank in range(WORLD):
        way = results[rank]["tensor parallel"]
        assert not clip_changed(way, 1)
        assert "off at 0.05, the processes have different heads, layers or settings" in way["report"]
        assert "agent.qk_clip_with(group=...)" in way["report"]
    single_process = clipped(ranks.grouped(), rank=None, qk_clip="always")
    for rank in range(WORLD):
        way = results[rank]["tensor parallel, a group of one"]
        assert way["faults"] == {}
        torch.testing.assert_close(way["weights"], single_process["weights"])


def test_tensor_parallel_latent_attention_is_not_clipped_and_the_report_says_why(results: Any) -> None:
    before = [[parameter.detach() for parameter in two_latent_layers().parameters()]]
    for rank in range(WORLD):
        way = results[rank]["tensor parallel, latent"]
        assert "no known layout shows how the outputs of its projections" in way["report"]
        assert way["faults"] == {}
        assert same_bits(way["weights"][-1:], before)
