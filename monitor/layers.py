"""W_Q and W_K of each head, as views into the module's own weights, in their many layouts.

A spectral norm does not mind a transpose, so every layout becomes [heads, head_dim, E]: row d of head h is the weight
vector of that head's d-th query (key) feature over the E inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_SEPARATE: Final = (
    ("q_proj", "k_proj"),
    ("wq", "wk"),
    ("query", "key"),
    ("to_q", "to_k"),
    ("q_lin", "k_lin"),
    ("q", "k"),
    ("linear_q", "linear_k"),
    ("W_q", "W_k"),
    ("w_q", "w_k"),
    ("W_Q", "W_K"),
    ("query_proj", "key_proj"),
    ("q_linear", "k_linear"),
)
_FUSED: Final = ("c_attn", "qkv", "qkv_proj", "Wqkv", "wqkv", "in_proj", "to_qkv", "c_qkv", "attn_qkv", "W_pack")
_FUSED_PER_KEY_HEAD: Final = ("query_key_value", "linear_qkv")


class ShardedWeightError(Exception):
    """The weight is spread over processes; reading it would take a collective, and the agent calls none."""


@dataclass(frozen=True, slots=True)
class KeyBias:
    """The parameter that holds the bias of a layer's keys, [outputs], and where in it (and in what is as long) it lies.

    `of_heads` gives a view [Hkv, D].
    """

    parameter: Tensor
    of_heads: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Projection:
    """Where a layer's W_Q and W_K lie. `read` gives them as they are now, [H, D, E] and [Hkv, D, E].

    They are views of the weights (grouped queries in a layout interleaved per key head are gathered). `key_bias` gives
    the bias of the keys, None where they have none. Both raise ShardedWeightError where this process holds a part only.
    """

    layout: str
    read: Callable[[], tuple[Tensor, Tensor]]
    key_bias: Callable[[], KeyBias | None]


def find_projection(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> Projection | None:
    """W_Q and W_K of an attention module, or None where they cannot be told."""
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead_attention(module, heads, head_dim)
    for query_name, key_name in _SEPARATE:
        query = _child(module, query_name, heads * head_dim)
        key = _child(module, key_name, kv_heads * head_dim)
        if query is not None and key is not None:
            return _separate(query, key, f"{query_name}, {key_name}", heads, kv_heads, head_dim)
    fused_width = (heads + 2 * kv_heads) * head_dim
    for name in _FUSED_PER_KEY_HEAD:
        if (fused := _child(module, name, fused_width)) is not None:
            return _interleaved(fused, name, heads, kv_heads, head_dim)
    for name in _FUSED:
        if (fused := _child(module, name, fused_width)) is not None:
            return _concatenated(fused, name, heads, kv_heads, head_dim)
    return None


def _child(module: nn.Module, name: str, outputs: int) -> nn.Module | None:
    """The projection of this name, if it is one and has this many outputs."""
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) and _outputs(child) == outputs else None


def query_width(module: nn.Module, heads: int, kv_heads: int) -> int | None:
    """heads * head_dim as the module's own projections tell it, or None."""
    for query_name, _ in _SEPARATE:
        if (width := _outputs(getattr(module, query_name, None))) is not None:
            return width
    for name in (*_FUSED, *_FUSED_PER_KEY_HEAD):
        width = _outputs(getattr(module, name, None))
        if width is not None and width * heads % (heads + 2 * kv_heads) == 0:
            return width * heads // (heads + 2 * kv_heads)
    return None


def _outputs(module: object) -> int | None:
    if not isinstance(module, nn.Module) or not isinstance(weight := getattr(module, "weight", None), Tensor):
        return None
    if hasattr(module, "lora_A"):
        return None  # its `weight` is the base's alone, and would give the norm of a W_Q that nobody uses
    return weight.shape[_output_dim(module)] if weight.dim() == 2 else None


def _output_dim(module: nn.Module) -> int:
    # transformers' Conv1D keeps its weight as [in, out], nn.Linear as [out, in]
    return 1 if type(module).__name__ == "Conv1D" else 0


def _rows(module: nn.Module) -> Tensor:
    """The weight as [out, in], a view."""
    weight = _whole(module.weight)
    return weight.t() if _output_dim(module) else weight


def _whole(weight: Any) -> Tensor:
    if hasattr(weight, "device_mesh"):
        raise ShardedWeightError
    whole: Tensor = weight.detach()
    return whole


def _split_heads(rows: Tensor, heads: int, head_dim: int) -> Tensor:
    return torch.unflatten(rows, 0, (heads, head_dim))


def _key_bias(bias: object, of_heads: Callable[[Tensor], Tensor]) -> KeyBias | None:
    if not isinstance(bias, Tensor):
        return None
    _whole(bias)
    return KeyBias(bias, of_heads)


def _separate(query: nn.Module, key: nn.Module, names: str, heads: int, kv_heads: int, head_dim: int) -> Projection:
    def read() -> tuple[Tensor, Tensor]:
        return _split_heads(_rows(query), heads, head_dim), _split_heads(_rows(key), kv_heads, head_dim)

    def key_bias() -> KeyBias | None:
        return _key_bias(getattr(key, "bias", None), lambda bias: torch.unflatten(bias, 0, (kv_heads, head_dim)))

    return Projection(f"separate ({names})", read, key_bias)


def _concatenated(child: nn.Module, name: str, heads: int, kv_heads: int, head_dim: int) -> Projection:
    def read() -> tuple[Tensor, Tensor]:
        rows = _rows(child)
        middle = heads * head_dim
        key = rows[middle : middle + kv_heads * head_dim]
        return _split_heads(rows[:middle], heads, head_dim), _split_heads(key, kv_heads, head_dim)

    def key_bias() -> KeyBias | None:
        start, end = heads * head_dim, (heads + kv_heads) * head_dim
        return _key_bias(
            getattr(child, "bias", None), lambda bias: torch.unflatten(bias[start:end], 0, (kv_heads, head_dim))
        )

    kind = "Conv1D" if _output_dim(child) else "Linear"
    return Projection(f"fused Q, K, V ({name}, {kind})", read, key_bias)


def _interleaved(child: nn.Module, name: str, heads: int, kv_heads: int, head_dim: int) -> Projection:
    group = heads // kv_heads

    def read() -> tuple[Tensor, Tensor]:
        rows = torch.unflatten(_rows(child), 0, (kv_heads, group + 2, head_dim))  # each key head: its queries, K, V
        return rows[:, :group].flatten(0, 1), rows[:, group]

    def key_bias() -> KeyBias | None:
        return _key_bias(
            getattr(child, "bias", None),
            lambda bias: torch.unflatten(bias, 0, (kv_heads, group + 2, head_dim))[:, group],
        )

    return Projection(f"fused per key head ({name})", read, key_bias)


def _of_multihead_attention(module: nn.MultiheadAttention, heads: int, head_dim: int) -> Projection:
    fused = getattr(module, "_qkv_same_embed_dim", True)

    def read() -> tuple[Tensor, Tensor]:
        if fused:
            rows = _whole(module.in_proj_weight)
            query, key = rows[: module.embed_dim], rows[module.embed_dim : 2 * module.embed_dim]
        else:
            query, key = _whole(module.q_proj_weight), _whole(module.k_proj_weight)
        return _split_heads(query, heads, head_dim), _split_heads(key, heads, head_dim)

    def key_bias() -> KeyBias | None:
        width = module.embed_dim
        return _key_bias(
            module.in_proj_bias, lambda bias: torch.unflatten(bias[width : 2 * width], 0, (heads, head_dim))
        )

    layout = "fused Q, K, V (in_proj_weight)" if fused else "separate (q_proj_weight, k_proj_weight)"
    return Projection(layout, read, key_bias)
