"""Calls of the fake attention libraries, each with the equivalent mask rule for PyTorch's attention."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.monitor.execution_modes import Mode, TrainingResult, train_unwatched
from tests.monitor.fake_libraries import flash_attn_2, flash_attn_3, flash_attn_4, reference_attention
from tests.monitor.probing import SAMPLED_ROW_SLOTS
from tests.monitor.tiny_models import tiny_gpt
from torch import Tensor, nn

from foreshock.contract.slots import COUNT_SLOTS, Slot, slot_values

NATIVE: dict[str, Any] = {"attention": "keep", "probe_rows": 10**6}
BOUNDS = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
"""Two rows of 12 tokens, packed as three sequences: the first row contains two."""

Call = Callable[[Tensor, Tensor, Tensor], Any]


class Grouped(nn.Module):
    """Grouped-query attention around a call with query [B, S, 4, D] and key, value [B, S, 2, D]."""

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
    """PyTorch's attention with the mask of the rule."""
    rows, length = query.shape[:2]
    ends, scale = rule.pop("ends", None), rule.pop("scale", None)
    if ends is None:
        mask = reference_attention.visible_keys(length, key.shape[1], **rule)[0][None]
    else:
        visibility = reference_attention.visible_keys(
            rows * length, rows * length, cu_queries=ends, cu_keys=ends, **rule
        )
        parts = visibility[0].view(rows, length, rows, length)
        mask = torch.stack([parts[row, :, row] for row in range(rows)])
    mask = mask.unsqueeze(1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


def pack_sequences(function: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """Packs all rows into one dimension for the call, and unpacks the output."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(*(x.flatten(0, 1) for x in (query, key, value)), *args, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.view(query.shape)

    return call


def expand_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[-2] // x.shape[-2], -2)


def qkvpacked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return lambda q, k, v: function(torch.stack((q, expand_heads(k, q), expand_heads(v, q)), -3), *args, **options)


def kvpacked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return lambda q, k, v: function(q, torch.stack((k, v), -3), *args, **options)


def with_more_keys(x: Tensor) -> Tensor:
    """Prepends three more keys."""
    return torch.cat((x[:, -3:], x), 1)


FLASH_2 = flash_attn_2
FLASH_3, FLASH_4 = flash_attn_3, flash_attn_4
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def masked(length: int) -> Tensor:
    return torch.zeros(length, length).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)


PACKED = (BOUNDS, BOUNDS.clone(), 12, 12)
"""Two tensors, because torch.compile cannot trace a torch.autograd.Function that gets the same tensor twice."""
CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "2": (lambda q, k, v: FLASH_2.flash_attn_func(q, k, v, causal=True), {"causal": True}),
    "2, window": (
        lambda q, k, v: FLASH_2.flash_attn_func(q, k, v, 0.0, None, False, (3, 2)),
        {"window": (3, 2)},
    ),
    "2, causal window": (
        lambda q, k, v: FLASH_2.flash_attn_func(q, k, v, causal=True, window_size=(4, 4)),
        {"causal": True, "window": (4, 4)},
    ),
    "2, more keys": (
        lambda q, k, v: FLASH_2.flash_attn_func(
            q, with_more_keys(k), with_more_keys(v), causal=True, softmax_scale=0.3
        ),
        {"causal": True, "longer": True, "scale": 0.3},
    ),
    "2, log-sum-exp too": (
        lambda q, k, v: FLASH_2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        {"causal": True},
    ),
    "2, qkv": (qkvpacked(FLASH_2.flash_attn_qkvpacked_func, causal=True), {"causal": True}),
    "2, kv": (kvpacked(FLASH_2.flash_attn_kvpacked_func, causal=True), {"causal": True}),
    "2, packed": (
        pack_sequences(FLASH_2.flash_attn_varlen_func, *PACKED, causal=True),
        {"causal": True, "ends": BOUNDS},
    ),
    "2, packed qkv": (
        pack_sequences(qkvpacked(FLASH_2.flash_attn_varlen_qkvpacked_func, BOUNDS, 12, causal=True)),
        {"causal": True, "ends": BOUNDS},
    ),
    "2, packed kv": (
        pack_sequences(kvpacked(FLASH_2.flash_attn_varlen_kvpacked_func, *PACKED, window_size=(2, 0))),
        {"window": (2, 0), "ends": BOUNDS},
    ),
    "3": (
        lambda q, k, v: FLASH_3.flash_attn_func(q, k, v, 0.3, True, window_size=(5, 0)),
        {"causal": True, "scale": 0.3, "window": (5, 0)},
    ),
    "3, qkv of grouped heads": (
        lambda q, k, v: FLASH_3.flash_attn_qkvpacked_func(torch.cat((q, k, v), -2), causal=True, num_heads_q=4),
        {"causal": True},
    ),
    "4": (lambda q, k, v: FLASH_4.flash_attn_func(q, k, v, causal=True), {"causal": True}),
    "4, window": (lambda q, k, v: FLASH_4.flash_attn_func(q, k, v, window_size=(3, None)), {"window": (3, -1)}),
}


def reference_call(rule: dict[str, Any]) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        others = {name: value for name, value in rule.items() if name != "longer"}
        return sdpa(query, *map(with_more_keys, (key, value)) if "longer" in rule else (key, value), **others)

    return call


def gpt_with_call(call: Call, layers: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return tiny_gpt(*(Grouped(call) for _ in range(layers)), seed=3)


def train_call_unwatched(call: Call, mode: Mode = Mode(), layers: int = 2) -> TrainingResult:  # noqa: B008 - Mode is frozen
    return train_unwatched(gpt_with_call(call, layers), mode.loop)


def assert_same_statistics(got: TrainingResult, expected: TrainingResult) -> None:
    """Compares all statistics except those of sampled rows and of rounding, which depends on the kernel."""
    counts = [slot for slot in COUNT_SLOTS if slot not in SAMPLED_ROW_SLOTS]
    for words, expected_words in zip(got.words, expected.words, strict=True):
        for slot in (*counts, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
            found, expected_values = slot_values(words, slot), slot_values(expected_words, slot)
            np.testing.assert_allclose(found, expected_values, rtol=1e-4, atol=1e-5, err_msg=slot.name)
