"""Typical models for diagnose: masks, packing, sliding windows, eager attention, adapters; some have a fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ModelAndLoss = tuple[nn.Module, Callable[[], Tensor]]
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _transformers(family: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{'Text' * (family == 'Gemma3')}Config")(**_SIZES | changes)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def _loss(
    model: Any, dtype: torch.dtype | None = torch.bfloat16, padded: int = 0, **given: Tensor
) -> Callable[[], Tensor]:
    draw = torch.Generator().manual_seed(1)

    def loss() -> Tensor:
        tokens = torch.randint(1, 97, (3, 24), generator=draw)
        mask = torch.ones_like(tokens)
        if padded:
            mask[1, :padded], mask[2, : padded + 6] = 0, 0
            given["attention_mask"] = mask
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found: Tensor = model(input_ids=tokens, labels=tokens.masked_fill(mask == 0, -100), **given).loss
        return found

    return loss


def gemma(**changes: Any) -> nn.Module:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "pad_token_id": 0}
    return _transformers("Gemma3", **{"attn_implementation": "sdpa", "layer_types": kinds, **sizes, **changes})


def left_padded() -> ModelAndLoss:
    """Two of three sequences are padded on the left, under causal and sliding masks: 9 + 15 of 72 rows see no key."""
    model = gemma()
    return model, _loss(model, padded=9)


def qwen(implementation: str, bias: float = 0.0) -> nn.Module:
    """In layer 1 head 2, query times key is the square of `bias`, which is four times its scores."""
    model: Any = _transformers("Qwen2", num_hidden_layers=3, num_key_value_heads=4, attn_implementation=implementation)
    with torch.no_grad():
        for projection in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
            projection.bias[2 * 16 + 7] = bias
    return model  # type: ignore[no-any-return]


def eager() -> ModelAndLoss:
    model = qwen("eager")
    return model, _loss(model, torch.float16)


def eager_overflows() -> ModelAndLoss:
    model = qwen("eager", 300.0)
    return model, _loss(model, torch.float16)


def large_scores() -> ModelAndLoss:
    model = qwen("sdpa", 300.0)
    return model, _loss(model, torch.float16)


class Attention(nn.Module):
    """One layer of two heads; `change_query` changes the queries after W_Q; the inputs of attention are bf16."""

    def __init__(self, change_query: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 8
        self.qkv = nn.Linear(16, 48)
        self.turn = change_query

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).bfloat16().view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.turn(query), key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2).float()


class Adapter(nn.Module):
    """A frozen projection and a trained one of low rank, with the names that LoRA libraries use."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return adapted


def adapted(norm: float = 1.0) -> ModelAndLoss:
    """LoRA on sliding and masked layers, whose query and key norms have the weight `norm`."""
    model: Any = gemma(query_pre_attn_scalar=1).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            attention.q_norm.weight.fill_(norm - 1)  # Gemma adds one to it
            attention.k_norm.weight.fill_(norm - 1)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, Adapter(getattr(attention, name)))
    return model, _loss(model, padded=3)


def peaked() -> ModelAndLoss:
    return adapted(3.0)


def nan_gradient(name: str, layer: int, value: float = float("nan")) -> ModelAndLoss:
    """A model in which the backward of one projection returns `value`."""
    model: Any = gemma(num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"])

    def set_to_nan(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: torch.full_like(grad, value))  # type: ignore[no-untyped-call]

    getattr(model.model.layers[layer].self_attn, name).register_forward_hook(set_to_nan)
    return model, _loss(model, padded=3)


def nan_key_gradient() -> ModelAndLoss:
    return nan_gradient("k_proj", 2)


def nan_gradient_in_frozen_model() -> ModelAndLoss:
    """As nan_key_gradient, with frozen projections."""
    model, loss = nan_gradient("k_proj", 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return model, loss


def overflowing_mlp() -> ModelAndLoss:
    model: Any = qwen("sdpa")
    with torch.no_grad():
        for projection in (model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj):
            projection.weight.fill_(1e25)
    return model, _loss(model)


def manual_attention() -> ModelAndLoss:
    """Two layers without supported attention."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = 4, nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = (query @ key.mT / 8**0.5).softmax(-1) @ value
            added: Tensor = x + mixed.transpose(1, 2).flatten(2)
            return added

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(97, 32), Attention(), Attention(), nn.Linear(32, 97))
    return model, lambda: model(torch.randint(97, (2, 16))).square().mean()


def nan_query_gradient() -> ModelAndLoss:
    """The backward of attention returns NaN for the queries of layer 2 head 1."""

    def with_nan_gradient(query: Tensor) -> Tensor:
        def set_to_nan(grad: Tensor) -> Tensor:
            nan = grad.clone()
            nan[:, 1, 5] = float("nan")
            return nan

        query.register_hook(set_to_nan)  # type: ignore[no-untyped-call]
        return query

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), Attention(), Attention(), Attention(with_nan_gradient), Attention())
    return model, lambda: model(torch.randint(32, (2, 12))).square().sum()


def rows_without_keys() -> ModelAndLoss:
    """A mask of infinities hides every key from the first five rows of one sequence; the loss ignores these rows."""
    model: Any = qwen("eager")
    mask = torch.full((24, 24), float("-inf")).triu(1).repeat(3, 1, 1, 1)
    mask[1, :, :5] = float("-inf")

    def loss() -> Tensor:
        tokens = torch.randint(1, 97, (3, 24))
        labels = tokens.clone()
        labels[1, :6] = -100
        found: Tensor = model(input_ids=tokens, labels=labels, attention_mask=mask).loss
        return found

    return model, loss


def checkpointed() -> ModelAndLoss:
    """A model with activation checkpointing."""
    model: Any = gemma(use_cache=False)
    for layer in model.model.layers:
        original_forward = layer.forward
        layer.forward = lambda *args, original_forward=original_forward, **kwargs: checkpoint(
            original_forward, *args, use_reentrant=False, **kwargs
        )
    return model, _loss(model)


def attention_with_weights() -> ModelAndLoss:
    """A module that returns attention weights, with a row that sees no key and that the loss ignores."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(97, 32), nn.Linear(32, 97)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden, mask = self.tokens(tokens), torch.zeros(12, 12, dtype=torch.bool)
            mask[5] = True
            found: Tensor = self.out(self.attention(hidden, hidden, hidden, attn_mask=mask)[0])
            return found

    model = Model()
    return model, lambda: model(torch.randint(97, (2, 12)))[:, 6:].square().mean()
