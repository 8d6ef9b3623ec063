"""The attention and mask functions that transformers dispatches to under the name "foreshock".

The name also selects how masks are built: an unregistered name silently drops padding (masking_utils.py), so both are
registered. Padding becomes packed sequences; a mask that is neither causal, windowed nor padding goes to PyTorch's
attention, named and counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from foreshock.monitor.attention.transformers_positions import watch_positions
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, current

NAME: Final = "foreshock"
_STRUCTURE: Final = "_foreshock_structure"


@dataclass(frozen=True, slots=True)
class MaskStructure:
    """What a boolean mask [B, 1, S, S] says, when it says no more than this."""

    causal: bool
    padding: Tensor | None
    """True for real tokens, bool [B, S]."""


def foreshock_mask(**arguments: Any) -> Tensor | None:
    """As transformers' sdpa_mask; a mask made only of causality, a window and padding carries its structure along."""
    mask: Tensor | None = sdpa_mask(**arguments)
    if mask is None:
        return None
    rule, padding = arguments.get("mask_function"), arguments.get("attention_mask")
    causal = rule is causal_mask_function or _is_plain_window(arguments)
    square = arguments["q_length"] == arguments["kv_length"] and arguments.get("kv_offset", 0) == 0
    if square and (causal or rule is bidirectional_mask_function) and (padding is None or padding.dim() == 2):
        setattr(mask, _STRUCTURE, MaskStructure(causal, padding))
    return mask


def _is_plain_window(arguments: dict[str, Any]) -> bool:
    # transformers forbids the causal skip exactly when packing, blocks or a custom rule were mixed in
    window = getattr(arguments.get("config"), "sliding_window", None)
    return bool(window) and arguments.get("local_size") == window and bool(arguments.get("allow_is_causal_skip", True))


def foreshock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Watched attention of query [B, H, S, D], key and value [B, Hkv, S, D]; returns ([B, S, H, D], None)."""
    layer: WatchedLayer | None = getattr(module, LAYER_ATTRIBUTE, None)
    if layer is not None:
        structure: MaskStructure | None = getattr(attention_mask, _STRUCTURE, None)
        unknown = [name for name in ("s_aux", "position_bias", "cache") if kwargs.get(name) is not None]
        if unknown:
            layer.leave_alone(f"it passes {', '.join(unknown)}, which no kernel of foreshock serves")
        elif attention_mask is not None and structure is None:
            layer.leave_alone("its mask is more than causality, a window and padding")
        else:
            out = _attend(
                layer, module, query, key, value, structure, dropout, scaling, is_causal, sliding_window, softcap
            )
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
    if softcap is not None:  # PyTorch's attention has none
        return _with_softcap(query, key, value, attention_mask, dropout, scaling, softcap), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return result


def _with_softcap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """As transformers' eager attention: what this model had computed without foreshock. Returns [B, S, H, D]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def _attend(
    layer: WatchedLayer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: MaskStructure | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor | None:
    if structure is not None:
        causal = structure.causal
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    options = {
        "causal": "top_left" if causal else "none",
        "scale": scaling,
        "dropout_p": dropout,
        "softcap": softcap or 0.0,
        "window": (sliding_window - 1, -1) if sliding_window and causal else (-1, -1),
    }
    if structure is None or structure.padding is None:
        return layer.attend(query, key, value, **options)
    return _attend_packed(layer, query, key, value, structure.padding, options)


def _attend_packed(
    layer: WatchedLayer, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, options: dict[str, Any]
) -> Tensor | None:
    """Attention over the real tokens alone; padding rows come out as zero. No size depends on how much padding there
    is: nothing waits for the device, and torch.compile can follow."""
    batch, _, length, _ = query.shape
    real = padding[:, :length].to(query.device)
    order = torch.sort((~real.bool()).flatten().byte(), stable=True).indices  # [B * S], the real tokens first
    bounds = torch.nn.functional.pad(real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))  # [B + 1]
    packed = (x.transpose(1, 2).flatten(0, 1)[order].transpose(0, 1)[None] for x in (query, key, value))
    out = layer.attend(
        *packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=length, max_seqlen_k=length, **options
    )
    if out is None:
        return None
    rows = out[0].transpose(0, 1)  # [B * S, H, D]; zero past the last real token
    placed: Tensor = torch.zeros_like(rows).index_copy(0, order, rows)
    return placed.view(batch, length, *placed.shape[1:]).transpose(1, 2)


def dispatch_to_foreshock(model: nn.Module) -> Callable[[], None]:
    """Let every transformers model inside `model` dispatch to foreshock; returns the undoing.

    Raises ValueError for a model that does not follow transformers' attention interface.
    """
    AttentionInterface.register(NAME, foreshock_attention)
    AttentionMaskInterface.register(NAME, foreshock_mask)
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = {id(m.config): (m.config, m.config._attn_implementation) for m in models}
    forget_positions = watch_positions(models)
    nested = {id(child) for m in models for child in m.modules() if child is not m}
    for root in (m for m in models if id(m) not in nested):
        root.set_attn_implementation(NAME)
        if root.config._attn_implementation != NAME:
            forget_positions()
            raise ValueError(
                f"{type(root).__name__} does not let its attention be set; use one that follows AttentionInterface"
            )

    def undo() -> None:
        forget_positions()
        for config, name in before.values():
            config._attn_implementation_internal = name

    return undo


_original_interface: Final = ALL_ATTENTION_FUNCTIONS.get_interface
_keeping: Final[list[object]] = []
"""One entry for each agent that keeps attention: one wrapper serves all of them, or each row would count for each."""


def _probed_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    return _probing(_original_interface(name, default), name)


def keep_dispatch() -> Callable[[], None]:
    """Probe every attention that transformers dispatches to, whatever its name, where the calling module is watched;
    returns the undoing. Names, masks and results stay as they are."""
    if not _keeping:
        ALL_ATTENTION_FUNCTIONS.get_interface = _probed_interface
    _keeping.append(token := object())

    def undo() -> None:
        _keeping.remove(token)
        if not _keeping and vars(ALL_ATTENTION_FUNCTIONS).get("get_interface") is _probed_interface:
            del ALL_ATTENTION_FUNCTIONS.get_interface

    return undo


def _probing(attention: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`attention`, called as before, with a sample of its rows measured; unless a switch moved the layer to ours."""

    def probed_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer: WatchedLayer | None = getattr(module, LAYER_ATTRIBUTE, None)
        kwargs_of_ours = ("dropout", "scaling", "is_causal", "sliding_window", "softcap")
        dropout, scaling, is_causal, sliding_window, softcap = (kwargs.get(k) for k in kwargs_of_ours)
        if layer is not None and not layer.keeps:
            if attention_mask is None and name != "eager":
                served = _attend(
                    layer, module, query, key, value, None, dropout or 0.0, scaling, is_causal, sliding_window, softcap
                )
                if served is not None:
                    return served.transpose(1, 2).contiguous(), None
            else:
                layer.leave_alone(
                    f"it was switched, but the mask of {name} attention keeps it from foreshock's kernels"
                )
        current.layer = None  # what the attention calls in turn is not measured a second time
        out, weights = attention(module, query, key, value, attention_mask, **kwargs)
        if layer is None:
            return out, weights
        unknown = [k for k in ("s_aux", "position_bias") if kwargs.get(k) is not None]
        if unknown or not (attention_mask is None or isinstance(attention_mask, Tensor)):
            layer.leave_alone(f"it passes {', '.join(unknown) or type(attention_mask).__name__}, which is not probed")
            return out, weights
        causal = False
        if name != "eager" and (attention_mask is None or attention_mask.dim() == 2):
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
        probed = layer.probed(
            out.transpose(1, 2),
            query,
            key,
            value,
            mask=_mask_of_scores(attention_mask, key.shape[2]),
            causal="bottom_right" if causal else "none",
            window=(sliding_window - 1, -1) if sliding_window and causal else (-1, -1),
            scale=scaling,
            softcap=softcap or 0.0,
            dropout_p=dropout or 0.0,
        )
        return probed.transpose(1, 2), weights

    return probed_attention


def _mask_of_scores(mask: Tensor | None, keys: int) -> Tensor | None:
    """As PyTorch's attn_mask; flash attention gets the real tokens alone, [B, S], and leaves the others' rows out."""
    if mask is None or mask.dim() == 4:
        return None if mask is None else mask[..., :keys]
    real = mask[:, :keys].bool()
    return (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1)
