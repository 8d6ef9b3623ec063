"""W_Q and W_K of every head in every layout, against the singular values of the true matrices."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foreshock.contract.wire import Layer
from foreshock.monitor.layers import find_projection
from foreshock.monitor.norms import ModelNorms

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
    for got, true in zip(projection.read(), (query, key), strict=True):
        assert torch.equal(got, true)
    layer = Layer(layer=0, name="x", heads=range(HEADS), kv_heads=kv_heads, head_dim=DIM, served_by="reference")  # type: ignore[arg-type]
    norms = ModelNorms([layer], [projection])
    for _ in range(40):
        measured = norms.measure()
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
    assert torch.equal(projection.read()[0].flatten(0, 1), module.c_attn.weight[:WIDTH])  # type: ignore[index,union-attr]


def test_a_module_without_projections_is_not_measured_and_the_others_are() -> None:
    torch.manual_seed(0)
    found = find_projection(separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)), HEADS, HEADS, DIM)
    assert find_projection(Holder(proj=nn.Linear(WIDTH, WIDTH)), HEADS, HEADS, DIM) is None
    layers = [
        Layer(layer=i, name=str(i), heads=tuple(range(HEADS)), kv_heads=HEADS, head_dim=DIM, served_by="reference")
        for i in range(2)
    ]
    measured = ModelNorms(layers, [None, found]).measure()["query_norm"]
    assert measured[:HEADS].isnan().all()
    assert measured[HEADS:].isfinite().all()
    assert ModelNorms(layers, [None, None]).measure() == {}


@pytest.mark.promise("A13")
@pytest.mark.parametrize("layout", [fused_linear, fused_conv1d, separate, interleaved, multihead])
def test_a_weight_that_is_spread_over_processes_is_left_unmeasured(
    layout: Callable[[Tensor, Tensor], nn.Module],
) -> None:
    module = layout(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    found = find_projection(module, HEADS, HEADS, DIM)
    for parameter in module.parameters():
        parameter.device_mesh = "as a DTensor has"  # type: ignore[attr-defined]
    layer = Layer(layer=0, name="x", heads=tuple(range(HEADS)), kv_heads=HEADS, head_dim=DIM, served_by="reference")
    assert ModelNorms([layer], [found]).measure() == {}


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
        measured = norms.measure()
    torch.testing.assert_close(measured["query_norm"], torch.cat(true), rtol=1e-3, atol=0)


def test_a_projection_with_adapters_is_left_unmeasured_rather_than_measured_without_them() -> None:
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    module = separate(query, key)
    assert find_projection(module, HEADS, HEADS, DIM) is not None
    module.get_submodule("q_proj").lora_A = nn.ModuleDict()  # as peft wraps it: `weight` is the base's alone
    assert find_projection(module, HEADS, HEADS, DIM) is None
