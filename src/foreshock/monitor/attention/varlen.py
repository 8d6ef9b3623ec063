"""Serves or probes `torch.nn.attention.varlen.varlen_attn`: attention over sequences packed end to end (torchtitan)."""

from typing import Any, cast

from torch import Tensor

from foreshock.monitor.attention.running import layer_of_this_call, note_call_outside, note_interception
from foreshock.monitor.attention.watched_layer import Packed
from foreshock.monitor.model.discovery import VARLEN

_HARMLESS = ("num_splits",)
"""Options without a word about which scores are computed."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **more: Any,
) -> Any:
    """PyTorch's function of this name over query [T, H, D] and key, value [T, Hkv, D], watched where a watched module
    calls it. Its window (left, right) is aligned bottom right, and right 0 is causal."""
    options = {"scale": scale, "window_size": tuple(window_size), **more}
    if enable_gqa:  # not every version takes it
        options["enable_gqa"] = True

    def own() -> Any:
        return cast(Any, VARLEN)(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    layer = layer_of_this_call()
    if layer is None:
        note_call_outside(query.transpose(0, 1), key.transpose(0, 1))
        return own()
    note_interception(query.transpose(0, 1), key.transpose(0, 1))
    asked = [name for name, option in more.items() if option is not None and name not in _HARMLESS]
    if asked or cu_seq_k is None:
        layer.leave_alone(f"it passes {', '.join(asked) or 'no cu_seq_k'} to varlen_attn, which is not served")
        return own()
    if not enable_gqa and query.shape[1] != key.shape[1]:
        layer.leave_alone("query and key differ in heads without enable_gqa")
        return own()
    left, right = window_size
    operands = [x.transpose(0, 1)[None] for x in (query, key, value)]  # [1, H, T, D]
    out = layer.call(
        lambda: own().transpose(0, 1)[None],
        *operands,
        packed=Packed(cu_seq_q, cu_seq_k, max_q, max_k),
        causal="bottom_right" if right == 0 else "none",
        window=(left, -1 if right == 0 else right),
        scale=scale,
    )
    return out[0].transpose(0, 1)
