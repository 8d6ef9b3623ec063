"""Which rows are which head's where no name shows it, above all where queries and keys come from a latent.

Hooks on the projections of a layer note a few tokens of their outputs, and the call of attention that follows keeps
the same tokens of what it was given. At the next step boundary these numbers show where the parts of queries and keys
lie (monitor/model/layouts.py). Where keys have a part that all heads share no norms are measured: QK-Clip alone asks.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from foreshock.monitor.attention.layout_proof import LayoutProof, proof_of
from foreshock.monitor.attention.watched_layer import LAYOUT_ATTRIBUTE
from foreshock.monitor.model.layers import HeadRows, Projection, outputs_of, why_projection_unread
from foreshock.monitor.model.layouts import Call, InconclusiveCallError, Numbers, Placed, parts_of
from foreshock.monitor.model.weights import has_adapters, is_sharded, stored

_TRIES: Final = 3
"""Calls that may fit no layout before it stays unknown, as in LayoutProof."""
_TOKENS: Final = 16
_LEAST_TOKENS: Final = 8
"""With fewer, different outputs may be the same multiple of each other by chance."""
_UNSEEN: Final = "no call of uncompiled code has shown yet which rows are which head's"
_SPREAD: Final = (
    "its projections are spread over processes by tensor parallelism, and the parts of a latent's heads are not known "
    "there"
)
_Given = tuple[Tensor, Tensor, Tensor]


class LatentProof(LayoutProof):
    """Where the rows of each head lie in a layer whose W_Q and W_K no name shows, as its calls show it."""

    def __init__(self, owner: nn.Module, heads: int, unmeasured: str) -> None:
        """owner: whose children make the queries and keys of its heads; unmeasured: why its norms are not measured."""
        self._latent: Projection | None = None
        super().__init__(None, unmeasured)
        self._owner: Final = owner
        self._heads: Final = heads
        self._begin()

    def _begin(self) -> None:
        self._latent = None
        self._left, self._because = _TRIES, _UNSEEN
        self._rows: dict[nn.Module, Tensor] = {}
        """Of the call under way: some tokens of each projection's outputs, [t, C]."""
        self._tokens_in_all: dict[nn.Module, int] = {}
        self._call: tuple[dict[nn.Module, Tensor], list[_Given]] | None = None
        self._spread = False
        self._changes = {}
        self._found_as = self._stands()

    def start(self) -> None:
        """Put hooks on the projections."""
        for name, projection in _projections(self._owner):
            other: LayoutProof | None = vars(projection).get(LAYOUT_ATTRIBUTE)
            if other is not None and any(each is projection for each in other.holders):  # else it is a copy's
                self._refuse(f"another layer computes with its {name} as well")
                if isinstance(other, LatentProof):
                    other._refuse(f"another layer computes with its {name} as well")
                return
        for projection in self.holders:
            self._watch(projection, _note)

    def _refuse(self, because: str) -> None:
        self._left, self._because, self._latent = 0, because, None
        self.stop()

    def _forget_outputs(self) -> None:
        super()._forget_outputs()
        self._rows, self._tokens_in_all = {}, {}

    @property
    def open(self) -> bool:
        """Whether a call is still to show where the heads lie."""
        return self._latent is None and self._left > 0 and self._call is None

    @property
    def proved(self) -> Projection | None:
        """What `scalable` gave last."""
        return None if self.gone else self._latent

    @property
    def waits(self) -> bool:
        """Whether a call has shown something that `scalable` has not looked at, or projections have changed since."""
        changed = self._latent is not None and not self.gone and self._stands() != self._found_as
        return changed or self._call is not None

    @property
    def holders(self) -> list[nn.Module]:
        """The projections of the layer."""
        return [projection for _, projection in _projections(self._owner)]

    # ---- in the forward -------------------------------------------------------------------------------------------

    def note_outputs(self, projection: nn.Module, args: Any, output: Tensor) -> None:
        """A projection has computed this output [..., C]."""
        self.note(projection, args, output)
        rows = output.detach().flatten(0, -2)
        self._rows[projection] = rows[:: _step(len(rows))][:_TOKENS].clone()
        self._tokens_in_all[projection] = len(rows)

    def note_spread(self) -> None:
        """A projection has computed an output of which this process holds a part."""
        self._spread = True

    def meet(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Attention is given query [B, H, S, D], key and value [B, Hkv, S, D]: keep some of their tokens. Compiled
        code shows nothing. Never raises."""
        if torch.compiler.is_compiling():
            return ()
        rows, counts = self._rows, self._tokens_in_all
        self._rows, self._tokens_in_all = {}, {}
        if rows and self.open:
            try:
                with torch.no_grad():
                    self._keep_tokens(rows, counts, query, key, value)
            except Exception as error:
                self._refuse(f"a call could not be looked at: {type(error).__name__}: {str(error)[:100]}")
        return ()

    def _keep_tokens(self, rows: dict[nn.Module, Tensor], counts: dict[nn.Module, int], *given: Tensor) -> None:
        query, key, value = given
        if any(type(x) is not Tensor or x.is_nested or x.dim() != 4 for x in given):
            return
        entries, heads, length, _ = query.shape
        rows = {module: own for module, own in rows.items() if counts[module] == entries * length}
        if heads != self._heads:
            self._refuse(f"attention was given {heads} heads where {self._heads} were announced")
        elif heads == 1:
            self._refuse("of a single head no call can show which part of a key all heads would share")
        elif key.shape[1] != heads:
            self._refuse(f"its {heads} query heads read {key.shape[1]} key heads, which no projection names")
        elif key.shape[2] == value.shape[2] == length and rows and entries * length >= _LEAST_TOKENS:
            self._call = rows, [_tokens(order, *given) for order in _orders(entries, length)]

    # ---- at a step boundary ---------------------------------------------------------------------------------------

    def current(self) -> Projection | None:
        """Where the weights lie now; None while that is unknown, and where keys have a part that all heads share."""
        self._look()
        latent = self.proved
        return latent if latent is not None and latent.query_of_shared is None else None

    def describe(self) -> str:
        """Where the weights lie, or why that is unknown."""
        found = None if self.proved is None or self.proved.query_of_shared is not None else self.proved
        return super().describe() if found is None else found.layout

    def scalable(self) -> Projection | str:
        """What QK-Clip may scale now, or why it may not."""
        if self.gone:
            return "its module was taken out of the model"
        self._look()
        return self._because if self._latent is None else self._latent

    def _look(self) -> None:
        self._forget_outputs()
        if self.gone:
            return
        if self._stands() != self._found_as:
            self.stop()
            self._begin()
            self.start()
        if self._call is None or self._latent is not None:
            return
        (rows, orders), self._call = self._call, None
        try:
            self._latent = self._parts_of(rows, orders)
        except InconclusiveCallError:
            return  # another call may show it
        except ValueError as error:
            self._left, self._because = self._left - 1, str(error)
        if self._latent is not None or not self._left:
            self.stop()

    def _parts_of(self, rows: dict[nn.Module, Tensor], orders: list[_Given]) -> Projection:
        if self._spread or any(outputs_of(projection) != own.shape[1] for projection, own in rows.items()):
            raise ValueError(_SPREAD)
        projections = {name: each for name, each in _projections(self._owner) if each in rows}
        outputs = {name: _numbers(rows[each]) for name, each in projections.items()}
        refused: list[Exception] = []
        for given in orders:
            error = max(torch.finfo(x.dtype).eps for x in (*rows.values(), *given))
            try:
                query, key, value = map(_numbers, given)
                parts = parts_of(Call(outputs, query, key, value, error))
            except (ValueError, InconclusiveCallError) as why:
                refused.append(why)
                continue
            names = dict.fromkeys(part.name for part in parts if part is not None)
            for otherwise in self._otherwise(projections[name] for name in names):
                raise ValueError(f"its scores do not follow from its weights alone: {otherwise}")
            self._changes = {}
            layout = f"found by a call ({', '.join(names)})"
            own, keys, shared = (part and _rows_in(projections[part.name], part) for part in parts)
            assert own is not None
            assert keys is not None
            return Projection(layout, own, keys, self._owner, shared)
        if inconclusive := [why for why in refused if isinstance(why, InconclusiveCallError)]:
            raise inconclusive[0]
        unread = [why_projection_unread(*child) for child in self._owner.named_children()]
        raise ValueError("; ".join(filter(None, (*unread, str(refused[0])))))

    def _stands(self) -> list[tuple[Any, ...]]:
        """What makes a projection another than it was, as in LayoutProof."""
        return [
            (child, type(child), "forward" in vars(child), has_adapters(child), stored(child) is None)
            for child in _descendants(self._owner)
        ]


def _note(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    proof = vars(module).get(LAYOUT_ATTRIBUTE)
    if isinstance(proof, LatentProof) and proof.open and is_sharded(output):
        proof.note_spread()
    elif isinstance(proof := proof_of(module, output), LatentProof):
        proof.note_outputs(module, args, output)


def _step(tokens: int) -> int:
    """From one of the tokens that are kept to the next: odd, so that they stand at different places of a sequence."""
    return max(1, (tokens - 1) // (_TOKENS - 1) - 1 | 1)


def _orders(entries: int, length: int) -> list[list[tuple[int, int]]]:
    """Which entry of the batch and which place the tokens are that were kept, batch first or sequence first."""
    kept = range(0, entries * length, _step(entries * length))[:_TOKENS]
    orders = [[divmod(token, length) for token in kept]]
    if entries > 1 and length > 1:
        orders.append([divmod(token, entries)[::-1] for token in kept])
    return orders


def _tokens(order: list[tuple[int, int]], *given: Tensor) -> Any:
    """Of each [B, H, S, D] these tokens, [t, H, D]."""
    return tuple(torch.stack([x.detach()[entry, :, place] for entry, place in order]) for x in given)


def _numbers(x: Tensor) -> Numbers:
    numbers: Numbers = x.cpu().double().numpy()
    return numbers


def _rows_in(holder: nn.Module, part: Placed) -> HeadRows:
    return HeadRows(holder, "weight", part.rows.starts, part.head_dim, part.rows.stride)


def _descendants(owner: nn.Module) -> Iterator[nn.Module]:
    """Children, and those of plain containers among them."""
    for child in owner.children():
        yield child
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _descendants(child)


def _projections(owner: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The projections of a layer and their names: children with a matrix as weight, also in plain containers."""
    for name, child in owner.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _projections(child, f"{prefix}{name}.")
        elif not isinstance(child, nn.Embedding) and outputs_of(child) is not None:
            yield f"{prefix}{name}", child
