"""W_Q and W_K of every head in every layout, against the singular values of the true matrices."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.pytorch_utils import Conv1D

from foreshock.contract.wire import Grams, Layer
from foreshock.monitor.model.adapters import adapted
from foreshock.monitor.model.layers import find_projection, why_unmeasured
from foreshock.monitor.model.sharding import part_of, tensor_parallel_dims
from foreshock.monitor.sampling.norms import ModelNorms
from foreshock.monitor.sampling.sample import GramsDraft
from foreshock.server.ingest.grams import spectral_norms

HEADS, DIM, WIDTH = 4, 8, 32


class Holder(nn.Module):
    """A module whose only content is its projections."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear_with(rows: Tensor) -> nn.Linear:
    layer = nn.Linear(rows.shape[1], rows.shape[0])
    layer.weight.data.copy_(rows)
    return layer


def conv1d_with(rows: Tensor) -> nn.Module:
    layer = Conv1D(rows.shape[0], rows.shape[1])
    layer.weight.data.copy_(rows.t())
    return layer  # type: ignore[no-any-return]


def fused_linear(query: Tensor, key: Tensor) -> nn.Module:
    rows = torch.cat([query.flatten(0, 1), key.flatten(0, 1), torch.randn_like(key).flatten(0, 1)])
    return Holder(c_attn=linear_with(rows))


def fused_conv1d(query: Tensor, key: Tensor) -> nn.Module:
    rows = torch.cat([query.flatten(0, 1), key.flatten(0, 1), torch.randn_like(key).flatten(0, 1)])
    return Holder(c_attn=conv1d_with(rows))


def separate(query: Tensor, key: Tensor) -> nn.Module:
    return Holder(q_proj=linear_with(query.flatten(0, 1)), k_proj=linear_with(key.flatten(0, 1)))


def interleaved(query: Tensor, key: Tensor) -> nn.Module:
    groups = torch.unflatten(query, 0, (len(key), -1))
    parts = [torch.cat([group.flatten(0, 1), k, torch.randn_like(k)]) for group, k in zip(groups, key, strict=True)]
    return Holder(query_key_value=linear_with(torch.cat(parts)))


def torchtitan_separate(query: Tensor, key: Tensor) -> nn.Module:
    return Holder(qkv_linear=Holder(wq=linear_with(query.flatten(0, 1)), wk=linear_with(key.flatten(0, 1))))


def torchtitan_fused(query: Tensor, key: Tensor) -> nn.Module:
    fused = Holder(wqkv=interleaved(query, key).get_submodule("query_key_value"))
    fused.r_dim = len(query) // len(key) + 2  # type: ignore[assignment]
    return Holder(qkv_linear=fused)


def multihead(query: Tensor, key: Tensor) -> nn.Module:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    value = torch.randn(WIDTH, WIDTH)
    module.in_proj_weight.data.copy_(torch.cat([query.flatten(0, 1), key.flatten(0, 1), value]))
    return module


LAYOUTS = [
    (fused_linear, HEADS),
    (fused_conv1d, HEADS),
    (separate, HEADS),
    (interleaved, HEADS),
    (multihead, HEADS),
    (fused_linear, 2),
    (separate, 2),
    (interleaved, 2),
    (separate, 1),
    (torchtitan_separate, 2),
    (torchtitan_fused, 2),
]


@pytest.mark.parametrize(("layout", "kv_heads"), LAYOUTS)
def test_every_layout_gives_the_matrix_of_each_head_and_its_true_norm(
    layout: Callable[[Tensor, Tensor], nn.Module], kv_heads: int
) -> None:
    torch.manual_seed(kv_heads)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(kv_heads, DIM, WIDTH)
    query *= torch.arange(1, HEADS + 1).view(-1, 1, 1)  # every head has a norm of its own
    projection = find_projection(layout(query, key), HEADS, kv_heads, DIM)
    assert projection is not None
    for rows, true in zip((projection.query, projection.key), (query, key), strict=True):
        assert torch.equal(rows.read().weights, true)
    layer = Layer(layer=0, name="x", heads=range(HEADS), kv_heads=kv_heads, head_dim=DIM, served_by="reference")  # type: ignore[arg-type]
    norms = ModelNorms([layer], [projection])
    for _ in range(40):
        measured = norms.measure().norms
    of_head = key.repeat_interleave(HEADS // kv_heads, 0).double()
    svd = {
        "query_norm": torch.linalg.matrix_norm(query.double(), 2),
        "key_norm": torch.linalg.matrix_norm(of_head, 2),
        "query_key_norm": torch.linalg.matrix_norm(query.double().mT @ of_head, 2),
    }
    for name, true in svd.items():
        torch.testing.assert_close(measured[name].double(), true, rtol=1e-3, atol=0)


def test_weights_are_read_as_they_are_now() -> None:
    torch.manual_seed(0)
    module = fused_linear(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    projection = find_projection(module, HEADS, HEADS, DIM)
    assert projection is not None
    module.c_attn.weight.data.mul_(2)  # type: ignore[operator,union-attr]
    assert torch.equal(projection.query.read().weights.flatten(0, 1), module.c_attn.weight[:WIDTH])  # type: ignore[index,union-attr]


def test_a_weight_that_is_kept_in_integers_and_scaled_elsewhere_is_not_measured_and_the_reason_is_told() -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    assert find_projection(module, HEADS, HEADS, DIM) is not None
    key: nn.Linear = module.k_proj  # type: ignore[assignment]
    key.weight = nn.Parameter(key.weight.detach().mul(127).to(torch.int8), requires_grad=False)
    assert find_projection(module, HEADS, HEADS, DIM) is None
    assert why_unmeasured(module) == "the weight of k_proj is kept as int8 and scaled elsewhere"


def test_a_module_that_normalises_its_heads_says_that_the_norms_are_of_the_weights_alone() -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    module.q_norm = nn.RMSNorm(DIM)
    projection = find_projection(module, HEADS, HEADS, DIM)
    assert projection is not None
    assert projection.layout == "separate (q_proj, k_proj), norms of the weights alone: heads are normalised"


def test_a_module_without_projections_is_not_measured_and_the_others_are() -> None:
    torch.manual_seed(0)
    found = find_projection(separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)), HEADS, HEADS, DIM)
    assert find_projection(Holder(proj=nn.Linear(WIDTH, WIDTH)), HEADS, HEADS, DIM) is None
    layers = [
        Layer(layer=i, name=str(i), heads=tuple(range(HEADS)), kv_heads=HEADS, head_dim=DIM, served_by="reference")
        for i in range(2)
    ]
    measured = ModelNorms(layers, [None, found]).measure().norms["query_norm"]
    assert measured[:HEADS].isnan().all()
    assert measured[HEADS:].isfinite().all()
    assert ModelNorms(layers, [None, None]).measure().norms == {}


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


def layer_of(kv_heads: int) -> Layer:
    return Layer(layer=0, name="x", heads=tuple(range(HEADS)), kv_heads=kv_heads, head_dim=DIM, served_by="reference")


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
            norms = ModelNorms([layer_of(kv_heads)], [projection])
            measured = [norms.measure().norms for _ in range(40)][-1]
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
def test_parts_of_spread_inputs_add_up_to_the_norms_of_the_whole_weights(world: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    whole = fused_conv1d(query, key)
    sent = []
    for rank in range(world):
        module = copy.deepcopy(whole)
        with process(rank, world) as mesh:
            shard(module, mesh, Shard(0))
            found = find_projection(module, HEADS, HEADS, DIM)
            assert found is not None
            assert found.unmeasured == []
            assert found.gaps() == (
                ", norms added up by the service: the inputs of W_Q or W_K are spread over processes"
            )
            norms, parts = ModelNorms([layer_of(HEADS)], [found]).measure()
        assert norms == {}
        sent += [GramsDraft(part, step=3, began_step=1).build() for part in parts]
    each = -(-WIDTH // world)  # as torch.chunk cuts; of 12 processes the last holds nothing, and sends nothing
    assert [event.inputs for event in sent] == [(at, min(at + each, WIDTH)) for at in range(0, WIDTH, each)]
    parsed = [Grams.model_validate_json(event.model_dump_json()) for event in sent]
    summed = spectral_norms(
        [event.query.numpy().tobytes() + event.key.numpy().tobytes() for event in parsed], HEADS, DIM
    )
    both = torch.linalg.matrix_norm(query.double().mT @ key.double(), 2)
    true = torch.stack([*(torch.linalg.matrix_norm(w.double(), 2) for w in (query, key)), both])
    torch.testing.assert_close(torch.from_numpy(summed).double(), true, rtol=1e-6, atol=0)


@pytest.mark.promise("A13")
def test_of_processes_that_hold_the_same_inputs_the_first_sends_them() -> None:
    sent = []
    for rank in range(4):
        module = fused_conv1d(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
        torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            fully_shard(module, mesh=mesh)
            found = find_projection(module, HEADS, HEADS, DIM)
            parts = ModelNorms([layer_of(HEADS)], [found]).measure().parts
        finally:
            torch.distributed.destroy_process_group()
        sent.append([part.inputs for part in parts])
    assert sent == [[(0, 16)], [(16, 32)], [], []]


def test_heads_too_wide_for_their_gram_matrices_to_travel_are_told_as_unmeasured() -> None:
    module = fused_conv1d(torch.randn(1, 264, 8), torch.randn(1, 264, 8))
    with process(1, 2) as mesh:
        shard(module, mesh, Shard(0))
        found = find_projection(module, 1, 1, 264)
        assert found is not None
        assert found.gaps() == ", norms not measured: the inputs of W_Q or W_K are spread over processes"
        layer = Layer(layer=0, name="x", heads=(0,), kv_heads=1, head_dim=264, served_by="reference")
        assert ModelNorms([layer], [found]).measure() == ({}, ())


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


def test_layers_of_different_shapes_are_measured_together() -> None:
    torch.manual_seed(0)
    projections, layers, true = [], [], []
    for index, (heads, width) in enumerate(itertools.product((1, 2), (16, 24))):
        query, key = torch.randn(heads, DIM, width), torch.randn(heads, DIM, width)
        projections.append(find_projection(separate(query, key), heads, heads, DIM))
        layers.append(
            Layer(
                layer=index,
                name=str(index),
                heads=tuple(range(heads)),
                kv_heads=heads,
                head_dim=DIM,
                served_by="reference",
            )
        )
        true.append(torch.linalg.matrix_norm(query, 2))
    norms = ModelNorms(layers, projections)
    for _ in range(40):
        measured = norms.measure().norms
    torch.testing.assert_close(measured["query_norm"], torch.cat(true), rtol=1e-3, atol=0)


class PeftLinear(nn.Module):
    """The attributes of peft's lora.Linear, which is tested for real on the machine that has it."""

    def __init__(self, base: nn.Module, out: int, inputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(inputs, 2, bias=False) for name in ("first", "second", "idle")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, out, bias=False) for name in ("first", "second", "idle")})
        self.use_dora = {"first": False}
        self.scaling = {"first": 0.5, "second": 2.0, "idle": 9.0}
        self.active_adapters = ["first", "second"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    def effective(self) -> Tensor:
        total: Tensor = torch.tensor(0.0)
        for name in self.active_adapters:
            down: Any = self.lora_A[name]
            total = total + self.scaling[name] * self.lora_B[name](down(torch.eye(down.in_features))).t()
        return total


class ByHand(nn.Linear):
    """Parameters beside the weight, as in loralib."""

    def __init__(self, rows: Tensor, *, turned: bool = False) -> None:
        super().__init__(rows.shape[1], rows.shape[0])
        self.weight.data.copy_(rows)
        down, up = torch.randn(2, rows.shape[1]), torch.randn(rows.shape[0], 2)
        self.lora_A = nn.Parameter(down.t() if turned else down)
        self.lora_B = nn.Parameter(up.t() if turned else up)
        self.lora_alpha, self.r = 3, 2

    def effective(self) -> Tensor:
        turned = self.lora_A.shape[0] != 2
        return 1.5 * ((self.lora_A @ self.lora_B).t() if turned else self.lora_B @ self.lora_A)


class Wrapped(nn.Module):
    """Linear layers round a linear layer, with torchtune's names."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.linear = linear_with(rows)
        self.lora_a = nn.Linear(rows.shape[1], 2, bias=False)
        self.lora_b = nn.Linear(2, rows.shape[0], bias=False)
        self.alpha, self.rank = 4.0, 2

    def effective(self) -> Tensor:
        return 2 * self.lora_b(self.lora_a(torch.eye(self.lora_a.in_features))).t()  # type: ignore[no-any-return]


ADAPTERS: dict[str, Callable[[Tensor], Any]] = {
    "peft": lambda rows: PeftLinear(linear_with(rows), *rows.shape),
    "peft round Conv1D": lambda rows: PeftLinear(conv1d_with(rows), *rows.shape),
    "parameters": ByHand,
    "parameters, turned": lambda rows: ByHand(rows, turned=True),
    "torchtune's names": Wrapped,
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_projection_with_adapters_is_measured_with_them(kind: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    module = Holder(q_proj=ADAPTERS[kind](query.flatten(0, 1)), k_proj=ADAPTERS[kind](key.flatten(0, 1)))
    found = find_projection(module, HEADS, HEADS, DIM)
    assert found is not None
    assert "with adapters" in found.layout
    norms = ModelNorms([layer_of(HEADS)], [found])
    measured = [norms.measure().norms for _ in range(40)][-1]
    children: Any = module
    true = [
        w + child.effective().detach().view_as(w) for w, child in ((query, children.q_proj), (key, children.k_proj))
    ]
    torch.testing.assert_close(measured["query_norm"], torch.linalg.matrix_norm(true[0], 2), rtol=1e-3, atol=0)
    torch.testing.assert_close(measured["key_norm"], torch.linalg.matrix_norm(true[1], 2), rtol=1e-3, atol=0)
    both = torch.linalg.matrix_norm(true[0].mT @ true[1], 2)
    torch.testing.assert_close(measured["query_key_norm"], both, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("peft", {"disable_adapters": True}),
        ("peft", {"merged_adapters": ["first", "second"]}),
        ("parameters", {"merged": True}),
        ("torchtune's names", {"disabled": True}),
    ],
)
def test_adapters_that_are_off_or_merged_are_not_added_again(kind: str, change: dict[str, Any]) -> None:
    rows = torch.randn(HEADS * DIM, WIDTH)
    module = ADAPTERS[kind](rows)
    vars(module).update(change)
    assert torch.equal(adapted(module), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"use_dora": {"first": True}}, {"scaling": None}])
def test_adapters_of_an_unknown_kind_leave_their_projection_unmeasured(change: dict[str, Any]) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    adapter = ADAPTERS["peft"](torch.randn(HEADS * DIM, WIDTH))
    vars(adapter).update(change)
    module.q_proj = adapter
    assert find_projection(module, HEADS, HEADS, DIM) is None


def test_a_projection_that_peft_adapts_is_measured_with_its_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; its layout is tested on a stand-in")
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    module: Any = peft.inject_adapter_in_model(config, separate(query, key))
    found = find_projection(module, HEADS, HEADS, DIM)
    assert found is not None
    for rows, child in ((found.query, module.q_proj), (found.key, module.k_proj)):
        inputs = torch.eye(WIDTH)
        true = (child(inputs) - child.base_layer.bias).detach().t()
        torch.testing.assert_close(rows.read().weights.flatten(0, 1), true, rtol=1e-5, atol=1e-5)
        child.merge()
        torch.testing.assert_close(rows.read().weights.flatten(0, 1), true, rtol=1e-5, atol=1e-5)
