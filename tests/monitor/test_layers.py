"""W_Q and W_K of every head in every layout, against the singular values of the true matrices."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.layouts import DIM, HEADS, LAYOUTS, WIDTH, Holder, fused_linear, known, separate
from torch import Tensor, nn

from foreshock.contract.wire import Layer
from foreshock.monitor.model.layers import find_projection, why_unmeasured
from foreshock.monitor.sampling.norms import ModelNorms


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
    norms = ModelNorms([layer], [known(projection)])
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
    assert torch.equal(projection.query.read().weights.flatten(0, 1), module.c_attn.weight[:WIDTH])  # type: ignore[index,union-attr]


def test_a_weight_that_is_kept_in_integers_and_scaled_elsewhere_is_not_measured_and_the_reason_is_told() -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    assert find_projection(module, HEADS, HEADS, DIM) is not None
    key: nn.Linear = module.k_proj  # type: ignore[assignment]
    key.weight = nn.Parameter(key.weight.detach().mul(127).to(torch.int8), requires_grad=False)
    assert find_projection(module, HEADS, HEADS, DIM) is None
    assert why_unmeasured(module) == "the weight of k_proj is stored as int8 and scaled elsewhere"


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
def test_a_module_that_normalises_its_heads_says_that_the_norms_are_of_the_weights_alone(
    name: str, value: Any, normalised: bool
) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    if value is None:
        module.register_module(name, None)
    else:
        setattr(module, name, value)
    projection = find_projection(module, HEADS, HEADS, DIM)
    assert projection is not None
    told = ", norms of the weights only: heads are normalised" if normalised else ""
    assert projection.layout == f"separate (q_proj, k_proj){told}"


def test_a_module_without_projections_is_not_measured_and_the_others_are() -> None:
    torch.manual_seed(0)
    found = find_projection(separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)), HEADS, HEADS, DIM)
    assert find_projection(Holder(proj=nn.Linear(WIDTH, WIDTH)), HEADS, HEADS, DIM) is None
    layers = [
        Layer(layer=i, name=str(i), heads=tuple(range(HEADS)), kv_heads=HEADS, head_dim=DIM, served_by="reference")
        for i in range(2)
    ]
    measured = ModelNorms(layers, [known(None), known(found)]).measure()["query_norm"]
    assert measured[:HEADS].isnan().all()
    assert measured[HEADS:].isfinite().all()
    assert ModelNorms(layers, [known(None)] * 2).measure() == {}


def test_layers_of_different_shapes_are_measured_together() -> None:
    torch.manual_seed(0)
    projections, layers, true = [], [], []
    for index, (heads, width) in enumerate(itertools.product((1, 2), (16, 24))):
        query, key = torch.randn(heads, DIM, width), torch.randn(heads, DIM, width)
        found = find_projection(separate(query, key), heads, heads, DIM)
        projections.append(known(found))
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
