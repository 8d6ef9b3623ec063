"""The laboratory's model: its shapes, what it starts with, and that it predicts from the past alone."""

from dataclasses import replace

import pytest
import torch

from foreshock.lab.training.model import GPT, ModelConfig, Rotary

SHAPE = ModelConfig(layers=2, heads=4, width=32, context=16)


def test_query_heads_must_share_key_heads_evenly() -> None:
    with pytest.raises(ValueError, match="4 heads cannot share 3 key heads"):
        replace(SHAPE, kv_heads=3)


def test_values_start_with_what_they_share_in_their_bias() -> None:
    torch.manual_seed(0)
    shared = dict(GPT(replace(SHAPE, value_offset=3.0)).named_parameters())
    for layer in range(2):
        bias = shared[f"h.{layer}.attn.c_attn.bias"].detach()
        assert float(bias[:64].abs().max()) == 0.0
        assert 1.5 < float(bias[64:].std()) < 4.5
    with pytest.raises(ValueError, match="leave qkv_bias true"):
        replace(SHAPE, value_offset=3.0, qkv_bias=False)


def test_rotary_positions_turn_queries_and_keys_so_that_only_distance_counts() -> None:
    rotary = Rotary(16, 8)
    vector = torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8)
    turned = rotary(vector)
    assert torch.allclose(turned.norm(dim=-1), vector.norm(dim=-1), atol=1e-5)
    products = turned[0, 0] @ turned[0, 0].T
    assert torch.allclose(products.diagonal(3), products[0, 3].expand(13), atol=1e-4)


def test_the_model_predicts_from_the_past_alone() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=1, heads=2, width=8, context=6, attention_dtype="float32"))
    tokens = torch.randint(256, (1, 6))
    targets = torch.full((1, 6), -100)
    targets[0, 2] = 7
    changed = tokens.clone()
    changed[0, 3:] = 1
    assert torch.equal(model(tokens, targets), model(changed, targets))
