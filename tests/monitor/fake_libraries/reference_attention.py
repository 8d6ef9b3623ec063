"""Forward and backward of the fake attention libraries, in plain PyTorch."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

POSITIONAL: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


def visible_keys(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    top_left: bool = False,
    cu_queries: Tensor | None = None,
    cu_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Visibility of each key for each query, bool [queries, keys], and the distance of each key from the diagonal."""
    ends_q = torch.tensor([0, queries]) if cu_queries is None else cu_queries.long()
    ends_k = torch.tensor([0, keys]) if cu_keys is None else cu_keys.long()
    row, column = torch.arange(queries), torch.arange(keys)
    of_row = torch.searchsorted(ends_q[1:].contiguous(), row, right=True)
    of_column = torch.searchsorted(ends_k[1:].contiguous(), column, right=True)
    longer = torch.zeros_like(ends_k.diff()) if top_left else ends_k.diff() - ends_q.diff()
    diagonal = row - ends_q[of_row] + longer[of_row]
    distance = (column - ends_k[of_column]) - diagonal.unsqueeze(1)
    visible = of_row.unsqueeze(1) == of_column
    left, right = window[0], 0 if causal else window[1]
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible, distance


def forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    bias: Tensor | None = None,
    **rule: Any,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of q [B, S, H, D] and k, v [B, Sk, Hkv, D], or of packed sequences [T, H, D]."""
    packed = q.dim() == 3
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    visible, distance = visible_keys(q.shape[1], k.shape[1], **rule)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)).float() * scale
    capped = softcap * (scores / softcap).tanh() if softcap > 0 else scores
    slope = torch.ones(()) if softcap <= 0 else 1 - (capped / softcap) ** 2
    if slopes is not None:
        capped = capped - slopes.view(-1, q.shape[2], 1, 1) * distance.abs()
    if bias is not None:
        capped = capped + bias
    capped = capped.masked_fill(~visible, -math.inf)
    dropout_mask = torch.nn.functional.dropout(torch.ones_like(capped), dropout_p) if dropout_p else torch.ones(())
    lse = capped.logsumexp(-1)
    weights = capped.softmax(-1).nan_to_num()
    out = torch.einsum("bhqk,bkhd->bqhd", (weights * dropout_mask).to(v.dtype), v.repeat_interleave(group, 2))
    ctx.save_for_backward(q, k, v, weights, dropout_mask, slope)
    ctx.scale, ctx.packed = scale, packed
    return (out[0], lse[0]) if packed else (out, lse)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v, weights, dropout_mask, slope = ctx.saved_tensors
    group = q.shape[2] // k.shape[2]
    grad = grad[None] if ctx.packed else grad
    wide_k, wide_v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    grad_v = torch.einsum("bhqk,bqhd->bkhd", (weights * dropout_mask).to(v.dtype), grad)
    grad_weights = torch.einsum("bqhd,bkhd->bhqk", grad, wide_v).float() * dropout_mask
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * slope * ctx.scale
    grad_q = torch.einsum("bhqk,bkhd->bqhd", grad_scores.to(q.dtype), wide_k)
    grad_k = torch.einsum("bhqk,bqhd->bkhd", grad_scores.to(k.dtype), q)
    grad_k, grad_v = (x.view(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (grad_k, grad_v))
    return tuple(x[0] if ctx.packed else x for x in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


def parts(given: dict[str, Any]) -> Any:
    """Query, key and value of a call, whose arguments may be packed."""
    if "q" in given:
        return given["q"], *(given["kv"].unbind(-3) if "kv" in given else (given["k"], given["v"]))
    heads, qkv = given.get("num_heads_q"), given["qkv"]
    rest = 0 if heads is None else (qkv.shape[-2] - heads) // 2
    return qkv.unbind(-3) if heads is None else qkv.split([heads, rest, rest], -2)


def function(module: str, name: str, arguments: str, *more: None) -> Any:
    """A torch.autograd.Function of FlashAttention with these arguments; it returns `more` after the log-sum-exp."""
    names = arguments.replace(",", " ").split()

    def forward_of_call(ctx: Any, *args: Any) -> Any:
        given = dict(zip(names, args, strict=True))
        ends = [given.get(f"cu_seqlens_{side}", given.get("cu_seqlens")) for side in ("q", "k")]
        left, right = given["window_size"]
        window = -1 if left is None else left, -1 if right is None else right
        rule: dict[str, Any] = {"causal": given["causal"], "window": window, "cu_queries": ends[0], "cu_keys": ends[1]}
        scores: dict[str, Any] = {
            "scale": given["softmax_scale"],
            "softcap": given["softcap"],
            "slopes": given.get("alibi_slopes"),
        }
        dropout_p = given.get("dropout_p", 0.0)
        q, k, v = parts(given)
        out, lse = forward(ctx, q, k, v, dropout_p=dropout_p, **scores, **rule)
        return (out, lse, *more) if given.get("return_softmax", True) else out

    def backward_of_call(ctx: Any, grad: Tensor, *_: Any) -> Any:
        query, key, value = backward(ctx, grad)
        if "num_heads_q" in names:
            grads: list[Tensor] = [torch.cat((query, key, value), -2)]
        elif "qkv" in names:
            grads = [torch.stack((query, key, value), -3)]
        else:
            grads = [query, torch.stack((key, value), -3)] if "kv" in names else [query, key, value]
        return *grads, *[None] * (len(names) - len(grads))

    annotated: Any = forward_of_call  # the signature that the library's own function has
    annotated.__signature__ = inspect.Signature([inspect.Parameter(each, POSITIONAL) for each in ("ctx", *names)])
    methods = {
        "forward": staticmethod(forward_of_call),
        "backward": staticmethod(backward_of_call),
        "__module__": module,
    }
    return type(name, (torch.autograd.Function,), methods)


def public(namespace: dict[str, Any], cls: str, arguments: str, **defaults: Any) -> Callable[..., Any]:
    """A library's function with these arguments, which calls the class of that name in its module."""
    names = arguments.replace(",", " ").split()

    def function(*args: Any, **options: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **options}
        given["return_softmax"] = given.pop("return_attn_probs", False)
        return namespace[cls].apply(*[given.get(name) for name in every])

    every = list(inspect.signature(namespace[cls].forward).parameters)[1:]
    annotated: Any = function
    annotated.__signature__ = inspect.Signature([inspect.Parameter(name, POSITIONAL) for name in names])
    return function
