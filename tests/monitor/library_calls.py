"""Calls of attention libraries, by their stand-ins, each with the rule that it asks for in PyTorch's terms."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.monitor.executions import Mode, Trained, unwatched
from tests.monitor.probing import OF_SAMPLED_ROWS
from tests.monitor.stand_ins import attending, flash_attn_2, flash_attn_3, flash_attn_4
from tests.monitor.tiny_models import tiny_gpt
from torch import Tensor, nn

from foreshock.contract.slots import COUNT_SLOTS, Slot, slot_values

KEPT: dict[str, Any] = {"attention": "keep", "probe_rows": 10**6}
BOUNDS = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
"""Sequences of two rows of 12 tokens, packed: the first row holds two."""

Call = Callable[[Tensor, Tensor, Tensor], Any]


class Grouped(nn.Module):
    """Hands query [B, S, 4, D] and key, value [B, S, 2, D] to a call, of which the first result is its output."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.n_embd = 4, 2, 16
        self.c_attn, self.c_proj = nn.Linear(16, 32), nn.Linear(16, 16)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(x).unflatten(-1, (-1, 4)).split([4, 2, 2], 2)
        result = self.call(query, key, value)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        projected: Tensor = self.c_proj(out.flatten(2))
        return projected


def sdpa(query: Tensor, key: Tensor, value: Tensor, **rule: Any) -> Tensor:
    """PyTorch's own, of what the rule lets each query see."""
    rows, length = query.shape[:2]
    ends, scale = rule.pop("ends", None), rule.pop("scale", None)
    if ends is None:
        mask = attending.seen(length, key.shape[1], **rule)[0][None]
    else:
        everything = attending.seen(rows * length, rows * length, cu_queries=ends, cu_keys=ends, **rule)
        parts = everything[0].view(rows, length, rows, length)
        mask = torch.stack([parts[row, :, row] for row in range(rows)])
    mask = mask.unsqueeze(1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


def flat(function: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """Packs what it is given end to end, and unpacks the output."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(*(x.flatten(0, 1) for x in (query, key, value)), *args, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.view(query.shape)

    return call


def wide(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[-2] // x.shape[-2], -2)


def qkvpacked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return lambda q, k, v: function(torch.stack((q, wide(k, q), wide(v, q)), -3), *args, **options)


def kvpacked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return lambda q, k, v: function(q, torch.stack((k, v), -3), *args, **options)


def longer(x: Tensor) -> Tensor:
    """Three keys more, before the others."""
    return torch.cat((x[:, -3:], x), 1)


TWO = flash_attn_2
THREE, FOUR = flash_attn_3, flash_attn_4
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def masked(length: int) -> Tensor:
    return torch.zeros(length, length).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)


PACKED = (BOUNDS, BOUNDS.clone(), 12, 12)
"""Two tensors: torch.compile takes no torch.autograd.Function into its graph that is given one of them twice."""
CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "2": (lambda q, k, v: TWO.flash_attn_func(q, k, v, causal=True), {"causal": True}),
    "2, window": (
        lambda q, k, v: TWO.flash_attn_func(q, k, v, 0.0, None, False, (3, 2)),
        {"window": (3, 2)},
    ),
    "2, causal window": (
        lambda q, k, v: TWO.flash_attn_func(q, k, v, causal=True, window_size=(4, 4)),
        {"causal": True, "window": (4, 4)},
    ),
    "2, more keys": (
        lambda q, k, v: TWO.flash_attn_func(q, longer(k), longer(v), causal=True, softmax_scale=0.3),
        {"causal": True, "longer": True, "scale": 0.3},
    ),
    "2, log-sum-exp too": (
        lambda q, k, v: TWO.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        {"causal": True},
    ),
    "2, qkv": (qkvpacked(TWO.flash_attn_qkvpacked_func, causal=True), {"causal": True}),
    "2, kv": (kvpacked(TWO.flash_attn_kvpacked_func, causal=True), {"causal": True}),
    "2, packed": (flat(TWO.flash_attn_varlen_func, *PACKED, causal=True), {"causal": True, "ends": BOUNDS}),
    "2, packed qkv": (
        flat(qkvpacked(TWO.flash_attn_varlen_qkvpacked_func, BOUNDS, 12, causal=True)),
        {"causal": True, "ends": BOUNDS},
    ),
    "2, packed kv": (
        flat(kvpacked(TWO.flash_attn_varlen_kvpacked_func, *PACKED, window_size=(2, 0))),
        {"window": (2, 0), "ends": BOUNDS},
    ),
    "3": (
        lambda q, k, v: THREE.flash_attn_func(q, k, v, 0.3, True, window_size=(5, 0)),
        {"causal": True, "scale": 0.3, "window": (5, 0)},
    ),
    "3, qkv of grouped heads": (
        lambda q, k, v: THREE.flash_attn_qkvpacked_func(torch.cat((q, k, v), -2), causal=True, num_heads_q=4),
        {"causal": True},
    ),
    "4": (lambda q, k, v: FOUR.flash_attn_func(q, k, v, causal=True), {"causal": True}),
    "4, window": (lambda q, k, v: FOUR.flash_attn_func(q, k, v, window_size=(3, None)), {"window": (3, -1)}),
}


def of_pytorch(rule: dict[str, Any]) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        others = {name: value for name, value in rule.items() if name != "longer"}
        return sdpa(query, *map(longer, (key, value)) if "longer" in rule else (key, value), **others)

    return call


def model_of(call: Call, layers: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return tiny_gpt(*(Grouped(call) for _ in range(layers)), seed=3)


def alone(call: Call, mode: Mode = Mode(), layers: int = 2) -> Trained:  # noqa: B008 - it is frozen
    return unwatched(model_of(call, layers), mode.loop)


def assert_alike(got: Trained, expected: Trained) -> None:
    """All statistics but those of the output's rounding, which is the kernel's own, and those of samples alone."""
    counts = [slot for slot in COUNT_SLOTS if slot not in OF_SAMPLED_ROWS]
    for words, theirs in zip(got.words, expected.words, strict=True):
        for slot in (*counts, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
            mine, own = slot_values(words, slot), slot_values(theirs, slot)
            np.testing.assert_allclose(mine, own, rtol=1e-4, atol=1e-5, err_msg=slot.name)
