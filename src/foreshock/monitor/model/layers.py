"""Where W_Q and W_K of each head lie, in their many layouts, as views into the module's own weights.

A spectral norm does not mind a transpose, so every layout is read as rows: the rows of head h are the weight vectors of
its D query (key) features over the E inputs.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from foreshock.monitor.model.weights import (
    Part,
    base_of,
    has_adapters,
    is_conv1d,
    is_sharded,
    is_wrapped,
    local_tensor,
    part_of,
    parts_of,
    stored,
    why_unread,
)

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
)
KEY_PROJECTIONS: Final = tuple(key for _, key in _SEPARATE)
_FUSED: Final = ("c_attn", "qkv", "qkv_proj", "Wqkv", "wqkv", "in_proj", "to_qkv", "c_qkv", "attn_qkv", "W_pack")
_FUSED_PER_KEY_HEAD: Final = ("query_key_value", "linear_qkv")
_PROJECTIONS: Final = frozenset((*chain.from_iterable(_SEPARATE), *_FUSED, *_FUSED_PER_KEY_HEAD))


class UnreadableWeightError(Exception):
    """The weight cannot be read: that would run code of the model or take a collective."""


class Held(NamedTuple):
    """What this process holds of the heads of one weight."""

    heads: range
    """The heads held whole, numbered from 0 within the module."""
    weights: Tensor
    """[heads, D, E], E being the inputs held."""
    whole_inputs: bool
    """Whether E is all inputs, not a part of them."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of each head in one weight: `head_dim` from starts[h] on, each `stride` behind the last."""

    holder: nn.Module
    weight: str
    starts: tuple[int, ...]
    head_dim: int
    stride: int = 1

    def read(self) -> Held:
        """The heads' weights as they are now. Raises UnreadableWeightError where they cannot be read now."""
        rows, part, inputs = self._rows()
        first = part.rows[0]
        held = self._within(part.rows)
        heads = range(held[0], held[-1] + 1) if held else range(0)
        if held != list(heads):
            raise UnreadableWeightError
        starts = [self.starts[h] - first for h in heads]
        if self.stride == 1 and all(b - a == self.head_dim for a, b in pairwise(starts)):
            begin = starts[0] if starts else 0
            weights = torch.unflatten(
                rows[begin : begin + len(starts) * self.head_dim], 0, (len(starts), self.head_dim)
            )
        else:
            length = self.stride * (self.head_dim - 1) + 1
            weights = torch.stack([rows[start : start + length : self.stride] for start in starts])
        return Held(heads, weights, part.columns == (0, inputs))

    def placed(self) -> list[list[int]] | None:
        """The heads that each process of the mesh holds whole; None where every process holds all of them."""
        weight = self._stored()
        if not is_sharded(weight):
            return None
        return [self._within(_turned(part, self.holder).rows) for part in parts_of(weight)]

    def straddling(self) -> list[int]:
        """Heads that no process holds whole, because their rows lie in more than one."""
        placed = self.placed()
        held = {head for heads in placed for head in heads} if placed is not None else set(range(len(self.starts)))
        return [head for head in range(len(self.starts)) if head not in held]

    def spread_inputs(self) -> bool:
        """Whether a process holds only some of the inputs of each row."""
        weight = self._stored()
        if not is_sharded(weight):
            return False
        return len({_turned(part, self.holder).columns for part in parts_of(weight)}) > 1

    def _stored(self) -> Any:
        """The weight as it lies there; None where code of the model computes it, which may write or draw numbers."""
        return stored(self.holder, self.weight)

    def _within(self, rows: tuple[int, int]) -> list[int]:
        last = self.stride * (self.head_dim - 1)
        return [h for h, start in enumerate(self.starts) if rows[0] <= start and start + last < rows[1]]

    def _rows(self) -> tuple[Tensor, Part, int]:
        """The part held as [rows, inputs], which part it is, and how many inputs there are."""
        weight = self._stored()
        if not isinstance(weight, Tensor) or has_adapters(
            self.holder
        ):  # computed since, for example by a spectral norm that was registered
            raise UnreadableWeightError
        local = local_tensor(weight)
        part = part_of(weight) if is_sharded(weight) else Part((0, weight.shape[0]), (0, weight.shape[1]))
        if local.shape != tuple(stop - start for start, stop in part):
            raise UnreadableWeightError
        turned = _output_dim(self.holder) == 1
        return local.t() if turned else local, _turned(part, self.holder), weight.shape[0 if turned else 1]


@dataclass(frozen=True, slots=True)
class Projection:
    """Where a layer's W_Q and W_K lie: in children of `owner`, or in itself."""

    layout: str
    query: HeadRows
    key: HeadRows
    owner: nn.Module
    query_of_shared: HeadRows | None = None
    """The query features that meet keys which all heads share, where `key` is only what is each head's own."""

    @property
    def sides(self) -> list[HeadRows]:
        """All rows that are a head's own."""
        return [side for side in (self.query, self.key, self.query_of_shared) if side is not None]

    def of_heads(self, heads: range, kv_heads: range) -> "Projection":
        """The same for some of its heads only."""
        parts = ((self.query, heads), (self.key, kv_heads))
        query, key = (replace(rows, starts=rows.starts[part.start : part.stop]) for rows, part in parts)
        return replace(self, query=query, key=key)

    def of_weights_alone(self, why: str) -> "Projection":
        """The same, with a note that its queries and keys do not follow from the weights alone."""
        note = ", norms of the weights only: "
        return (
            self
            if why in self.layout
            else replace(self, layout=self.layout + (", " if note in self.layout else note) + why)
        )

    @property
    def unmeasured(self) -> list[int]:
        """Heads (key heads stand for those who read them) that straddle processes."""
        return sorted(set(self.query.straddling()) | self._readers(self.key.straddling()))

    @property
    def apart(self) -> list[int]:
        """Heads of which no process holds W_Q and W_K together, though each lies whole in one."""
        query, key = self.query.placed(), self.key.placed()
        if query is None or key is None or len(query) != len(key):
            return []
        together = {head for q, k in zip(query, key, strict=True) for head in set(q) & self._readers(k)}
        return sorted(set(range(len(self.query.starts))) - together - set(self.unmeasured))

    def gaps(self, first_head: int = 0) -> str:
        """What is not measured and why, for the table of what was found; heads are numbered from `first_head`."""
        if self.query.spread_inputs() or self.key.spread_inputs():
            return ", norms not measured: the inputs of W_Q or W_K are spread over processes"
        gaps = ""
        for heads, why in (
            (self.unmeasured, "norms of heads {} not measured: they straddle processes"),
            (self.apart, "norm of W_Q W_K^T of heads {} not measured: W_Q and W_K are in different processes"),
        ):
            gaps += f", {why.format(', '.join(str(first_head + head) for head in heads))}" if heads else ""
        return gaps

    def _readers(self, kv_heads: Iterable[int]) -> set[int]:
        group = len(self.query.starts) // len(self.key.starts)
        return {kv_head * group + member for kv_head in kv_heads for member in range(group)}


def find_projection(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> Projection | None:
    """W_Q and W_K of an attention module, or None where they are not found (`why_unmeasured` says why)."""
    if why_unmeasured(module) != NOT_FOUND:
        return None
    projection = _find_projection(module, heads, kv_heads, head_dim)
    if projection is None:
        return None
    return projection.of_weights_alone("heads are normalised") if normalises_heads(module) else projection


NOT_FOUND: Final = "W_Q and W_K were not found"
_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEAD_NORM: Final = re.compile(r"(q|k|query|key|qk)_?(layer_?norm|norm|ln)|(layer_?norm|norm|ln)_?(q|k|query|key|qk)")
_HEAD_NORM_FLAGS: Final = ("qk_norm", "norm_qk", "use_qk_norm", "qk_layernorm")


def normalises_heads(module: nn.Module) -> bool:
    """Whether a name or a flag of the module says that it divides queries and keys by their norms."""
    named = (child for name, child in module._modules.items() if _HEAD_NORM.fullmatch(name))
    by_module = any(child is not None and not isinstance(child, nn.Identity) for child in named)
    return by_module or any(getattr(module, flag, None) is True for flag in _HEAD_NORM_FLAGS)


def why_unmeasured(module: nn.Module) -> str:
    """Why a module without a Projection has none."""
    if type(module).__module__.startswith("x_transformers") and (getattr(module, "groups", 1) or 1) > 1:
        return "x-transformers deals its query heads out to the key heads in turn"
    for name, child in module._modules.items():
        if re.fullmatch(r"[qk]_?\w*conv\w*", name):
            return f"queries or keys pass through a convolution ({name})"
        weight = stored(base_of(child)) if child is not None else None
        if isinstance(weight, Tensor) and weight.dtype not in _FLOATS:
            dtype = str(weight.dtype).removeprefix("torch.")
            return f"the weight of {name} is stored as {dtype} and scaled elsewhere"
        if isinstance(weight, Tensor) and is_wrapped(weight):
            return f"the weight of {name} is stored as {type(weight).__name__}"
        if name in _PROJECTIONS and child is not None and (why := why_projection_unread(name, child)):
            return why
    return NOT_FOUND


def why_projection_unread(name: str, projection: nn.Module) -> str:
    """Why the weight of a module's projection cannot be read, in words; "" where it can."""
    package, why = type(projection).__module__.partition(".")[0], why_unread(projection)
    return "" if why is None else f"{name} is {package}'s {type(projection).__name__}, {why}"


def _find_projection(module: nn.Module, heads: int, kv_heads: int, head_dim: int) -> Projection | None:
    blocks, kv_blocks = _blocks(heads, head_dim), _blocks(kv_heads, head_dim)
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead_attention(module, blocks, head_dim)
    for query_name, key_name in _SEPARATE:
        query = _child(module, query_name, heads * head_dim)
        key = _child(module, key_name, kv_heads * head_dim)
        if query is not None and key is not None:
            layout = f"separate ({query_name}, {key_name})"
            rows = HeadRows(query, "weight", blocks, head_dim), HeadRows(key, "weight", kv_blocks, head_dim)
            return Projection(layout, *rows, module)
    if isinstance(inner := getattr(module, "qkv_linear", None), nn.Module) and outputs_of(inner) is None:
        return find_projection(inner, heads, kv_heads, head_dim)  # torchtitan keeps them in a module of their own
    fused_width = (heads + 2 * kv_heads) * head_dim
    group = heads // kv_heads
    for name in (*_FUSED_PER_KEY_HEAD, *_also_per_key_head(module)):
        if (fused := _child(module, name, fused_width)) is not None:  # each key head: its queries, K, V
            starts = [((h // group) * (group + 2) + h % group) * head_dim for h in range(heads)]
            key_starts = [(k * (group + 2) + group) * head_dim for k in range(kv_heads)]
            return _fused(module, fused, f"fused per key head ({name})", starts, key_starts, head_dim)
    for name in _FUSED:
        if (fused := _child(module, name, fused_width)) is not None:
            kind = "Conv1D" if _output_dim(fused) else "Linear"
            shifted = [heads * head_dim + start for start in kv_blocks]
            return _fused(module, fused, f"fused Q, K, V ({name}, {kind})", blocks, shifted, head_dim)
    return None


def _also_per_key_head(module: nn.Module) -> Iterator[str]:
    """Names that elsewhere mean Q, K, V one after the other."""
    if hasattr(module, "r_dim"):  # torchtitan
        yield "wqkv"
    if getattr(module, "multi_query", None) is False:  # transformers' GPTBigCode: each head its query, key, value
        yield "c_attn"


def _blocks(heads: int, head_dim: int) -> tuple[int, ...]:
    return tuple(head * head_dim for head in range(heads))


def _fused(
    owner: nn.Module, child: nn.Module, layout: str, query: Sequence[int], key: Sequence[int], head_dim: int
) -> Projection:
    of_query, of_key = (HeadRows(child, "weight", tuple(starts), head_dim) for starts in (query, key))
    return Projection(layout, of_query, of_key, owner)


def _child(module: nn.Module, name: str, outputs: int) -> nn.Module | None:
    """The projection of this name, if it is one and has this many outputs."""
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) and outputs_of(child) == outputs else None


def all_query_heads(module: nn.Module, head_dim: int) -> int | None:
    """The heads of a query projection that is sharded, all processes together; None for any other."""
    for name, _ in _SEPARATE:
        child = getattr(module, name, None)
        if (width := outputs_of(child)) is not None:
            return width // head_dim if is_sharded(child.weight) else None  # type: ignore[union-attr]
    return None


def query_width(module: nn.Module, heads: int, kv_heads: int) -> int | None:
    """heads * head_dim as the module's own projections show it, or None."""
    for query_name, _ in _SEPARATE:
        if (width := _width(getattr(module, query_name, None))) is not None:
            return width
    for name in (*_FUSED, *_FUSED_PER_KEY_HEAD):
        width = _width(getattr(module, name, None))
        if width is not None and width * heads % (heads + 2 * kv_heads) == 0:
            return width * heads // (heads + 2 * kv_heads)
    return None


def key_heads_by_width(module: nn.Module, heads: int, head_dim: int) -> int:
    """Key heads as the module's own projections show them, or 0."""
    if isinstance(module, nn.MultiheadAttention):
        return heads
    for query_name, key_name in _SEPARATE:
        query, key = (_width(getattr(module, name, None)) for name in (query_name, key_name))
        if query is not None and key is not None:
            kv_heads = key // head_dim
            fits = query == heads * head_dim and key % head_dim == 0 and kv_heads > 0 and heads % kv_heads == 0
            return kv_heads if fits else 0
    fused = (_width(getattr(module, name, None)) for name in (*_FUSED, *_FUSED_PER_KEY_HEAD))
    own = next((width // head_dim - heads for width in fused if width is not None and width % head_dim == 0), 0)
    return own // 2 if own > 0 and own % 2 == 0 and heads % (own // 2) == 0 else 0


def outputs_of(module: object) -> int | None:
    """How many outputs a projection has, those of all processes; None where its weight cannot be read."""
    if not isinstance(module, nn.Module) or has_adapters(module):
        return None  # the base's weight alone would give the norm of a W_Q that nobody uses
    weight = stored(module)
    return weight.shape[_output_dim(module)] if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _width(module: object) -> int | None:
    """How many outputs a projection has, also where its weight cannot be read."""
    if isinstance(module, nn.Module) and (outputs := outputs_of(base_of(module))) is not None:
        return outputs
    width = getattr(getattr(module, "base_layer", module), "out_features", None)
    return width if isinstance(width, int) else None


def _output_dim(module: nn.Module) -> int:
    return 1 if is_conv1d(module) else 0


def _turned(part: Part, module: nn.Module) -> Part:
    return Part(part.columns, part.rows) if _output_dim(module) else part


def _of_multihead_attention(module: nn.MultiheadAttention, blocks: tuple[int, ...], head_dim: int) -> Projection | None:
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight")
    if any(hasattr(type(module), name) for name in names):
        return None  # computed by a property, a parametrization's for example
    if getattr(module, "_qkv_same_embed_dim", True):
        keys = tuple(module.embed_dim + start for start in blocks)
        query, key = (HeadRows(module, "in_proj_weight", starts, head_dim) for starts in (blocks, keys))
        return Projection("fused Q, K, V (in_proj_weight)", query, key, module)
    query, key = (HeadRows(module, name, blocks, head_dim) for name in ("q_proj_weight", "k_proj_weight"))
    return Projection("separate (q_proj_weight, k_proj_weight)", query, key, module)
