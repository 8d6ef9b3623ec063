"""Norms are of the right rows or unknown: what a layer's projections gave and what its attention got are compared.

Hooks on the projections note their output, and the call of attention that follows keeps those of a few tokens beside
its queries and keys. At the next reading of the norms these numbers show the layout (monitor/model/layouts.py).
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import LAYOUT_ATTRIBUTE, leave_no_trace_in_copies
from foreshock.monitor.model.discovery import listed
from foreshock.monitor.model.layers import (
    HeadRows,
    Projection,
    find_projection,
    normalises_heads,
    outputs_of,
    why_unmeasured,
)
from foreshock.monitor.model.layouts import Rows, Seen, alike, fit, fused_rows, says_nothing, separate_rows
from foreshock.monitor.model.weights import (
    base_of,
    change_by_weight,
    computes_otherwise,
    has_adapters,
    is_sharded,
    stored,
)

_TRIES: Final = 3
"""Calls that may fit no layout before the norms stay unknown: one may be of another kind, for example with a cache."""
_UNSEEN: Final = "no call has shown yet which rows are which head's"
_HOOK_ID: Final = -1
"""The same in every module, as for watched modules (interception.py)."""
_ALLOWED: Final = 2.0**-6
"""Relative difference of outputs that passes for rounding: twice the precision of bfloat16."""
_Pair = tuple[Rows, Rows]
_Kept = tuple[list[Tensor], Tensor, bool, list[bool], float]
"""Of one projection: outputs of some tokens in each order, what attention was given of them, and the rest of Seen."""


class LayoutProof:
    """Where W_Q and W_K of one layer lie, as its calls show it."""

    def __init__(self, projection: Projection | None, unmeasured: str = "") -> None:
        """`projection` is what names show; `unmeasured` is why there is none."""
        self.gone = False
        """The layer's module is no part of the model any more: another may stand in its place."""
        self._accept(projection, unmeasured)
        self.announced: Final = projection.layout if projection is not None else self.describe()
        self._undo: list[Callable[[], None]] = []

    def _accept(self, projection: Projection | None, unmeasured: str) -> None:
        self._found, self._why = projection, _UNSEEN if projection is not None else unmeasured
        self._proved: Projection | None = None
        self._tries = _TRIES
        self._forget_outputs()
        self._kept: dict[str, _Kept] = {}
        self._changes: dict[nn.Module, tuple[Tensor, Tensor] | None] = {}
        self._state = [] if projection is None else _state_of(projection)
        if projection is not None and projection.query.holder is projection.owner:
            self._proved = projection  # PyTorch's own module, whose layout is PyTorch's

    def start(self) -> None:
        """Put hooks on the projections."""
        if self._found is None or self._proved is not None:
            return
        query, key = (rows.holder for rows in (self._found.query, self._found.key))
        for holder, hook in ((query, _note_both),) if query is key else ((query, _note_query), (key, _note_key)):
            self._watch(holder, hook)

    def _watch(self, holder: nn.Module, hook: Callable[[nn.Module, Any, Any], None]) -> None:
        vars(holder)[LAYOUT_ATTRIBUTE] = self
        holder._forward_hooks[_HOOK_ID] = hook
        self._undo.append(functools.partial(_unhook, holder, leave_no_trace_in_copies(holder)))

    def stop(self) -> None:
        """Take the hooks out again."""
        while self._undo:
            self._undo.pop()()
        self._forget_outputs()

    def _forget_outputs(self) -> None:
        self.of_query: Tensor | None = None
        self.of_key: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def open(self) -> bool:
        """Whether a call is still to show where the heads lie."""
        return self._found is not None and self._proved is None and self._tries > 0 and not self._kept

    @property
    def proved(self) -> Projection | None:
        """What `scalable` gave last, but for sentences."""
        return None if self.gone else self._proved

    @property
    def waits(self) -> bool:
        """Whether a call has shown something that `current` has not looked at, or projections have changed since."""
        changed = self._found is not None and not self.gone and _state_of(self._found) != self._state
        return changed or (bool(self._kept) and self._proved is None)

    @property
    def holders(self) -> list[nn.Module]:
        """The modules that hold W_Q and W_K; [] where none were found."""
        return [] if self._found is None else [self._found.query.holder, self._found.key.holder]

    # ---- in the forward -------------------------------------------------------------------------------------------

    def meet(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Attention is given query [..., H, S, D], key and value [..., Hkv, S, D]: keep a few tokens of them and of
        what the projections gave. Compiled code cannot keep: it returns them, for the probe to `keep`. Never raises.
        """
        of_query, of_key = self.of_query, self.of_key
        self.of_query = self.of_key = None
        if of_query is None or of_key is None:
            return ()
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return _corners(of_query, query) + _corners(of_key, key)
            if self.open:
                self._keep(of_query, of_key, query, key)
        return ()

    def note(self, holder: nn.Module, args: Any, output: Tensor) -> None:
        """A projection has computed this; one with a forward of its own is compared with its weight, as it is now."""
        if not torch.compiler.is_compiling() and args and computes_otherwise(holder):
            with torch.no_grad():
                self._changes[holder] = change_by_weight(holder, args[0], output)

    def _keep(self, of_query: Tensor, of_key: Tensor, query: Tensor, key: Tensor) -> None:
        try:
            with torch.autocast(query.device.type, enabled=False):
                kept = {"q": _tokens(of_query, query), "k": _tokens(of_key, key)}
            self._kept = {kind: tokens for kind, tokens in kept.items() if tokens is not None}
        except Exception as error:
            self._tries, self._why = 0, f"its layout could not be looked at: {type(error).__name__}: {str(error)[:100]}"

    def keep(self, tokens: Sequence[Tensor]) -> None:
        """Keep what `meet` returned in compiled code: the first and the last token."""
        if self.open:
            of_query, query, of_key, key = (x.clone() for x in tokens)
            self._kept = {
                kind: ([outputs.float()], heads.float(), True, [True, False], _error(outputs, heads))
                for kind, outputs, heads in (("q", of_query, query), ("k", of_key, key))
            }

    # ---- at a step boundary ---------------------------------------------------------------------------------------

    def current(self) -> Projection | None:
        """Where the weights lie now; None while that is unknown."""
        self._forget_outputs()
        if self._found is None or self.gone:
            return None
        if _state_of(self._found) != self._state:
            self._find_again(self._found)
        if self._kept.keys() == {"q", "k"}:
            try:
                self._prove({kind: _seen(kept) for kind, kept in self._kept.items()})
            except ValueError as error:
                self._tries, self._why = self._tries - 1, str(error)
        self._kept = {}
        return self._proved

    def _find_again(self, found: Projection) -> None:
        """A projection was replaced, wrapped or given adapters since."""
        self.stop()
        if any(is_sharded(stored(base_of(holder))) for holder in self.holders):
            self._accept(None, "its sharded projections were changed after attach")
            return
        sizes = len(found.query.starts), len(found.key.starts), found.query.head_dim
        self._accept(find_projection(found.owner, *sizes), why_unmeasured(found.owner))
        self.start()

    def _prove(self, seen: dict[str, Seen]) -> None:
        assert self._found is not None
        if any(map(says_nothing, seen.values())):
            return
        found = self._found
        heads, dim = seen["q"].heads.shape[1:]
        if heads != len(found.query.starts):
            self._tries -= 1
            self._why = f"attention was given {heads} heads where {len(found.query.starts)} were announced"
            return
        fitting, normalised = _fitting(found, seen, normalises_heads(found.owner))
        if fitting is None:
            self._tries -= 1
            self._why = f"in no known order do its outputs give the {heads} heads of {dim} that attention was given"
            return
        if any(_same_numbers(other, fitting, seen) for other in _candidates(found, seen) if other != fitting):
            return
        parts = [
            _placed(part, _own(rows), dim, seen[kind].outputs[0].shape[1])
            for part, rows, kind in zip((found.query, found.key), fitting, "qk", strict=True)
        ]
        layout = found.layout
        if parts != [found.query, found.key]:
            layout = f"{layout}, in an order that a call showed"
        placed = replace(found, layout=layout, query=parts[0], key=parts[1])
        self._accept_proof(placed.of_weights_alone("heads are normalised") if normalised else placed)

    def _accept_proof(self, placed: Projection) -> None:
        for why in self._otherwise(self.holders):
            placed = placed.of_weights_alone(why)
        self._proved, self._changes = placed, {}

    def _otherwise(self, holders: Iterable[nn.Module]) -> Iterator[str]:
        """Why outputs of projections do not follow from their weights, as far as their calls showed."""
        for holder in filter(computes_otherwise, holders):
            both = self._changes.get(holder)
            if both is None or not bool((both[0] - both[1]).norm() <= _ALLOWED * both[1].norm()):
                yield f"{type(holder).__name__} has a forward of its own"

    def scalable(self) -> Projection | str:
        """What QK-Clip may scale now, or why it may not."""
        return self.current() or self.describe().removeprefix("norms unknown: ")

    def describe(self) -> str:
        """Where the weights lie, or why that is unknown."""
        if self.gone:
            return "norms unknown: its module was taken out of the model"
        return self._proved.layout if self._proved is not None else f"norms unknown: {self._why}"


def _unhook(holder: nn.Module, stay_clean: Callable[[], None]) -> None:
    holder._forward_hooks.pop(_HOOK_ID, None)
    vars(holder).pop(LAYOUT_ATTRIBUTE, None)
    stay_clean()


def _note_query(module: nn.Module, args: Any, output: Any) -> None:
    if (proof := proof_of(module, output)) is not None:
        proof.note(module, args, output)
        proof.of_query = output.detach()


def _note_key(module: nn.Module, args: Any, output: Any) -> None:
    if (proof := proof_of(module, output)) is not None:
        proof.note(module, args, output)
        proof.of_key = output.detach()


def _note_both(module: nn.Module, args: Any, output: Any) -> None:
    if (proof := proof_of(module, output)) is not None:
        proof.note(module, args, output)
        proof.of_query = proof.of_key = output.detach()


def proof_of(module: nn.Module, output: Any) -> LayoutProof | None:
    """The proof that is to take note of an output; None where nothing is open or the output is no plain tensor."""
    proof: LayoutProof | None = getattr(module, LAYOUT_ATTRIBUTE, None)
    if proof is None or not isinstance(output, Tensor) or output.dim() < 2:
        return None
    if torch.compiler.is_compiling():
        return proof  # whether it is open would be a condition of the graph
    if not proof.open or type(output) is not Tensor or torch._C._are_functorch_transforms_active():
        return None
    return None if torch._C._get_tracing_state() is not None else proof


def _corners(outputs: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last token of outputs [..., C] and heads [..., H, S, D], as [2, C] and [2, H, D]."""
    rows = outputs.flatten(0, -2)
    heads = heads.unsqueeze(-3) if heads.dim() == 3 else heads
    first, last = heads.detach(), heads.detach()
    while first.dim() > 3:
        first, last = first[0], last[-1]
    return torch.stack([rows[0], rows[-1]]), torch.stack([first[:, 0], last[:, -1]])


def _error(outputs: Tensor, heads: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps for x in (outputs, heads))


def _tokens(outputs: Tensor, heads: Tensor) -> _Kept | None:
    """Some tokens of outputs [..., C] and heads [..., H, S, D]: those that begin sequences, and others."""
    heads = heads.detach().unsqueeze(-3) if heads.dim() == 3 else heads.detach()
    *lead, _, length, _ = heads.shape
    rows = outputs.flatten(0, -2)
    entries = math.prod(lead)
    if not entries * length * len(rows):
        return None
    last = entries - 1, length - 1
    tokens = [(min(b, entries - 1), 0) for b in range(4)] + [(0, length // 2), (0, length - 1), last]
    tokens = list(dict.fromkeys(tokens))
    own = len(rows) // entries if len(rows) % entries == 0 else len(rows)
    orders = {
        tuple(max(0, min(at, len(rows) - 1)) for at in order)
        for order in (
            [b * own + s for b, s in tokens],
            [s * entries + b for b, s in tokens],
            [b * own + s - (length - own) for b, s in tokens],
        )
    }
    given = torch.stack([heads[_unravelled(b, lead)][:, s] for b, s in tokens])
    whole, first = len(rows) == entries * length, [s == 0 for _, s in tokens]
    of_orders = [torch.stack([rows[at] for at in order]).float() for order in orders]
    return of_orders, given.float(), whole, first, _error(outputs, heads)


def _unravelled(entry: int, lead: list[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(entry, lead))


def _seen(kept: _Kept) -> Seen:
    outputs, heads, whole, first, error = kept
    numbers = [x.cpu().numpy().astype(np.float64) for x in (*outputs, heads)]
    return Seen(tuple(numbers[:-1]), numbers[-1], whole, np.array(first), error)


def _candidates(found: Projection, seen: dict[str, Seen]) -> Iterator[_Pair]:
    """Layouts that these projections may have, those of their names first."""
    widths = {kind: each.outputs[0].shape[1] for kind, each in seen.items()}
    (heads, dim), (key_heads, key_dim) = (seen[kind].heads.shape[1:] for kind in "qk")
    if dim != key_dim:
        return
    if found.query.holder is found.key.holder:
        yield from fused_rows(widths["q"], heads, key_heads, dim)
    else:
        of_keys = list(separate_rows(widths["k"], key_heads, dim))
        yield from ((query, key) for query in separate_rows(widths["q"], heads, dim) for key in of_keys)


def _fitting(found: Projection, seen: dict[str, Seen], normed: bool) -> tuple[_Pair | None, bool]:
    """The layout that fits what a call showed, and whether heads were divided by their norms on the way."""
    pairs = list(dict.fromkeys(_candidates(found, seen)))
    for normalised in (False, True):
        known: dict[tuple[str, Rows], bool] = {}
        for pair in pairs:
            for of in zip("qk", pair, strict=True):
                if of not in known:
                    known[of] = fit(of[1], seen[of[0]], normalised=normalised, normed=normed)
                if not known[of]:
                    break
            else:
                return pair, normalised
    return None, False


def _own(rows: Rows) -> Rows:
    """Without the repetitions of key heads that lie next to each other, one for each query head that reads them."""
    times = next((i for i, start in enumerate(rows.starts) if start != rows.starts[0]), len(rows.starts))
    own = rows.starts[::times]
    return Rows(own, rows.stride) if tuple(np.repeat(own, times)) == rows.starts else rows


def _placed(part: HeadRows, rows: Rows, head_dim: int, width: int) -> HeadRows:
    """The rows of the weight that give these outputs, `width` of them; raises ValueError where a process computes some
    outputs alone, and they are not those that it was found to compute."""
    placed = replace(part, starts=rows.starts, stride=rows.stride, head_dim=head_dim)
    if width == outputs_of(part.holder):
        return placed
    moved = replace(placed, starts=tuple(start + part.starts[0] for start in rows.starts))
    if moved != part:
        raise ValueError("this process computes other heads than its part of the weights shows")
    return part


def _same_numbers(one: _Pair, other: _Pair, seen: dict[str, Seen]) -> bool:
    return all(alike(a, b, seen[kind]) for a, b, kind in zip(one, other, "qk", strict=True))


def _state_of(projection: Projection) -> list[tuple[Any, ...]]:
    """What makes a projection another than it was: a wrapper round it, adapters, a computed weight, a new forward."""
    owner, children = projection.owner, list(projection.owner.children())
    holders = (projection.query.holder, projection.key.holder)
    return [
        (h, type(h), h is owner or h in children, "forward" in vars(h), has_adapters(h), stored(h) is None)
        for h in holders
    ]


def table_of_norms(names: Sequence[str], proofs: Sequence[LayoutProof]) -> str:
    """A line for each group of layers whose weights lie otherwise than the table of `attach` shows, or unknown."""
    groups: dict[str, list[str]] = {}
    for name, proof in zip(names, proofs, strict=True):
        if (now := proof.describe()) != proof.announced:
            groups.setdefault(now, []).append(name)
    return "\n".join(f"{len(each)} x W_Q and W_K ({listed(each)}): {how}" for how, each in groups.items())
