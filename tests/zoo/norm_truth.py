"""The spectral norms of a layer's heads by brute force, from its queries and keys for every unit input.

The inputs of the projections are replaced by the unit vectors, rotary embeddings and norms of queries and keys by the
identity, and PyTorch's attention by a recorder. Row i of a head's recorded queries, minus those of a zero input, is
then row i of its W_Q, independent of how the module stores it. From foreshock it needs only the names of projections.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_INTERFACE: Final = "norm_truth"
NORMS: Final = ("query_norm", "key_norm", "query_key_norm")


class NotRecordableError(Exception):
    """The queries and keys could not be recorded."""


def true_norms(
    model: nn.Module, given: dict[str, Any], layer: nn.Module, holders: list[nn.Module]
) -> dict[str, Tensor]:
    """Norms [H] by name of one attention layer, for the inputs `given`; `holders` are the modules with its weights."""
    if isinstance(layer, nn.MultiheadAttention):
        raise NotRecordableError("its projections are not modules")
    if getattr(layer, "add_q_proj", None) is not None:
        raise NotRecordableError("two kinds of tokens have separate projections")
    width = _inputs(holders[0])
    units = torch.cat([torch.zeros(1, width), torch.eye(width)])
    given = one_token(given, len(units))
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    while any(sum(x.shape[1] for x in part) < len(units) for part in parts):
        recorded_counts = [sum(x.shape[1] for x in part) for part in parts]
        for through_interface in (False, True):  # of transformers; it is used if PyTorch's function is not called
            recorded = _record(through_interface, model, given, layer, holders, units, recorded_counts)
            if recorded is not None:
                break
        else:
            raise NotRecordableError("its forward does not call an attention function with these inputs")
        for part, value in zip(parts, recorded, strict=True):
            part.append(value)
    query, key = (torch.cat(part, 1)[:, : len(units)].double() for part in parts)
    query, key = query[:, 1:] - query[:, :1], key[:, 1:] - key[:, :1]  # [H, E, D], without the bias
    key = key.repeat_interleave(len(query) // len(key), 0)
    norms = (torch.linalg.matrix_norm(x, 2) for x in (query, key, query @ key.mT))
    return dict(zip(NORMS, norms, strict=True))


def _inputs(holder: nn.Module) -> int:
    weight: Any = holder.weight
    return int(weight.shape[0 if type(holder).__name__ == "Conv1D" else 1])


def one_token(given: dict[str, Any], rows: int) -> dict[str, Any]:
    """Token-id inputs as rows of one token, so rotary embeddings have no effect; other inputs unchanged."""
    if all(
        isinstance(v, bool) or (isinstance(v, Tensor) and v.dtype == torch.int64 and v.dim() == 2)
        for v in given.values()
    ):
        return {n: v[:1, :1].repeat(rows, 1) if isinstance(v, Tensor) else v for n, v in given.items()}
    return given


def _record(
    through_interface: bool,
    model: nn.Module,
    given: dict[str, Any],
    layer: nn.Module,
    holders: list[nn.Module],
    units: Tensor,
    recorded_counts: list[int],
) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [H, tokens, D] of the next rows of `units`; one call records as many rows as it has tokens."""
    recorded: list[tuple[Tensor, Tensor]] = []
    depth = [0]
    original = torch.nn.functional.scaled_dot_product_attention

    def record_call(query: Tensor, key: Tensor, scale: float | None) -> None:
        if depth[0] and not recorded and query.dim() == 4:
            # some layers multiply their queries by the scale themselves
            scaled = float(getattr(layer, "scaling", 1.0)) if scale == 1.0 else 1.0
            query, key = (x.detach().transpose(0, 1).flatten(1, 2) for x in (query / scaled, key))
            recorded.append((query, key))

    def recorder(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        record_call(query, key, kwargs.get("scale"))
        out: Tensor = original(query, key, value, *args, **kwargs)
        return out

    def interface(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *_: Any,
        scaling: Any = None,
        **__: Any,
    ) -> Any:
        record_call(query, key, scaling)
        groups = query.shape[1] // value.shape[1]
        value = value.repeat_interleave(groups, 1).mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1)
        return value.transpose(1, 2).contiguous(), None

    def replace(start: int) -> Any:
        def replaced(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            count = x.numel() // x.shape[-1]
            if x.shape[-1] != units.shape[1]:
                raise NotRecordableError("its queries and keys have inputs of different widths")
            rows = units[torch.arange(start, start + count) % len(units)]
            return (rows.view(x.shape).to(x.dtype), *args[1:])

        return replaced

    def enter(*_: Any) -> None:
        depth[0] += 1

    def leave(*_: Any) -> None:
        depth[0] -= 1

    with contextlib.ExitStack() as stack, torch.no_grad():
        hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
        starts_by_holder = {
            id(holder): (holder, start)
            for holder, start in zip(reversed(holders), reversed(recorded_counts), strict=True)
        }
        hooks += [holder.register_forward_pre_hook(replace(start)) for holder, start in starts_by_holder.values()]
        for name, module in model.named_modules():
            if re.search(r"rotary|rope|rot_?emb", f"{name} {type(module).__name__}", re.IGNORECASE):
                hooks.append(module.register_forward_hook(_no_rotation))
            config: Any = getattr(module, "config", None)
            if through_interface and getattr(config, "_attn_implementation", None) in ("eager", "sdpa"):
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = _INTERFACE
        for name, module in layer.named_modules():
            if is_head_norm(name):
                hooks.append(module.register_forward_hook(lambda _, args, __: args[0]))
        for hook in hooks:
            stack.callback(hook.remove)
        AttentionInterface.register(_INTERFACE, interface)
        AttentionMaskInterface.register(_INTERFACE, sdpa_mask)
        torch.nn.functional.scaled_dot_product_attention = recorder
        stack.callback(setattr, torch.nn.functional, "scaled_dot_product_attention", original)
        model(**given)
    return recorded[0] if recorded else None


def is_head_norm(name: str) -> bool:
    """Whether a submodule with this name normalises queries or keys."""
    return (
        bool(
            re.search(
                r"(^|\.)(q|k|query|key|norm_q|norm_k|qk)_?(layer)?_?(norm|layernorm)?$|(q|k|query|key)_(layer)?norm",
                name,
            )
        )
        and "norm" in name
    )


def _no_rotation(module: nn.Module, args: Any, output: Any) -> Any:
    """If a module returns cosines and sines, return ones and zeros instead."""
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(o, Tensor) for o in output):
        return torch.ones_like(output[0]), torch.zeros_like(output[1])
    return output


def reported_norms(model: nn.Module, agent: Any) -> Iterator[tuple[str, nn.Module, list[nn.Module], dict[str, Tensor]]]:
    """Name, module, weight modules and norms [H] of every layer whose norms foreshock reports."""
    attached = agent._attached
    for _ in range(40):  # the iterations start from the last result
        measured = agent._sampler.norms.measure()
    start = 0
    for layer, watched in zip(attached.layers, attached.watched, strict=True):
        heads, module = len(layer.heads), watched.home()
        if (projection := watched.layout.current()) is not None:
            norms = {name: values[start : start + heads] for name, values in measured.items()}
            yield layer.name, module, [projection.query.holder, projection.key.holder], norms
        start += heads
