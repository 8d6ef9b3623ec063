"""Norms of W_Q and W_K: correct in every layout, or unknown with a reason."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.monitor.layouts import (
    DIM,
    HEADS,
    LAYOUTS,
    WIDTH,
    Holder,
    always,
    fused_conv1d,
    layer_of,
    linear_with,
    separate,
    torchtitan_separate,
)
from tests.monitor.tiny_models import GroupedQueryAttention
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from foreshock.monitor import attach
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.model.discovery import Found, find_attention
from foreshock.monitor.model.layers import (
    find_projection,
    spans_of,
    tensor_parallel_dims,
    why_unmeasured,
)
from foreshock.monitor.model.norms import ModelNorms
from foreshock.monitor.model.openness import key_bias_of


@pytest.mark.parametrize(
    ("name", "value", "normalised"),
    [
        ("q_norm", nn.RMSNorm(DIM), True),
        ("query_ln", nn.LayerNorm(DIM), True),
        ("ln_k", nn.LayerNorm(DIM), True),
        ("qk_norm", True, True),
        ("query_ln", nn.Identity(), False),
        ("q_norm", None, False),
        ("qk_norm", False, False),
        ("ln_inner", nn.LayerNorm(DIM), False),
    ],
)
def test_module_with_qk_norm_has_no_norms(name: str, value: Any, normalised: bool) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    if value is None:
        module.register_module(name, None)
    else:
        setattr(module, name, value)
    projection = find_projection(module, HEADS, HEADS, DIM)
    assert projection is not None
    reason = "norms are not measured: its queries and keys are normalised, so its weights alone do not bound its scores"
    description = LayoutCheck(module, HEADS, projection).describe()
    assert description == (reason if normalised else "separate (q_proj, k_proj)")


class PeftLinear(nn.Module):
    """A module with the attributes and forward of peft's lora.Linear."""

    def __init__(self, base: nn.Module, out: int, inputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.out_features = out
        self.lora_A = nn.ModuleDict({"first": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"first": nn.Linear(2, out, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B["first"](self.lora_A["first"](x))
        return self.base_layer(x) + added  # type: ignore[no-any-return]


@pytest.mark.promise("A23")
@pytest.mark.parametrize("bias", ["trained", "frozen", "none"])
def test_adapters_have_no_norms_and_the_key_bias_of_the_base_layer(bias: str) -> None:
    query, key = (PeftLinear(linear_with(torch.randn(HEADS * DIM, WIDTH)), HEADS * DIM, WIDTH) for _ in range(2))
    base: Any = key.base_layer
    base.bias = None if bias == "none" else nn.Parameter(torch.zeros(HEADS * DIM), requires_grad=bias == "trained")
    module = Holder(q_proj=query, k_proj=key)
    assert find_projection(module, HEADS, HEADS, DIM) is None
    assert why_unmeasured(module) == "q_proj is tests's PeftLinear, which has adapters"
    assert key_bias_of([Found("", module, HEADS, HEADS, DIM)]) == bias


def attention() -> GroupedQueryAttention:
    torch.manual_seed(17)
    module = GroupedQueryAttention(WIDTH, HEADS, HEADS)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


class NoisyWeight(nn.Module):
    """A parametrization that adds fresh noise at each read, like quantisation-aware training."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.01 * torch.randn_like(weight)


def three_steps(module: nn.Module, agent: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(23)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        loss = module(torch.randn(2, 7, WIDTH)).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if agent is not None:
            agent.step(loss.detach())
    return {**module.state_dict(), "next random number": torch.randn(1)}


def add_observer(projection: nn.Linear) -> None:
    """Adds a fake-quantisation observer, which updates its range at each read of the weight."""
    parametrize.register_parametrization(projection, "weight", FakeQuantize(MovingAverageMinMaxObserver))  # type: ignore[no-untyped-call]


WEIGHT_CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "spectral norm": parametrizations.spectral_norm,
    "the older spectral norm": torch.nn.utils.spectral_norm,
    "noise": lambda projection: parametrize.register_parametrization(projection, "weight", NoisyWeight()),
    "an observer": add_observer,
}


def change_weights(module: GroupedQueryAttention, change: str) -> None:
    torch.manual_seed(29)
    for projection in (module.wq, module.wk):
        WEIGHT_CHANGES[change](projection)


@pytest.mark.promise("A22")
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("change", WEIGHT_CHANGES)
def test_parametrized_weight_is_never_read_even_if_added_while_attached(change: str, attached: bool) -> None:
    module, other = attention(), attention()
    change_weights(other, change)
    unwatched_state = three_steps(other)
    if not attached:
        change_weights(module, change)
    with attach(module, url=None, quiet=True, norms_every_steps=1, strict=True) as agent:
        if attached:
            change_weights(module, change)
        watched_state = three_steps(module, agent)
        report = agent.report()
    assert unwatched_state.keys() == watched_state.keys()
    assert all(torch.equal(unwatched_state[name], watched_state[name]) for name in unwatched_state)
    if not attached and change in ("spectral norm", "noise"):
        reason = "whose weight is not a plain matrix"
        assert f"norms are not measured: wq is torch's ParametrizedLinear, {reason}" in report
    assert "watched 1 of 1" in report


class WithInputRotation(nn.Module):
    """Like peft's tuners: exposes the base layer's weight but transforms its input."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.turn = base, nn.Linear(WIDTH, WIDTH)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(self.turn(x))  # type: ignore[no-any-return]


class Quantised(Tensor):
    """Like torchao's tensors: int8 values with a scale, but a float dtype."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor) -> None:
        self.numbers = weight.mul(127).to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of quantised numbers")


def with_quantised_key() -> GroupedQueryAttention:
    module = attention()
    module.wk.weight = nn.Parameter(Quantised(module.wk.weight.detach()), requires_grad=False)
    return module


def with_rotated_input() -> GroupedQueryAttention:
    module = attention()
    module.wk = WithInputRotation(module.wk)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("make", "kind"), [(with_rotated_input, "tests's WithInputRotation"), (with_quantised_key, "torch's Linear")]
)
def test_layer_with_an_indirect_weight_is_watched_without_norms(make: Callable[[], nn.Module], kind: str) -> None:
    (found,) = find_attention(make(), {})
    assert (found.problem, found.head_dim, found.projection) == (None, WIDTH // HEADS, None)
    assert found.unmeasured == f"wk is {kind}, whose weight is not a plain matrix"


@pytest.mark.parametrize("sizes", [{"kdim": 16}, {"vdim": 16}])
def test_multihead_attention_with_separate_weights_has_no_norms(sizes: dict[str, int]) -> None:
    (found,) = find_attention(nn.MultiheadAttention(WIDTH, HEADS, **sizes), {})
    assert found.projection is None
    assert found.unmeasured == "it has no stored in_proj_weight: kdim or vdim is set, or the weight is computed"


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[DeviceMesh]:
    """Pretends to be one rank of several, with a mesh that cannot communicate."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        torch.distributed.destroy_process_group()


def shard(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes each weight a DTensor with this rank's shard, like fully_shard and parallelize_module."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            if weight.dim() == 2:
                shape, offset = compute_local_shape_and_global_offset(weight.shape, mesh, [placement])
                local = weight.detach()[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].clone()
                sharded = DTensor.from_local(
                    local, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
                )
                setattr(owner, name, nn.Parameter(sharded))


@pytest.mark.promise("A13")
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize(
    ("layout", "kv_heads"), [case for case in LAYOUTS if case[0] not in (fused_conv1d, torchtitan_separate)]
)
def test_ranks_together_measure_each_head_that_one_rank_has_completely(
    layout: Callable[[Tensor, Tensor], nn.Module], kv_heads: int, world: int
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(kv_heads, DIM, WIDTH)
    whole = layout(query, key)
    measurements = []
    for rank in range(world):
        module = copy.deepcopy(whole)
        with fake_rank(rank, world) as mesh:
            shard(module, mesh, Shard(0))
            projection = find_projection(module, HEADS, kv_heads, DIM)
            assert projection is not None
            norms = ModelNorms([layer_of(kv_heads)], [always(projection)])
            measured = [norms.measure() for _ in range(40)][-1]
            assert projection.gaps == ", norms of heads that one process holds whole"
        if measured:
            measurements.append(torch.stack([measured["query_norm"], measured["key_norm"], measured["query_key_norm"]]))
    keys_per_query_head = key.repeat_interleave(HEADS // kv_heads, 0)
    true_norms = torch.stack(
        [torch.linalg.matrix_norm(w, 2) for w in (query, keys_per_query_head, query.mT @ keys_per_query_head)]
    )
    stacked = torch.stack(measurements)
    measured_by = stacked.isfinite().sum(0)
    torch.testing.assert_close(stacked.nan_to_num(0).amax(0), true_norms * (measured_by > 0), rtol=1e-3, atol=0)
    assert measured_by.max() == 1


@pytest.mark.promise("A13")
@pytest.mark.parametrize("world", [2, 3, 12])
def test_weights_sharded_along_their_inputs_have_no_norms(world: int) -> None:
    torch.manual_seed(0)
    whole = fused_conv1d(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    for rank in range(world):
        module = copy.deepcopy(whole)
        with fake_rank(rank, world) as mesh:
            shard(module, mesh, Shard(0))
            found = find_projection(module, HEADS, HEADS, DIM)
            assert found is not None
            assert ModelNorms([layer_of(HEADS)], [always(found)]).measure() == {}


@pytest.mark.parametrize("rank", range(4))
def test_fsdp_and_tensor_parallel_shards_are_distinguished_on_a_2d_mesh(rank: int) -> None:
    torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(WIDTH, WIDTH)
        parallelize_module(layer, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(layer, mesh=mesh["dp"])
        dims = tensor_parallel_dims(layer.weight, under_fsdp=True)
        dp, tp = divmod(rank, 2)
        assert dims == [1]
        assert spans_of(layer.weight, dims)[0] == (16 * tp, 16 * tp + 16)
        assert spans_of(layer.weight)[0] == (16 * tp + 8 * dp, 16 * tp + 8 * dp + 8)
        assert layer.weight.to_local().shape == (8, WIDTH)  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()
