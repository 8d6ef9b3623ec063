"""Serves `torch.nn.attention.varlen.varlen_attn`: attention over sequences packed end to end (torchtitan's models)."""

from typing import Any, cast

from torch import Tensor

from foreshock.monitor.attention.running import layer_of_this_call, note_call_outside, note_interception
from foreshock.monitor.model.discovery import VARLEN


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
    num_splits: int | None = None,
    **more: Any,
) -> Any:
    """PyTorch's function of this name over query [T, H, D] and key, value [T, Hkv, D], watched where a watched module
    calls it. Its window (left, right) is aligned bottom right, and right 0 is causal."""
    layer = layer_of_this_call()
    asked = [name for name, option in more.items() if option is not None]
    if layer is None:
        note_call_outside()
    else:
        note_interception()
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, H, T, D]
        if layer.keeps:
            layer.leave_alone("varlen_attn is not probed; attach with attention='kernels'")
        elif asked or cu_seq_k is None:
            layer.leave_alone(f"it passes {', '.join(asked) or 'no cu_seq_k'} to varlen_attn, which is not served")
        elif not enable_gqa and query.shape[1] != key.shape[1]:
            layer.leave_alone("query and key differ in heads without enable_gqa")
        elif (why := layer.problem(q, k, v)) is not None:
            layer.leave_alone(why)
        else:
            left, right = window_size
            served = layer.attend(
                q,
                k,
                v,
                causal="bottom_right" if right == 0 else "none",
                window=(left, -1 if right == 0 else right),
                scale=scale,
                cu_seqlens_q=cu_seq_q,
                cu_seqlens_k=cu_seq_k,
                max_seqlen_q=max_q,
                max_seqlen_k=max_k,
            )
            if served is not None:
                return served[0].transpose(0, 1)
    options = {"scale": scale, "window_size": window_size, **more}
    if enable_gqa:  # not every version takes these two
        options["enable_gqa"] = True
    if num_splits is not None:
        options["num_splits"] = num_splits
    return cast(Any, VARLEN)(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
