"""Candidates are described by their numbers and their weights; which of them compute attention the first step shows."""

import types

import pytest
import torch
from tests.monitor.foreign_attention import Attention, helper
from torch import Tensor, nn

from foreshock.monitor.model.discovery import find_attention


class Grouped(Attention):
    """As litgpt writes it: the configuration tells the heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads, self.to_q, self.to_k
        self.config = types.SimpleNamespace(n_head=4, n_query_groups=2, head_size=8)
        self.qkv = nn.Linear(6, (4 + 2 * 2) * 8)

    def forward(self, x: Tensor) -> Tensor:
        return helper(x, x, x)


def test_groups_of_queries_that_a_configuration_tells_are_key_heads() -> None:
    (found,) = find_attention(Grouped(), {})
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 8)
    assert found.projection is not None
    assert len(found.projection.key.starts) == 2


class KeysOfTheirOwnWidth(Attention):
    """Nobody tells how many key heads it has but the width of its key projection."""

    def __init__(self, heads: int, head_dim: int, key_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(6, heads * head_dim), nn.Linear(6, key_width)

    def forward(self, x: Tensor) -> Tensor:
        return helper(x, x, x)


@pytest.mark.parametrize(
    ("heads", "head_dim", "key_width", "kv_heads"),
    [(6, 5, 10, 2), (6, 5, 5, 1), (4, 7, 28, 4), (6, 5, 12, 0), (6, 5, 20, 0), (6, 5, 60, 0), (6, 5, 3, 0)],
)
def test_the_width_of_a_key_projection_tells_its_key_heads_or_nothing_does(
    heads: int, head_dim: int, key_width: int, kv_heads: int
) -> None:
    module = KeysOfTheirOwnWidth(heads, head_dim, key_width)
    (found,) = find_attention(module, {})
    assert (found.problem, found.heads, found.kv_heads, found.head_dim) == (None, heads, kv_heads, head_dim)
    assert (found.projection is None) == (kv_heads == 0)
    if found.projection is not None:
        keys = found.projection.key.read().weights
        assert torch.equal(keys, module.to_k.weight.view(kv_heads, head_dim, -1))


def test_key_heads_that_nothing_tells_are_unknown_and_those_of_weights_that_cannot_be_read_are_not() -> None:
    class Alone(Attention):
        """Its keys are made by a projection of no known name."""

        def __init__(self) -> None:
            super().__init__()
            self.head_dim = self.to_q.out_features // self.heads
            self.shared = self.to_k
            del self.to_k

        def forward(self, x: Tensor) -> Tensor:
            return helper(x, x, x)

    (found,) = find_attention(Alone(), {})
    assert (found.problem, found.kv_heads, found.projection) == (None, 0, None)

    scaled = KeysOfTheirOwnWidth(4, 7, 14)
    scaled.to_k.weight = nn.Parameter(scaled.to_k.weight.detach().mul(99).to(torch.int8), requires_grad=False)
    (found,) = find_attention(scaled, {})
    assert (found.kv_heads, found.projection) == (2, None)
    assert "int8" in found.unmeasured
