"""Locate W_Q and W_K of each head, in many layouts, as views of the module's own weights.

A transpose does not change a spectral norm, so every layout is read as rows: the rows of head h are the weight vectors
of its D query (key) features over the E inputs. A weight is read only if that does not run code of the model. The part
of a DTensor that this process stores follows from its placements, without a collective.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Spans = list[tuple[int, int]]
"""[start, stop) in each dimension of a weight."""


def is_sharded(weight: object) -> bool:
    """Whether the weight is a DTensor, of which each process stores a part."""
    return hasattr(weight, "device_mesh") and hasattr(weight, "placements")


def is_wrapped(weight: Tensor) -> bool:
    """Whether the weight is a tensor subclass with another representation of its values, for example quantised, but
    not a DTensor."""
    return not is_sharded(weight) and type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__


def spans_of(weight: Any, mesh_dims: Sequence[int] | None = None) -> Spans:
    """Return the part of a weight that this process stores, split as torch.chunk splits it.

    `mesh_dims`: the dimensions of the mesh whose shards are considered, by default all.
    """
    spans = [(0, int(size)) for size in weight.shape]
    if not is_sharded(weight):
        return spans
    mesh, placements = weight.device_mesh, weight.placements
    found = (mesh.mesh == torch.distributed.get_rank()).nonzero().tolist()
    if not found:  # this process is outside the mesh
        return [(0, 0)] * len(spans)
    (coordinate,) = found
    dims = range(len(placements)) if mesh_dims is None else mesh_dims
    # FSDP's placement of a tensor-parallel weight comes first, but its split was made last. PyTorch marks such a
    # placement with a split_factor.
    for dim in sorted(dims, key=lambda d: hasattr(placements[d], "split_factor")):
        cut: int | None = getattr(placements[dim], "dim", None)
        if cut is not None:
            start, stop = spans[cut]
            size = -(-(stop - start) // mesh.size(dim))
            spans[cut] = (min(start + coordinate[dim] * size, stop), min(start + (coordinate[dim] + 1) * size, stop))
    return spans


def tensor_parallel_dims(weight: Any, *, under_fsdp: bool) -> list[int]:
    """Return the mesh dimensions over which the computation with a DTensor is sharded, not only its storage.

    FSDP gathers a weight before using it. Its dimensions come first: a replicated one, if any, then a sharded one.
    """
    placements = weight.placements
    first = 0
    if under_fsdp:
        first = next((d for d, placement in enumerate(placements) if hasattr(placement, "dim")), len(placements)) + 1
    return [d for d in range(first, len(placements)) if hasattr(placements[d], "dim")]


def under_fsdp(model: nn.Module, name: str) -> bool:
    """Whether FSDP2 (`fully_shard`) wraps the module of this name or a module that contains it."""
    from torch.distributed.fsdp import FSDPModule

    owners = [model]
    for part in name.split(".") if name else ():
        owners.append(owners[-1].get_submodule(part))
    return any(isinstance(owner, FSDPModule) for owner in owners)


def local_tensor(weight: Any) -> Tensor:
    """Return the part of a weight that this process stores, detached."""
    held: Tensor = weight.to_local() if is_sharded(weight) else weight
    return held.detach()


def stored(module: nn.Module, name: str = "weight") -> Any:
    """Return the stored tensor of this name; None if there is none, for example because a property computes it.

    Reading a property would run code of the model, which may change state, draw random numbers, or return the base
    weight without its adapters.
    """
    for held in (module._parameters, module._buffers, vars(module)):
        if name in held:
            return held[name]
    return None


def device_of(*modules: nn.Module) -> torch.device:
    """Return the device of the first parameter that is not on the meta device; the CPU if there is none."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((each.device for each in parameters if not each.is_meta), torch.device("cpu"))


def computes_otherwise(module: nn.Module) -> bool:
    """Whether the forward is neither that of nn.Linear nor that of Conv1D, so that it may scale or round the weight."""
    return getattr(module.forward, "__func__", None) is not nn.Linear.forward and not is_conv1d(module)


def change_by_weight(module: nn.Module, inputs: Any, outputs: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the difference between the outputs [..., out] of the first and the last token, and the difference that
    follows from the weight, each [out]; None if inputs [..., in] or weight are not available."""
    weight = stored(module)
    known = isinstance(weight, Tensor) and type(inputs) is Tensor and not is_sharded(weight) and not is_wrapped(weight)
    if not known or inputs.shape[:-1] != outputs.shape[:-1] or weight.shape != (outputs.shape[-1], inputs.shape[-1]):
        return None
    given, change = (x.detach().flatten(0, -2)[[0, -1]].float().diff(dim=0)[0] for x in (inputs, outputs))
    with torch.autocast(given.device.type, enabled=False):
        return change, weight.detach().float() @ given


def has_adapters(module: object) -> bool:
    """Whether the projection has low-rank adapters, named as in peft, torchtune, loralib and most custom code."""
    return hasattr(module, "lora_A") or hasattr(module, "lora_a")


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, whose weight is [in, out]; that of nn.Linear is [out, in]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


_SEPARATE: Final = (
    ("q_proj", "k_proj"),
    ("wq", "wk"),
    ("query", "key"),
    ("to_q", "to_k"),
    ("q_lin", "k_lin"),
    ("q", "k"),
    ("linear_q", "linear_k"),
    ("W_q", "W_k"),
    ("w_q", "w_k"),
    ("W_Q", "W_K"),
    ("query_proj", "key_proj"),
    ("q_linear", "k_linear"),
    ("c_q", "c_k"),
    ("Wq", "Wk"),
)
KEY_PROJECTIONS: Final = tuple(key for _, key in _SEPARATE)
_FUSED: Final = ("c_attn", "qkv", "qkv_proj", "Wqkv", "wqkv", "in_proj", "to_qkv", "c_qkv", "attn_qkv", "W_pack")
_FUSED_PER_KEY_HEAD: Final = ("query_key_value", "linear_qkv")
_LATENT: Final = (("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj"), ("wq_b", "wkv_b"), ("wq", "wkv_b"))
_PROJECTIONS: Final = frozenset((*chain.from_iterable((*_SEPARATE, *_LATENT)), *_FUSED, *_FUSED_PER_KEY_HEAD))


class UnreadableWeightError(Exception):
    """The weight cannot be read, because that would run code of the model or need a collective."""


class Held(NamedTuple):
    """The heads of one weight that this process stores."""

    heads: range
    """The heads that are stored completely, numbered from 0 within the module."""
    weights: Tensor
    """[heads, D, E]"""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of each head in one weight: `head_dim` rows, starting at starts[h]."""

    holder: nn.Module
    weight: str
    starts: tuple[int, ...]
    head_dim: int

    @property
    def outputs(self) -> npt.NDArray[np.int64]:
        """The row of each head and feature, int64 [H, D]."""
        rows: npt.NDArray[np.int64] = np.array(self.starts)[:, None] + np.arange(self.head_dim)
        return rows

    def read(self) -> Held:
        """Return the current weights of the heads. Raises UnreadableWeightError if they cannot be read now, or if this
        process stores only some of the inputs of each row."""
        weight = stored(self.holder, self.weight)
        # The weight may be computed by now, for example by a spectral norm that was registered after attach.
        if not isinstance(weight, Tensor) or has_adapters(self.holder):
            raise UnreadableWeightError
        local, spans = local_tensor(weight), spans_of(weight)
        if list(local.shape) != [stop - start for start, stop in spans]:
            raise UnreadableWeightError
        rows = local.t() if is_conv1d(self.holder) else local
        (first, stop), inputs = spans[::-1] if is_conv1d(self.holder) else spans
        ends = ((start, start + self.head_dim) for start in self.starts)
        held = [head for head, (start, end) in enumerate(ends) if first <= start and end <= stop]
        heads = range(held[0], held[-1] + 1) if held else range(0)
        if held != list(heads) or inputs != (0, weight.shape[0 if is_conv1d(self.holder) else 1]):
            raise UnreadableWeightError
        starts = [self.starts[h] - first for h in heads]
        weights = [rows[start : start + self.head_dim] for start in starts]
        return Held(heads, torch.stack(weights) if weights else rows.new_empty(0, self.head_dim, rows.shape[1]))


@dataclass(frozen=True, slots=True)
class Projection:
    """The rows of W_Q and W_K of a layer, which are weights of `owner` or of its children."""

    layout: str
    query: HeadRows
    key: HeadRows
    owner: nn.Module
    query_of_shared: HeadRows | None = None
    """The query features that are multiplied with key features shared by all heads. If given, `key` contains only the
    key features that belong to a single head."""

    @property
    def sides(self) -> list[HeadRows]:
        """All rows that belong to a single head: of queries, of keys, and of queries for shared keys, if any."""
        return [side for side in (self.query, self.key, self.query_of_shared) if side is not None]

    def of_heads(self, heads: range, kv_heads: range) -> "Projection":
        """Return a copy with only these heads."""
        parts = ((self.query, heads), (self.key, kv_heads))
        query, key = (replace(rows, starts=rows.starts[part.start : part.stop]) for rows, part in parts)
        return replace(self, query=query, key=key)

    @property
    def gaps(self) -> str:
        """A restriction of the norms if the weights are sharded, for the table of layers; else empty."""
        weights = (stored(side.holder, side.weight) for side in (self.query, self.key))
        return ", norms of heads that one process holds whole" if any(map(is_sharded, weights)) else ""


def projections(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> list[Projection]:
    """Return the locations of W_Q and W_K in an attention module that its names suggest, the most likely one first. If
    there is none, `why_unmeasured` returns the reason."""
    if isinstance(inner := getattr(module, "qkv_linear", None), nn.Module) and outputs_of(inner) is None:
        return projections(inner, heads, kv_heads, head_dim)  # torchtitan has a separate module for them
    blocks, kv_blocks = _blocks(heads, head_dim), _blocks(kv_heads, head_dim)

    def placed(layout: str, query: tuple[nn.Module, str, Any], key: tuple[nn.Module, str, Any]) -> Projection:
        of_query, of_key = (HeadRows(one, name, tuple(starts), head_dim) for one, name, starts in (query, key))
        return Projection(layout, of_query, of_key, module)

    if isinstance(module, nn.MultiheadAttention):
        name = "in_proj_weight"
        if stored(module, name) is None:
            return []  # three separate weights, or computed by a property, for example of a parametrization
        keys = [module.embed_dim + start for start in blocks]
        return [placed("fused Q, K, V (in_proj_weight)", (module, name, blocks), (module, name, keys))]
    group, wide = heads // kv_heads, heads * head_dim
    behind = [wide + start for start in kv_blocks]
    of_queries = [((h // group) * (group + 2) + h % group) * head_dim for h in range(heads)]
    of_keys = [(k * (group + 2) + group) * head_dim for k in range(kv_heads)]
    for names, query, key in _named(module):
        widths = outputs_of(query), outputs_of(key)
        if query is not key and widths == (wide, kv_heads * head_dim):
            return [placed(f"separate ({', '.join(names)})", (query, "weight", blocks), (key, "weight", kv_blocks))]
        if query is key and widths[0] == wide + 2 * kv_heads * head_dim:
            name, kind = names[0], "Conv1D" if is_conv1d(key) else "Linear"
            orders = [
                (f"fused Q, K, V ({name}, {kind})", blocks, behind),
                (f"fused per key head ({name})", of_queries, of_keys),  # each key head: its queries, K, V
            ]
            if name in _FUSED_PER_KEY_HEAD or hasattr(module, "r_dim"):  # torchtitan
                orders.reverse()
            return [placed(layout, (key, "weight", of_q), (key, "weight", of_k)) for layout, of_q, of_k in orders]
    return []


def find_projection(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> Projection | None:
    """Return the most likely one of `projections`; None if there is none."""
    return next(iter(projections(module, heads, kv_heads, head_dim)), None)


NOT_FOUND: Final = "W_Q and W_K were not found"
_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEAD_NORM: Final = re.compile(r"(q|k|query|key|qk)_?(layer_?norm|norm|ln)|(layer_?norm|norm|ln)_?(q|k|query|key|qk)")
_HEAD_NORM_FLAGS: Final = ("qk_norm", "norm_qk", "use_qk_norm", "qk_layernorm")


def normalises_heads(module: nn.Module) -> bool:
    """Whether a name or a flag of the module indicates that it normalises queries and keys."""
    named = (child for name, child in module._modules.items() if _HEAD_NORM.fullmatch(name))
    by_module = any(child is not None and not isinstance(child, nn.Identity) for child in named)
    return by_module or any(getattr(module, flag, None) is True for flag in _HEAD_NORM_FLAGS)


def why_unmeasured(module: nn.Module) -> str:
    """Return why W_Q and W_K of a module without a Projection cannot be measured."""
    if isinstance(module, nn.MultiheadAttention):
        return "it has no stored in_proj_weight: kdim or vdim is set, or the weight is computed"
    for name, child in module.named_children():
        if name in _PROJECTIONS and outputs_of(child) is None:
            why = "which has adapters" if has_adapters(child) else "whose weight is not a plain matrix"
            return f"{name} is {type(child).__module__.partition('.')[0]}'s {type(child).__name__}, {why}"
    return NOT_FOUND


def _named(module: nn.Module) -> Iterator[tuple[tuple[str, str], nn.Module, nn.Module]]:
    """Yield names, query projection and key projection of each readable pair; a fused projection is both."""
    for names in (*_SEPARATE, *((name, name) for name in (*_FUSED_PER_KEY_HEAD, *_FUSED))):
        query, key = (getattr(module, name, None) for name in names)
        if query is not None and key is not None and outputs_of(query) and outputs_of(key):
            yield names, query, key


def latent_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and projections of an attention whose keys are computed from a latent, by DeepSeek's names."""
    for names in _LATENT:
        children = [(name, child) for name, child in module.named_children() if name in names]
        if len(children) == 2 and all(outputs_of(child) is not None for _, child in children):
            return children
    return []


def latent_projections(module: nn.Module, heads: int, own: int, shared: int) -> list[Projection]:
    """Return the locations of W_Q and W_K in latent attention.

    In the query projection, each head has `own` features followed by `shared` ones; in the key projection, `own`
    features followed by others, such as those of values.
    """
    children = dict(latent_children(module))
    if not children:
        return []
    (query_name, query), (key_name, key) = sorted(children.items(), key=lambda child: "kv" in child[0])
    wide = (outputs_of(key) or 0) // heads
    if outputs_of(query) != heads * (own + shared) or wide < own or not shared:
        return []
    starts = _blocks(heads, own + shared)
    of_shared = HeadRows(query, "weight", tuple(start + own for start in starts), shared)
    sides = HeadRows(query, "weight", starts, own), HeadRows(key, "weight", _blocks(heads, wide), own)
    return [Projection(f"latent ({query_name}, {key_name})", *sides, module, of_shared)]


def _blocks(heads: int, head_dim: int) -> tuple[int, ...]:
    return tuple(head * head_dim for head in range(heads))


def all_query_heads(module: nn.Module, head_dim: int) -> int:
    """Return the number of heads of a sharded query projection, over all processes; 0 if it is not sharded."""
    for _, query, key in _named(module):
        return (outputs_of(query) or 0) // head_dim if query is not key and is_sharded(stored(query)) else 0
    return 0


def sizes_by_width(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the number of key heads and the head dim. One that is given as 0 is computed from the widths of the
    module's projections, and stays 0 if these do not show it."""
    if isinstance(module, nn.MultiheadAttention):
        return heads, head_dim or getattr(module, "head_dim", 0)
    for _, query, key in _named(module):
        wide, width = outputs_of(query) or 0, outputs_of(key) or 0
        if not head_dim:
            parts = heads if query is not key else heads + 2 * (kv_heads or heads)
            head_dim = 0 if wide % parts else wide // parts
        if head_dim and not kv_heads:
            width, part = (width, head_dim) if query is not key else (width - heads * head_dim, 2 * head_dim)
            kv_heads = 0 if width % part or heads % max(width // part, 1) else max(width // part, 0)
        break
    return kv_heads, head_dim


def outputs_of(module: object) -> int | None:
    """Return the number of outputs of a projection, over all processes; None if its weight is not a plain matrix."""
    if not isinstance(module, nn.Module) or has_adapters(module):
        return None  # the forward uses the base weight plus adapters, so the base weight would give a wrong norm
    weight = stored(module)
    plain = isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype in _FLOATS and not is_wrapped(weight)
    return int(weight.shape[is_conv1d(module)]) if plain else None
