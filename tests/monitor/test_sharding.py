"""W_Q and W_K of which each process holds a part: what it can measure, and what the service adds up."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.monitor.layouts import DIM, HEADS, LAYOUTS, WIDTH, fused_conv1d, known, layer_of, torchtitan_separate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from foreshock.monitor.model.layers import find_projection, part_of, tensor_parallel_dims
from foreshock.monitor.sampling.norms import ModelNorms


@contextmanager
def process(rank: int, world: int) -> Iterator[DeviceMesh]:
    """As if this were one process of several: a mesh over which nothing can be sent."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        torch.distributed.destroy_process_group()


def shard(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make every weight a DTensor of which this process holds its part, as fully_shard and parallelize_module do."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            if weight.dim() == 2:
                shape, offset = compute_local_shape_and_global_offset(weight.shape, mesh, [placement])
                local = weight.detach()[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].clone()
                parted = DTensor.from_local(
                    local, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
                )
                setattr(owner, name, nn.Parameter(parted))


@pytest.mark.promise("A13")
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize(
    ("layout", "kv_heads"), [case for case in LAYOUTS if case[0] not in (fused_conv1d, torchtitan_separate)]
)
def test_ranks_measure_together_every_head_whose_rows_one_of_them_holds_whole(
    layout: Callable[[Tensor, Tensor], nn.Module], kv_heads: int, world: int
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(kv_heads, DIM, WIDTH)
    whole = layout(query, key)
    seen, straddling = [], []
    for rank in range(world):
        module = copy.deepcopy(whole)
        with process(rank, world) as mesh:
            shard(module, mesh, Shard(0))
            projection = find_projection(module, HEADS, kv_heads, DIM)
            assert projection is not None
            norms = ModelNorms([layer_of(kv_heads)], [known(projection)])
            measured = [norms.measure() for _ in range(40)][-1]
            straddling.append(projection.unmeasured)
        if measured:
            seen.append(torch.stack([measured["query_norm"], measured["key_norm"]]))
    of_head = key.repeat_interleave(HEADS // kv_heads, 0)
    true = torch.stack([torch.linalg.matrix_norm(w, 2) for w in (query, of_head)])
    together = torch.stack(seen)
    measured_by = together.isfinite().sum(0)
    torch.testing.assert_close(together.nan_to_num(0).amax(0), true * (measured_by > 0), rtol=1e-3, atol=0)
    assert measured_by.max() == 1
    lost = (measured_by == 0).any(0).nonzero().flatten().tolist()
    assert straddling == [lost] * world  # every rank knows, without asking the others


@pytest.mark.promise("A13")
@pytest.mark.parametrize("world", [2, 3, 12])
def test_norms_of_spread_inputs_are_told_as_unmeasured_and_nothing_of_them_is_measured(world: int) -> None:
    torch.manual_seed(0)
    whole = fused_conv1d(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    for rank in range(world):
        module = copy.deepcopy(whole)
        with process(rank, world) as mesh:
            shard(module, mesh, Shard(0))
            found = find_projection(module, HEADS, HEADS, DIM)
            assert found is not None
            assert found.unmeasured == []
            assert found.gaps() == ", norms not measured: the inputs of W_Q or W_K are spread over processes"
            assert ModelNorms([layer_of(HEADS)], [known(found)]).measure() == {}


def test_a_weight_cut_over_two_dimensions_of_the_mesh_is_told_apart_into_storage_and_computation() -> None:
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(WIDTH, WIDTH)
        parallelize_module(layer, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(layer, mesh=mesh["dp"])
        dims = tensor_parallel_dims(layer.weight, under_fsdp=True)
        assert dims == [1]
        assert part_of(layer.weight).rows == (24, 32)
        assert part_of(layer.weight, dims).rows == (16, 32)
        for dp, tp in itertools.product(range(2), repeat=2):
            assert part_of(layer.weight, dims, (dp, tp)).rows == (16 * tp, 16 * tp + 16)
            assert part_of(layer.weight, None, (dp, tp)).rows == (16 * tp + 8 * dp, 16 * tp + 8 * dp + 8)
        assert layer.weight.to_local().shape == (8, WIDTH)  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()
