"""The spectral norms of a layer's heads by brute force: what its queries and keys really are for every unit input.

The inputs of the projections are replaced by the unit vectors, rotary embeddings and norms of queries and keys by the
identity, and PyTorch's attention by a recorder: row i of a head's recorded queries, less those of a zero input, is then
row i of its W_Q, however the module stores it. Needs nothing of foreshock but the names of the projections.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

NORMS = ("query_norm", "key_norm", "query_key_norm")


class NoTruthError(Exception):
    """The queries and keys could not be recorded; says why."""


def true_norms(
    model: nn.Module, given: dict[str, Any], layer: nn.Module, holders: list[nn.Module]
) -> dict[str, Tensor]:
    """Norms [H] by name of one attention layer of a model that takes `given`; `holders` hold its weights."""
    width = _inputs(holders[0])
    units = torch.cat([torch.zeros(1, width), torch.eye(width)])
    queries, keys = [], []
    first = 0
    while first < len(units):
        recorded = _record(model, given, layer, holders, units, first)
        if recorded is None:
            raise NoTruthError("its forward did not come to scaled_dot_product_attention")
        query, key = recorded
        queries.append(query)
        keys.append(key)
        first += query.shape[1]
    query, key = torch.cat(queries, 1)[:, : len(units)], torch.cat(keys, 1)[:, : len(units)]
    query, key = (x[:, 1:] - x[:, :1] for x in (query.double(), key.double()))  # [H, E, D], without the bias
    key = key.repeat_interleave(len(query) // len(key), 0)
    norms = (torch.linalg.matrix_norm(x, 2) for x in (query, key, query @ key.mT))
    return dict(zip(NORMS, norms, strict=True))


def _inputs(holder: nn.Module) -> int:
    weight: Any = getattr(holder, "weight", None)
    weight = holder.in_proj_weight if weight is None else weight
    return int(weight.shape[0 if type(holder).__name__ == "Conv1D" else 1])


def _record(
    model: nn.Module, given: dict[str, Any], layer: nn.Module, holders: list[nn.Module], units: Tensor, first: int
) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [H, rows, D] of the rows of `units` from `first` on, as many as a call has tokens."""
    recorded: list[tuple[Tensor, Tensor]] = []
    depth = [0]
    original = torch.nn.functional.scaled_dot_product_attention

    def recorder(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if depth[0] and not recorded and query.dim() == 4:
            # heads first, then the tokens of all rows of the batch one after the other
            # some layers multiply their queries by the scale themselves
            scaled = getattr(layer, "scaling", 1.0) if kwargs.get("scale") == 1.0 else 1.0
            recorded.append(tuple(x.detach().transpose(0, 1).flatten(1, 2) for x in (query / scaled, key)))  # type: ignore[arg-type]
        out: Tensor = original(query, key, value, *args, **kwargs)
        return out

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        count = x.numel() // x.shape[-1]
        rows = units[torch.arange(first, first + count) % len(units)]
        return (rows.view(x.shape).to(x.dtype), *args[1:])

    def enter(*_: Any) -> None:
        depth[0] += 1

    def leave(*_: Any) -> None:
        depth[0] -= 1

    with contextlib.ExitStack() as stack, torch.no_grad():
        hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
        hooks += [holder.register_forward_pre_hook(replace) for holder in {id(h): h for h in holders}.values()]
        for name, module in model.named_modules():
            if re.search(r"rotary|rope|rot_?emb", f"{name} {type(module).__name__}", re.IGNORECASE):
                hooks.append(module.register_forward_hook(_no_rotation))
        for name, module in layer.named_modules():
            if is_head_norm(name):
                hooks.append(module.register_forward_hook(lambda _, args, __: args[0]))
        for hook in hooks:
            stack.callback(hook.remove)
        torch.nn.functional.scaled_dot_product_attention = recorder
        stack.callback(setattr, torch.nn.functional, "scaled_dot_product_attention", original)
        model(**given)
    return recorded[0] if recorded else None


def is_head_norm(name: str) -> bool:
    """Whether a module of this name within an attention module normalises queries or keys."""
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
    """Cosines of 1 and sines of 0 where a module returns both."""
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(o, Tensor) for o in output):
        return torch.ones_like(output[0]), torch.zeros_like(output[1])
    return output


def reported_norms(model: nn.Module, agent: Any) -> Iterator[tuple[str, nn.Module, list[nn.Module], dict[str, Tensor]]]:
    """Name, module, weight holders and norms [H] of every layer of which foreshock reports norms."""
    instruments = agent._instruments
    for _ in range(40):  # the iterations start from the last result
        measured = agent._norms.measure().norms
    start = 0
    for layer, module, projection in zip(instruments.layers, instruments.watched, instruments.projections, strict=True):
        heads = len(layer.heads)
        if projection is not None:
            norms = {name: values[start : start + heads] for name, values in measured.items()}
            yield layer.name, module, [projection.query.holder, projection.key.holder], norms
        start += heads
