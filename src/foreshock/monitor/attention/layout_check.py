"""Norms are of the right rows or unknown: what a layer's projections gave and what its attention got are compared.

Hooks on the projections and the call of attention that follows note a few tokens, in compiled code as in any other. At
the next reading of the norms these numbers show the layout: one of the orders of the field in which a projection's
outputs are dealt to heads (`layouts`). It is right if the features of each head are as long as those that attention was
given, up to one factor for all heads and tokens: rotary positions change no length, and another layout has other
lengths. Norms of queries and keys are allowed for.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) a part of each key is its head's own, made
from a latent, and another part, which carries the positions, is the same in all heads.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
import torch._dynamo.symbolic_convert
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import LAYOUT_ATTRIBUTE, leave_no_trace_in_copies
from foreshock.monitor.model.discovery import listed
from foreshock.monitor.model.layers import (
    NOT_FOUND,
    HeadRows,
    Projection,
    base_of,
    change_by_weight,
    computes_otherwise,
    find_projection,
    has_adapters,
    is_sharded,
    normalises_heads,
    outputs_of,
    stored,
    why_projection_unread,
    why_unmeasured,
)

Numbers = npt.NDArray[np.float64]

_LENGTH: Final = 1e-5
"""Relative difference of two lengths that are called equal, of operands that round less."""
_FEATURE: Final = 1e-4
"""The same of vectors of features."""
_STEADY: Final = 0.01
"""The same of lengths of heads that were divided by their norms: they are not quite 1 if a norm adds its epsilon."""
_ENOUGH: Final = 4
"""Heads whose lengths in a single token tell one layout from another."""


class Rows(NamedTuple):
    """The outputs of each head h: starts[h], starts[h] + stride, ..., head_dim of them."""

    starts: tuple[int, ...]
    head_dim: int
    stride: int = 1

    @property
    def outputs(self) -> npt.NDArray[np.int64]:
        """By head and feature, int64 [H, D]."""
        outputs: npt.NDArray[np.int64] = np.array(self.starts)[:, None] + self.stride * np.arange(self.head_dim)
        return outputs


class Corners(NamedTuple):
    """Of one call the first and the last token of the first sequence and of the last one, in this order."""

    numbers: Numbers
    """[4, C], the outputs of a projection, or [4, H, D], what attention was given."""
    grid: tuple[int, int]
    """How many sequences of how many tokens there were."""


class Call(NamedTuple):
    """What one call was given and its projections gave."""

    outputs: Mapping[str, Corners]
    """By name of the projection; the grid of one may have the tokens of a sequence first."""
    query: Corners
    key: Corners
    value: Corners
    error: float
    """The largest relative rounding error of them."""
    normed: bool = False
    """The module has a norm for queries and keys, which may have a gain for each feature of each head."""


class Placed(NamedTuple):
    """Some features of every head: outputs of one projection."""

    name: str
    rows: Rows
    normalised: bool = False
    """Each head, or each token, is divided by its norm on the way to attention."""


class Parts(NamedTuple):
    """As the fields of Projection (monitor/model/layers.py)."""

    query: Placed
    key: Placed
    query_of_shared: Placed | None
    keys_are_values: bool
    """To scale a head's own keys would scale what it reads."""


class InconclusiveCallError(Exception):
    """This call shows nothing: several outputs are the same numbers, or nothing but zeros. Another call may not."""


_Named = tuple[str, Rows]
"""Where names show that queries or keys are."""


def parts_of(call: Call, query: _Named | None = None, key: _Named | None = None) -> Parts:
    """Where the parts of queries and keys come from.

    Raises ValueError with a sentence if they are in no known order; InconclusiveCallError if this call does not show
    it.
    """
    queries, keys, values = call.query.numbers, call.key.numbers, call.value.numbers
    given = [queries, keys, *(outputs.numbers for outputs in call.outputs.values())]
    if not call.outputs or not all(x.size and np.isfinite(x).all() and x.any() for x in given):
        raise InconclusiveCallError
    heads: dict[bytes, int] = {}
    readers = [heads.setdefault(keys[:, head].tobytes(), len(heads)) for head in range(keys.shape[1])]
    first = [readers.index(n) for n in range(len(heads))]
    used = np.any(queries, axis=(0, 1)) | np.any(keys, axis=(0, 1))  # heads may be filled up with zeros
    shared = used & (len(heads) > 1) & np.all(keys == keys[:, :1], axis=(0, 1))
    own = used & ~shared
    of_query = _place("queries", call.query._replace(numbers=queries[..., own]), call, query)
    of_key = _place("keys", call.key._replace(numbers=keys[:, first][..., own]), call, key)
    of_shared = None
    if shared.any():
        of_shared = _place("queries of shared keys", call.query._replace(numbers=queries[..., shared]), call)
    for other in (of_query, of_shared):
        if (
            other is not None
            and other.name == of_key.name
            and np.intersect1d(other.rows.outputs, of_key.rows.outputs).size
        ):
            raise ValueError(f"outputs of {of_key.name} are queries and keys at once")
    keys_are_values = values.shape[1] == len(readers) and _are_among(
        call.outputs[of_key.name].numbers[:, of_key.rows.outputs], values[:, first], call.error
    )
    if readers != [head * len(heads) // len(readers) for head in range(len(readers))]:  # neighbours read others
        of_key = of_key._replace(rows=of_key.rows._replace(starts=tuple(of_key.rows.starts[n] for n in readers)))
    return Parts(of_query, of_key, of_shared, keys_are_values)


def _place(what: str, part: Corners, call: Call, named: _Named | None = None) -> Placed:
    """The one projection whose outputs are this part [4, H, D] of all heads."""
    heads, dim = part.numbers.shape[1:]
    for normalised in (False, True):
        found: dict[tuple[str, bytes], Placed] = {}
        for name, outputs in call.outputs.items():
            if named is not None and name != named[0]:
                continue
            tokens, first = _same_tokens(outputs.grid, part.grid)
            ours, theirs = outputs.numbers[[own for own, _ in tokens]], part.numbers[[given for _, given in tokens]]
            width = outputs.numbers.shape[1]
            known = [] if named is None or len(named[1].starts) != heads else [named[1]._replace(head_dim=dim)]
            known = [rows for rows in known if rows.outputs.max() < width]
            for rows in (*known, *layouts(width, heads, dim)):
                of_rows = ours[:, rows.outputs]
                if _normalised(of_rows, theirs, first, call) if normalised else _plain(of_rows, theirs, call.error):
                    found[name, rows.outputs.tobytes()] = Placed(name, rows, normalised)
                    if rows in known:
                        return Placed(name, rows, normalised)
        if len(found) > 1:
            raise InconclusiveCallError
        if found:
            return next(iter(found.values()))
    of = f"the outputs of its projections ({', '.join(call.outputs)}) give its {what}"
    raise ValueError(f"in no known order do {of}, {heads} heads of {dim} features")


def _same_tokens(outputs: tuple[int, int], given: tuple[int, int]) -> tuple[list[tuple[int, int]], list[bool]]:
    """The corners of a projection's outputs and of what attention was given that are the same token, each token once,
    and which of them begin a sequence."""
    sequences, length = given
    pairs = [(0, 0), (3, 3)] if math.prod(outputs) == math.prod(given) else [(3, 3)]  # others before, as in a cache
    if outputs == given:
        pairs = [(corner, corner) for corner in range(4)]
    elif outputs == (length, sequences):
        pairs = [(0, 0), (2, 1), (1, 2), (3, 3)]
    tokens = [(0, 0), (0, length - 1), (sequences - 1, 0), (sequences - 1, length - 1)]
    once = {tokens[corner]: (own, corner) for own, corner in reversed(pairs)}
    return list(once.values()), [place == 0 for _, place in once]


def layouts(width: int, heads: int, head_dim: int) -> Iterator[Rows]:
    """Orders in which `width` outputs may hold the features of so many heads, with others before and behind them."""
    # groups of 1: all heads one after the other; of `heads`: each with others of its own; between: with a key head
    for groups in (n for n in range(1, heads + 1) if heads % n == 0 and width % n == 0):
        wide, members = width // groups, range(heads // groups)
        for offset in _offsets(wide, len(members) * head_dim):
            yield Rows(tuple(g * wide + offset + h * head_dim for g in range(groups) for h in members), head_dim)
    for offset in _offsets(width, heads * head_dim):  # features before heads
        yield Rows(tuple(range(offset, offset + heads)), head_dim, heads)
    if width % head_dim == 0:  # features before all else
        for offset in _offsets(width // head_dim, heads):
            yield Rows(tuple(range(offset, offset + heads)), head_dim, width // head_dim)
    if width % (heads * head_dim) == 0:  # features of several kinds in turn
        kinds = width // (heads * head_dim)
        for kind in range(kinds):
            yield Rows(tuple(range(kind, width, head_dim * kinds)), head_dim, kinds)
            yield Rows(tuple(range(kind, heads * kinds, kinds)), head_dim, heads * kinds)


def _offsets(wide: int, size: int) -> list[int]:
    """Where so many of `wide` outputs may begin, of those for queries, keys and values."""
    behind = wide - size
    return sorted({*range(0, behind + 1, size), behind // 2, behind}) if behind >= 0 else []


def _plain(ours: Numbers, theirs: Numbers, error: float) -> bool:
    """As they are, turned by positions or with a bias added. Both [t, H, D]."""
    if len(ours) * ours.shape[1] < 2 or (len(ours) < 2 and ours.shape[1] < _ENOUGH):
        return False
    changes = ours[1:] - ours[:1], theirs[1:] - theirs[:1]
    with_bias = ours.shape[1] >= _ENOUGH and bool(np.any(changes[0])) and _as_long(*changes, error)
    return with_bias or _as_long(ours, theirs, error)


def _as_long(ours: Numbers, theirs: Numbers, error: float) -> bool:
    """Whether the heads of `theirs` are as long as those of `ours`, up to one factor. Both [t, H, D]."""
    lengths, wanted = np.linalg.norm(ours, axis=2), np.linalg.norm(theirs, axis=2)
    if not wanted.any() or np.any((lengths == 0) != (wanted == 0)):
        return False
    ratios = wanted[lengths > 0] / lengths[lengths > 0]
    return bool(np.ptp(ratios) <= 2 * max(_LENGTH, 4 * error / theirs.shape[2] ** 0.5) * np.median(ratios))


def _normalised(ours: Numbers, theirs: Numbers, first: list[bool], call: Call) -> bool:
    """With each head, or all of a token, divided by their norms, less their mean or not. A gain is found in the tokens
    that no position turned."""
    heads, features, allowed = *theirs.shape[1:], max(_FEATURE, 4 * call.error)
    unturned, lengths = theirs[first], np.linalg.norm(theirs, axis=2)
    steady = bool(np.all(np.ptp(lengths, axis=0) <= max(_STEADY, allowed) * lengths.max(0)))
    for each in (ours, ours - ours.mean(2, keepdims=True)):
        if heads > 1 and all(_as_long(*both, call.error) for both in zip(each[:, None], theirs[:, None], strict=True)):
            return True
        units = _units(each[first], 2)
        if steady and len(units) and np.linalg.norm(units - _units(unturned, 2), axis=2).max() <= allowed:
            return True
        if _gained(units.reshape(-1, features), unturned.reshape(-1, features), allowed, 1 if call.normed else 2):
            return True
        whole = _units(each[first], (1, 2)).reshape(len(units), -1)
        if call.normed and _gained(whole, unturned.reshape(len(units), -1), allowed, 2):
            return True
    return False


def _units(x: Numbers, axes: int | tuple[int, int]) -> Numbers:
    sizes = np.sqrt(np.square(x).sum(axes, keepdims=True))
    units: Numbers = x / np.where(sizes == 0, 1.0, sizes)
    return units


def _gained(ours: Numbers, theirs: Numbers, allowed: float, least: int) -> bool:
    """Whether `theirs` [n, F] is `ours` times a gain for each of the F features, by least squares over n samples, of
    which there must be so many."""
    if len(ours) < least:
        return False
    gain = (ours * theirs).sum(0) / np.maximum(np.square(ours).sum(0), np.finfo(np.float64).tiny)
    return bool(np.linalg.norm(theirs - gain * ours) <= allowed * np.linalg.norm(theirs))


def _are_among(keys: Numbers, values: Numbers, error: float) -> bool:
    """Whether each head's own keys [4, H, D] are among its values [4, H, Dv]."""
    allowed = max(_FEATURE, 4 * error)
    for head in range(keys.shape[1]):
        own, read = keys[:, head, :, None], values[:, head, None]
        if np.any(np.linalg.norm(own - read, axis=0).min(1) > allowed * np.linalg.norm(own, axis=0)[:, 0]):
            return False
    return True


_TRIES: Final = 3
"""Calls that may fit no layout before the norms stay unknown: one may be of another kind, for example with a cache."""
_UNSEEN: Final = "no call has shown yet which rows are which head's"
_SPREAD: Final = (
    "its projections are spread over processes by tensor parallelism, and no name shows which heads this process has"
)
_HOOK_ID: Final = -1
"""The same in every module, as for watched modules (interception.py)."""
_ALLOWED: Final = 2.0**-6
"""Relative difference of outputs that passes for rounding: twice the precision of bfloat16."""


_Written = tuple[Tensor, Any, Any]
"""The corners of one call (Corners), [4, ...], and how many sequences of how many tokens there were."""


class _Noted:
    """A projection whose outputs are noted."""

    def __init__(self, name: str, holder: nn.Module, check: "LayoutCheck") -> None:
        self.name, self.holder, self.check = name, holder, check
        self.outputs: _Written | None = None
        self.change: tuple[Tensor, Tensor] | None = None
        """As change_by_weight, of a projection with a forward of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LayoutCheck:
    """Where W_Q and W_K of one layer lie, as its calls show it."""

    def __init__(self, owner: nn.Module | None, heads: int, found: Projection | str) -> None:
        """`found`: what names show, or why they show nothing; then the children of `owner`, if any, are looked at."""
        self.gone = False
        """The layer's module is no part of the model any more: another may stand in its place."""
        self._owner, self._heads = owner, heads
        self._undo: list[Callable[[], object]] = []
        self._accept(found)
        self.announced: Final = found.layout if isinstance(found, Projection) else self.describe()

    def _accept(self, found: Projection | str) -> None:
        self._found = found if isinstance(found, Projection) else None
        self._why = found if isinstance(found, str) else _UNSEEN
        self._proved: Projection | None = None
        self._unscalable, self._tries = "", _TRIES
        self._given: list[_Written] | None = None
        named: list[tuple[str, nn.Module]] = []
        if self._found is not None:
            self._owner = self._found.owner
            of_names = (self._found.query.holder, self._found.key.holder)
            named = [(name, child) for name, child in self._owner.named_children() if child in of_names]
            if self._owner in of_names:
                self._proved = self._found  # PyTorch's own module, whose layout is PyTorch's
        elif self._owner is not None and found == NOT_FOUND:
            named, self._why = list(_projections(self._owner)), _UNSEEN
        self._noted = [_Noted(*each, self) for each in named]
        self._state = self._now()

    def start(self) -> None:
        """Put hooks on the projections."""
        for noted in self._noted:
            other = vars(noted.holder).get(LAYOUT_ATTRIBUTE)
            if isinstance(other, _Noted) and other.holder is noted.holder:  # else it is a copy's
                for check in (self, other.check):
                    check.refuse(f"another layer computes with its {noted.name} as well")
                return
            vars(noted.holder)[LAYOUT_ATTRIBUTE] = noted
            noted.holder._forward_hooks[_HOOK_ID] = _note
            self._undo += [
                leave_no_trace_in_copies(noted.holder),
                functools.partial(vars(noted.holder).pop, LAYOUT_ATTRIBUTE, None),
                functools.partial(noted.holder._forward_hooks.pop, _HOOK_ID, None),
            ]

    def refuse(self, why: str) -> None:
        """No call shows anything, for this reason."""
        self._tries, self._why, self._proved = 0, why, None

    def stop(self) -> None:
        """Take the hooks out again."""
        while self._undo:
            self._undo.pop()()

    @property
    def open(self) -> bool:
        """Whether a call is still to show where the heads lie."""
        return self._unproved and self._given is None

    @property
    def of_no_name(self) -> bool:
        """Whether no name shows where the weights lie."""
        return self._found is None

    @property
    def _unproved(self) -> bool:
        return bool(self._noted) and self._proved is None and self._tries > 0

    @property
    def proved(self) -> Projection | None:
        """What `locate` gave last."""
        return None if self.gone else self._proved

    # ---- in the forward -------------------------------------------------------------------------------------------

    def observe_call(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Attention is given query [..., H, S, D], key and value [..., Hkv, S, D]: keep a few of their tokens."""
        if torch.compiler.is_compiling():
            if self._noted and query.dim() > 3 and query.shape[-3] == self._heads and not _in_nested_checkpoints():
                self._given = [_corners(x, 3) for x in (query, key, value)]
        elif self.open:
            try:
                given = [x.unsqueeze(-3) if x.dim() == 3 else x for x in (query, key, value)]
                heads = given[0].shape[-3]
                if heads != self._heads:
                    self._tries -= 1
                    self._why = f"attention was given {heads} heads where {self._heads} were announced"
                elif all(x.numel() and not x.is_nested for x in given):
                    self._given = [_corners(x, 3) for x in given]
            except Exception as error:
                self.refuse(f"its layout could not be looked at: {type(error).__name__}: {str(error)[:100]}")

    # ---- at a step boundary ---------------------------------------------------------------------------------------

    def current(self) -> Projection | None:
        """Where the weights lie now; None while that is unknown, and where keys have a part that all heads share."""
        found = self.locate()
        return found if found is not None and found.query_of_shared is None else None

    def scalable(self) -> Projection | str:
        """What QK-Clip may scale now, or why it may not."""
        found = self.locate()
        return self._unscalable or found or self.describe().removeprefix("norms unknown: ")

    def describe(self) -> str:
        """Where the weights lie, or why that is unknown."""
        if self.gone:
            return "norms unknown: its module was taken out of the model"
        if self._proved is None:
            return f"norms unknown: {self._why}"
        shared = self._proved.query_of_shared is not None
        return "norms unknown: a part of its keys is the same in all heads" if shared else self._proved.layout

    def locate(self) -> Projection | None:
        """Where the weights lie now, by what calls have shown."""
        if self.gone:
            return None
        if self._owner is not None and self._now() != self._state:
            self._find_again(self._owner)
        if self._owner is not None and self._unproved and self._given is not None:
            try:
                self._proved = self._prove(self._owner, self._given)
            except InconclusiveCallError:
                pass  # another call may show it
            except ValueError as error:
                unread = (why_projection_unread(*child) for child in self._owner.named_children())
                self._tries, self._why = self._tries - 1, "; ".join(filter(None, (*unread, str(error))))
        return self._proved

    def _now(self) -> list[tuple[Any, ...]]:
        """What makes a projection another than it was: a wrapper round it, adapters, a computed weight, a new
        forward."""
        modules = [] if self._owner is None else [child for _, child in _descendants(self._owner)]
        if self._found is not None and self._found.query.holder is self._owner:
            modules.append(self._owner)
        return [
            (each, type(each), "forward" in vars(each), has_adapters(each), stored(each) is None) for each in modules
        ]

    def _find_again(self, owner: nn.Module) -> None:
        """A projection was replaced, wrapped or given adapters since."""
        self.stop()
        if any(is_sharded(stored(base_of(noted.holder))) for noted in self._noted):
            self._owner = None
            self._accept("its sharded projections were changed after attach")
            return
        was = self._found
        found = was and find_projection(owner, self._heads, len(was.key.starts), was.query.head_dim)
        self._accept(found or why_unmeasured(owner))
        self.start()

    def _prove(self, owner: nn.Module, given: list[_Written]) -> Projection:
        """Where the weights lie, as a call shows it. Raises as parts_of."""
        noted = {each.name: each for each in self._noted}
        written = {name: each.outputs for name, each in noted.items() if each.outputs is not None}
        self._given = None
        for each in self._noted:
            each.outputs = None
        query, key, value = map(_numbers, given)
        error = max(torch.finfo(x.dtype).eps for x, *_ in (*given, *written.values()))
        outputs = {name: _numbers(each) for name, each in written.items()}
        call = Call(outputs, query, key, value, error, normalises_heads(owner))
        widths = {name: each.numbers.shape[1] for name, each in outputs.items()}
        if self._found is None and any(outputs_of(noted[name].holder) != width for name, width in widths.items()):
            raise ValueError(_SPREAD)
        known = (None, None) if self._found is None else (self._found.query, self._found.key)
        made = {noted[name].holder: (name, width) for name, width in widths.items()}
        of_names = [
            (made[side.holder][0], _as_made(side, made[side.holder][1])) if side and side.holder in made else None
            for side in known
        ]
        parts = parts_of(call, *of_names)
        of_query, of_key = (
            _rows(noted[part.name].holder, part, side, widths[part.name])
            for part, side in zip(parts[:2], known, strict=True)
        )
        of_shared = parts.query_of_shared
        names = dict.fromkeys(part.name for part in parts[:3] if part is not None)
        layout = f"found by a call ({', '.join(names)})"
        if self._found is not None:
            layout = self._found.layout + ("" if (of_query, of_key) == known else ", in an order that a call showed")
        shared = of_shared and _rows(noted[of_shared.name].holder, of_shared, None, 0)
        placed = Projection(layout, of_query, of_key, owner, shared)
        if any(part.normalised for part in parts[:3] if part is not None):
            placed = placed.of_weights_alone("heads are normalised")
        for each in (noted[name] for name in names if computes_otherwise(noted[name].holder)):
            changes = each.change
            if changes is None or not bool((changes[0] - changes[1]).norm() <= _ALLOWED * changes[1].norm()):
                placed = placed.of_weights_alone(f"{type(each.holder).__name__} has a forward of its own")
        if parts.keys_are_values:
            self._unscalable = f"outputs of {parts.key.name} are keys and values at once"
        return placed


def _note(module: nn.Module, args: Any, output: Any) -> None:
    """A projection has computed this."""
    noted: _Noted | None = getattr(module, LAYOUT_ATTRIBUTE, None)
    if noted is None or not isinstance(output, Tensor) or output.dim() < 2:
        return
    if torch.compiler.is_compiling():
        if _in_nested_checkpoints():
            return
    elif not _is_to_be_noted(noted, module, args, output):
        return
    noted.outputs = _corners(output, 2)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _in_nested_checkpoints() -> bool:
    """Whether the traced code is in a checkpoint within another one, where compiling fails if attributes are written:
    PyTorch (2.13) hands them out of the inner one only. Runs while torch.compile traces; False where it does not."""
    translator = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    return translator is not None and len(translator.output.tracers) > 2


def _is_to_be_noted(noted: _Noted, module: nn.Module, args: Any, output: Tensor) -> bool:
    """Whether it is, in code that is not compiled; one with a forward of its own is compared with its weight."""
    check = noted.check
    if noted.holder is not module or not check.open or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    if is_sharded(output) and check.of_no_name:
        check.refuse(_SPREAD)
    if type(output) is not Tensor or not output.numel():
        return False
    if args and computes_otherwise(module):
        with torch.no_grad():
            noted.change = change_by_weight(module, args[0], output)
    return True


def _corners(x: Tensor, token_dims: int) -> _Written:
    """The corners of x, of which all but the last token_dims dimensions number the sequences, and the last but one the
    tokens of each."""
    first = last = x.detach()
    while first.dim() > token_dims:
        first, last = first[0], last[-1]
    corners = torch.stack([each.select(-2, at) for each in (first, last) for at in (0, -1)])
    return corners, math.prod(x.shape[: x.dim() - token_dims]), x.shape[-2]


def _numbers(written: _Written) -> Corners:
    corners, sequences, length = written
    return Corners(corners.cpu().double().numpy(), (int(sequences), int(length)))


def _as_made(side: HeadRows, width: int) -> Rows:
    """The rows of a side among the outputs, `width` of them, of which this process may compute a part alone."""
    before = 0 if width == outputs_of(side.holder) else side.starts[0]
    return Rows(tuple(start - before for start in side.starts), side.head_dim, side.stride)


def _rows(holder: nn.Module, part: Placed, known: HeadRows | None, width: int) -> HeadRows:
    """The rows of the weight that give these outputs, `width` of them; raises ValueError if a process computes a part
    of the outputs, and other heads than its part of the weights shows."""
    if known is None or width == outputs_of(holder):
        return HeadRows(holder, "weight", *part.rows)
    if part.rows != _as_made(known, width):
        raise ValueError("this process computes other heads than its part of the weights shows")
    return known


def _descendants(owner: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Children and their names, and those of plain containers among them."""
    for name, child in owner.named_children():
        yield f"{prefix}{name}", child
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _descendants(child, f"{prefix}{name}.")


def _projections(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The projections of a layer and their names: children with a matrix as weight."""
    for name, child in _descendants(owner):
        if not isinstance(child, nn.Embedding) and outputs_of(child) is not None:
            yield name, child


def table_of_norms(names: Sequence[str], checks: Sequence[LayoutCheck]) -> str:
    """A line for each group of layers whose weights lie otherwise than the table of `attach` shows, or unknown."""
    groups: dict[str, list[str]] = {}
    for name, check in zip(names, checks, strict=True):
        if (now := check.describe()) != check.announced:
            groups.setdefault(now, []).append(name)
    return "\n".join(f"{len(each)} x W_Q and W_K ({listed(each)}): {how}" for how, each in groups.items())
