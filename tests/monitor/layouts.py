"""W_Q and W_K in the weight layouts of common models, so that tests know the true matrices."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foreshock.contract.wire import Layer
from foreshock.monitor.model.layers import Projection, find_projection

HEADS, DIM, WIDTH = 4, 8, 32


class Holder(nn.Module):
    """A module that contains only its projections."""

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


def layer_of(kv_heads: int) -> Layer:
    return Layer(layer=0, name="x", heads=tuple(range(HEADS)), kv_heads=kv_heads, head_dim=DIM, served_by="reference")


def always(projection: Projection | None) -> Callable[[], Projection | None]:
    """A stand-in for `LayoutCheck.current` that returns this projection."""
    return lambda: projection


def projection_of(module: nn.Module, kv_heads: int = HEADS) -> Projection:
    """The projections of W_Q and W_K, found by name."""
    projection = find_projection(module, HEADS, kv_heads, DIM)
    assert projection is not None
    return projection
