"""Watch the attention of libraries, by replacing the objects through which their calls pass.

Calls with an argument that is not known here are neither changed nor measured; the agent reports the argument.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import Rounds
from foreshock.monitor.attention.watched_layer import (
    Packed,
    expect_interception,
    layer_of_this_call,
    note_call_outside,
    note_interception,
    was_intercepted,
)
from foreshock.monitor.model.discovery import ORIGINAL, Entry, Make


class LibraryCall(NamedTuple):
    """A call of a library, described by the arguments of `WatchedLayer.call`."""

    operands: tuple[Tensor, Tensor, Tensor]
    """Query, key and value as the library takes them."""
    scores: dict[str, Any]
    packed: Packed | None = None
    why: str | None = None
    """Why our kernels cannot compute it."""
    rounds: Rounds = "operands"
    axes: tuple[int, int, int, int] = (0, 2, 1, 3)
    """The dimensions of batch, heads, tokens and features, after `four` has given a tensor four dimensions."""
    four: Callable[[Tensor], Tensor] = lambda x: x
    as_theirs: Callable[[Tensor], Tensor] = lambda x: x
    """Undoes `four` for the output."""

    def heads_first(self, x: Tensor) -> Tensor:
        return self.four(x).permute(self.axes)

    def heads_back(self, x: Tensor) -> Tensor:
        return self.as_theirs(x.permute([self.axes.index(axis) for axis in range(4)]))


def stand_in(original: Any, entry: Entry) -> Any:
    """Return the replacement of `original`, through which calls of the library pass while an agent is attached."""
    names, library, describe = tuple(entry.arguments), original.__module__, _DESCRIBED[entry.make]
    name = f"{library}.{original.__name__}"

    def described(args: Any, kwargs: Any) -> LibraryCall | str:
        return describe({**entry.arguments, **dict(zip(names, args, strict=False)), **kwargs}, library)

    if isinstance(original, type):

        def apply(*args: Any) -> Any:
            return watched_call(lambda: original.apply(*args), lambda: described(args, {}), name)  # type: ignore[attr-defined]

        methods = {name: value for name, value in vars(original).items() if isinstance(value, staticmethod)}
        return type(original.__name__, (), {**methods, "apply": staticmethod(apply), ORIGINAL: original})

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return watched_call(lambda: original(*args, **kwargs), lambda: described(args, kwargs), name)

    setattr(function, ORIGINAL, original)
    return function


def watched_call(own: Callable[[], Any], describe: Callable[[], LibraryCall | str], name: str) -> Any:
    """Return the result of a call of a library's function with the full name `name`: that of our kernels, or its own
    with a sample of rows measured."""
    layer = layer_of_this_call()
    if layer is None:
        if not torch.compiler.is_compiling() and not isinstance(call := describe(), str):
            note_call_outside(*(call.heads_first(x) for x in call.operands[:2]))
        return own()
    call = describe()
    if isinstance(call, str):
        expect_interception()
        result = own()
        if not was_intercepted():
            note_interception()
            layer.count_unmeasured_call(call)
        return result
    operands = [call.heads_first(x) for x in call.operands]
    computed = layer.on_kernels(*operands, why=call.why, packed=call.packed, **call.scores)
    if computed is not None:
        note_interception(*operands[:2])
        return call.heads_back(computed).contiguous()
    expect_interception()
    result = own()
    if was_intercepted():  # the library called another watched function, which knows the operands better
        return result
    note_interception(*operands[:2])
    out, *more = result if isinstance(result, tuple) else (result,)
    probed = layer.probed(
        call.heads_first(out), *operands, packed=call.packed, rounds=call.rounds, by=name, **call.scores
    )
    out = call.heads_back(probed)
    return (out, *more) if isinstance(result, tuple) else out


def _asked(given: dict[str, Any], known: Collection[str]) -> str:
    """Return a list of the arguments of a call that are set but not known, as text."""
    return ", ".join(
        name for name, value in given.items() if name not in known and (isinstance(value, Tensor) or bool(value))
    )


_FLASH: Final = frozenset(
    {
        *("q", "k", "v", "qkv", "kv", "num_heads_q"),
        *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size", "softcap", "dropout_p"),
        # no influence on the scores
        *("deterministic", "return_softmax", "return_lse", "is_grad_enabled", "num_splits", "pack_gqa", "sm_margin"),
        *("min_seqlen_k", "scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"),
    }
)


def _of_flash(given: dict[str, Any], library: str) -> LibraryCall | str:
    """Describe a call of flash_attn 2, 3 or 4. Its causal mask and window are aligned to the bottom right."""
    if asked := _asked(given, _FLASH):
        return f"it passes {asked} to {library}, which is not probed"
    if (qkv := given.get("qkv")) is not None:
        heads = given.get("num_heads_q")
        rest = None if heads is None else (qkv.shape[-2] - heads) // 2
        operands = qkv.unbind(-3) if rest is None else qkv.split([heads, rest, rest], -2)
    else:
        operands = given["q"], *(given["kv"].unbind(-3) if "kv" in given else (given["k"], given["v"]))
    ends_q, ends_k = (given.get(name, given.get("cu_seqlens")) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    if (ends_q is None) != (ends_k is None):
        return f"it packs either its queries or its keys in {library}, which is not probed"
    longest = (given.get(name, given.get("max_seqlen")) for name in ("max_seqlen_q", "max_seqlen_k"))
    max_q, max_k = (length if isinstance(length, int) else None for length in longest)
    packed = None if ends_q is None or ends_k is None else Packed(ends_q, ends_k, max_q, max_k)
    left, right = (-1 if side is None else side for side in given["window_size"])
    scores = {
        "causal": "bottom_right" if given["causal"] else "none",
        "window": (left, -1 if given["causal"] else right),
        "scale": given["softmax_scale"],
        "softcap": max(given.get("softcap") or 0.0, 0.0),
        "dropout_p": given.get("dropout_p") or 0.0,
    }
    several = given.get("return_softmax") or "return_lse" in given
    why = f"{library} returns more than the output, which our kernels do not" if several else None
    if packed is None:
        return LibraryCall(operands, scores, why=why)
    return LibraryCall(operands, scores, packed, why, four=lambda x: x[None], as_theirs=lambda x: x[0])


_VARLEN: Final = frozenset(
    {
        *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"),
        "num_splits",  # no influence on the scores
    }
)


def _of_varlen(given: dict[str, Any], library: str) -> LibraryCall | str:
    """Describe a call of PyTorch's varlen_attn: operands [T, H, D]. Its window is aligned to the bottom right; a right
    side of 0 is causal."""
    query, key, ends_k = given["query"], given["key"], given["cu_seq_k"]
    asked = _asked(given, _VARLEN) or ("" if ends_k is not None else "no cu_seq_k")
    if asked:
        return f"it passes {asked} to {library}, which is not probed"
    if not given.get("enable_gqa") and query.shape[1] != key.shape[1]:
        return "query and key differ in heads without enable_gqa"
    left, right = given["window_size"]
    scores = {
        "causal": "bottom_right" if right == 0 else "none",
        "window": (left, -1 if right == 0 else right),
        "scale": given["scale"],
    }
    packed = Packed(given["cu_seq_q"], ends_k, given["max_q"], given["max_k"])
    return LibraryCall((query, key, given["value"]), scores, packed, four=lambda x: x[None], as_theirs=lambda x: x[0])


_TRANSFORMER_ENGINE: Final = frozenset(
    {
        *("self", "query_layer", "key_layer", "value_layer", "qkv_format", "attn_mask_type", "window_size"),
        *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "bottom_right_diagonal"),
        # no influence on the scores, or only together with others that are reported
        *("attention_mask", "core_attention_bias_type", "fast_zero_fill", "bf16_backward", "num_splits"),
        "qkv_interleave_dim",
    }
)
_MASK_TYPES: Final = {"": "none", "causal": "top_left", "causal_bottom_right": "bottom_right"}


def _of_transformer_engine(given: dict[str, Any], library: str) -> LibraryCall | str:
    """Describe a call of TransformerEngine's DotProductAttention: operands [S, B, H, D], [B, S, H, D] or packed
    [T, H, D]. The output has the heads concatenated in the last dimension."""
    module, query = given["self"], given["query_layer"]
    order = given["qkv_format"] or module.qkv_format
    packs = order == "thd"
    kind = (given["attn_mask_type"] or module.attn_mask_type).replace(",", "_")
    kind = {"no_mask": "", "causal_padding": "padding_causal"}.get(kind, kind)
    scored = kind.removeprefix("padding").removeprefix("_") if packs else kind
    asked = _asked(given, _TRANSFORMER_ENGINE)
    if scored not in _MASK_TYPES or (given["attention_mask"] is not None and kind != scored):
        asked = f"attn_mask_type={kind}"
    elif (given["cu_seqlens_q"] is not None) != packs:
        asked = "cu_seqlens_q"
    elif getattr(module, "softmax_type", "vanilla") != "vanilla":
        asked = "softmax_type"
    elif getattr(module, "cp_group", None) is not None and _processes(module.cp_group) > 1:
        asked = "cp_group"
    left, right = given["window_size"] or module.window_size or (-1, -1)
    if scored or (left, right) == (-1, 0):
        right = -1
    elif (left, right) != (-1, -1) and (given["bottom_right_diagonal"], module.bottom_right_diagonal) != (None, None):
        asked = "bottom_right_diagonal"
    if asked:
        return f"it passes {asked} to {library}, which is not probed"
    scores = {
        "causal": _MASK_TYPES[scored],
        "window": (left, right),
        "scale": module.flash_attention.softmax_scale,
        "dropout_p": module.attention_dropout if module.training else 0.0,
    }
    heads = query.shape[-2]

    def four(x: Tensor) -> Tensor:
        x = x if x.dim() == query.dim() else x.view(*x.shape[:-1], heads, -1)
        return x[None] if packs else x

    packed = None
    if packs:
        packed = Packed(given["cu_seqlens_q"], given["cu_seqlens_kv"], given["max_seqlen_q"], given["max_seqlen_kv"])
    why = f"{library} returns more than the output" if getattr(module, "return_max_logit", False) else None
    operands = query, given["key_layer"], given["value_layer"]
    axes = (1, 2, 0, 3) if order == "sbhd" else (0, 2, 1, 3)
    # rounding is unknown, because the library's environment variables choose its backend and whether it uses 8 bits
    return LibraryCall(
        operands, scores, packed, why, "unknown", axes, four, lambda x: (x[0] if packs else x).flatten(-2)
    )


def _processes(group: Any) -> int:
    groups = group if isinstance(group, list) else [group]
    return max(torch.distributed.get_world_size(each) for each in groups)


_DESCRIBED: Final[dict[Make, Callable[[dict[str, Any], str], LibraryCall | str]]] = {
    "flash_attn": _of_flash,
    "transformer_engine": _of_transformer_engine,
    "varlen": _of_varlen,
}
