"""Watch the attention that transformers dispatches by name, without changing name, mask or arguments.

Calls that reach PyTorch's scaled_dot_product_attention or a supported library are intercepted there. Other functions
(eager, or one that the user registered) compute as before, and a sample of rows is measured from their arguments.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from foreshock.monitor.attention.watched_layer import (
    LAYER_ATTRIBUTE,
    WatchedLayer,
    expect_interception,
    layer_of_this_call,
    tell_scouts,
    was_intercepted,
)

_KNOWN: Final = ("dropout", "scaling", "is_causal", "sliding_window", "softcap", "position_bias", "attention_mask")
_HARMLESS: Final = (
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "use_cache",
    "past_key_values",
    "past_key_value",
    "return_dict",
    "num_items_in_batch",
    "position_embeddings",
    "deterministic",
)
"""Arguments of attention functions that do not influence the scores."""

_get_interface: Final = AttentionInterface.get_interface
_users: Final[list[object]] = []
"""One entry for each agent. All agents share one wrapper; otherwise each wrapper would count every row."""


def _interface(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    return _watching(_get_interface(self, name, default), name)


def watch_dispatch() -> Callable[[], None]:
    """Watch every attention that transformers dispatches to for a watched module; return a function that undoes this.

    Names, masks and results do not change.
    """
    if not _users:
        AttentionInterface.get_interface = _interface
    _users.append(token := object())

    def undo() -> None:
        _users.remove(token)
        if not _users and AttentionInterface.get_interface is _interface:
            AttentionInterface.get_interface = _get_interface

    return undo


def _watching(attention: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap `attention`, which is called as before, to measure a sample of its rows if the call is not intercepted
    elsewhere."""

    def watched_attention(*args: Any, **kwargs: Any) -> Any:
        module: nn.Module = args[0]
        running = layer_of_this_call()
        layer: WatchedLayer | None = getattr(module, LAYER_ATTRIBUTE, None)
        if layer is None or running is not layer or len(args) < 4:
            if layer is None and running is None and len(args) > 3 and not torch.compiler.is_compiling():
                tell_scouts(module, *args[1:3])
            return attention(*args, **kwargs)
        query, key, value = args[1:4]
        expect_interception()
        result = attention(*args, **kwargs)
        if was_intercepted():  # as a call of PyTorch or of a library, which our kernels may have computed
            return result
        mask = args[4] if len(args) > 4 else kwargs.get("attention_mask")
        unknown = _unknown(name, query, mask, kwargs, len(args) > 5)
        kept = unknown or f"its attention is {name}, which stays"
        if unknown is None and not kwargs.get("softcap"):  # otherwise sdpa would compute different scores
            kept += "; set_attn_implementation('sdpa') lets kernels compute it"
        layer.keep_call(kept)
        options = unknown or _described(module, name, query, key, mask, kwargs)
        out, *rest = result
        rounds = "operands" if name.startswith("flash_attention") else "scores" if name == "eager" else "unknown"
        if isinstance(options, str):
            layer.count_unmeasured_call(options)
            return result
        by = f"transformers.{name}"
        probed = layer.probed(out.transpose(1, 2), query, key, value, rounds=rounds, by=by, **options)
        return probed.transpose(1, 2), *rest

    return watched_attention


def _unknown(name: str, query: Tensor, mask: Any, kwargs: dict[str, Any], more: bool) -> str | None:
    """Return why the scores of this call cannot be computed from its arguments; None if they can."""
    names = [k for k, v in kwargs.items() if v is not None and k not in _KNOWN and k not in _HARMLESS]
    if names or more:
        return f"it passes {', '.join(names) or 'more arguments than a mask'}, which is not probed"
    if not (mask is None or isinstance(mask, Tensor)):
        return f"its mask is a {type(mask).__name__}, which is not probed"
    if name.startswith("flash_attention") and kwargs.get("position_ids") is not None and query.shape[0] == 1:
        return "its positions may pack several sequences"  # flash attention reads positions only for a batch of one
    return None


def _described(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> dict[str, Any] | str:
    """Return the options of `WatchedLayer.probed`, or the reason why the call cannot be measured."""
    dropout, scaling, is_causal, window, softcap, bias = (kwargs.get(k) for k in _KNOWN[:6])
    causal = name != "eager" and (mask is None or mask.dim() == 2) and query.shape[2] > 1
    causal = causal and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scores_mask = _mask_of_scores(mask, query.shape[2], key.shape[2])
    if scores_mask is not None and scores_mask.dim() != 4:
        return f"its mask has shape {list(scores_mask.shape)}, which is not probed"
    if bias is not None:
        if scores_mask is not None and scores_mask.dtype == torch.bool:
            scores_mask = torch.zeros_like(bias).masked_fill(~scores_mask, torch.finfo(bias.dtype).min)
        scores_mask = bias if scores_mask is None else bias + scores_mask
    return {
        "mask": scores_mask,
        "causal": "bottom_right" if causal else "none",
        # the width includes the token itself; without a causal mask the window extends equally to both sides
        "window": (window - 1, -1 if causal else window - 1) if window and name != "eager" else (-1, -1),
        "scale": scaling,
        "softcap": softcap or 0.0,
        "dropout_p": dropout or 0.0,
    }


def _mask_of_scores(mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    """Return the mask in the form of PyTorch's attn_mask. For flash attention it marks the real tokens, [B, S], and
    rows of other tokens are omitted."""
    if mask is None:
        return None
    if mask.dim() == 2 and queries == keys:
        real = mask[:, :keys].bool()
        return (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1)
    return mask[..., :keys]
