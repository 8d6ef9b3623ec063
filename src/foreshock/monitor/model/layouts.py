"""Which outputs of a projection are which head's features, found by their numbers in what attention is given.

A layout is one of the orders of the field in which a projection's outputs are dealt to heads (`layouts`). It is right
if the features of each head are as long as those that attention was given, up to one factor for all heads and tokens:
rotary positions change no length, and another layout has other lengths. Norms of queries and keys are allowed for.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) a part of each key is its head's own, made
from a latent, and another part, which carries the positions, is the same in all heads.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

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
    stride: int = 1

    def places(self, head_dim: int) -> npt.NDArray[np.int64]:
        """Outputs by head and feature, int64 [H, D]."""
        places: npt.NDArray[np.int64] = np.array(self.starts)[:, None] + self.stride * np.arange(head_dim)
        return places


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
    """Some features of every head, `head_dim` of them: outputs of one projection."""

    name: str
    rows: Rows
    head_dim: int
    normalised: bool = False
    """Each head, or each token, is divided by its norm on the way to attention."""

    @property
    def outputs(self) -> npt.NDArray[np.int64]:
        """By head and feature, int64 [H, D]."""
        return self.rows.places(self.head_dim)


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
        if other is not None and other.name == of_key.name and np.intersect1d(other.outputs, of_key.outputs).size:
            raise ValueError(f"outputs of {of_key.name} are queries and keys at once")
    keys_are_values = values.shape[1] == len(readers) and _are_among(
        call.outputs[of_key.name].numbers[:, of_key.outputs], values[:, first], call.error
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
            for rows in _in_order(outputs.numbers.shape[1], heads, dim, named):
                of_rows = ours[:, rows.places(dim)]
                if _normalised(of_rows, theirs, first, call) if normalised else _plain(of_rows, theirs, call.error):
                    found[name, rows.places(dim).tobytes()] = Placed(name, rows, dim, normalised)
                    if named is not None and rows == named[1]:
                        return Placed(name, rows, dim, normalised)
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


def _in_order(width: int, heads: int, head_dim: int, named: _Named | None) -> Iterator[Rows]:
    """Layouts, that of the names first."""
    if named is not None and len(named[1].starts) == heads and named[1].places(head_dim).max() < width:
        yield named[1]
    yield from layouts(width, heads, head_dim)


def layouts(width: int, heads: int, head_dim: int) -> Iterator[Rows]:
    """Orders in which `width` outputs may hold the features of so many heads, with others before and behind them."""
    # groups of 1: all heads one after the other; of `heads`: each with others of its own; between: with a key head
    for groups in (n for n in range(1, heads + 1) if heads % n == 0 and width % n == 0):
        wide, members = width // groups, range(heads // groups)
        for offset in _offsets(wide, len(members) * head_dim):
            yield Rows(tuple(g * wide + offset + h * head_dim for g in range(groups) for h in members))
    for offset in _offsets(width, heads * head_dim):  # features before heads
        yield Rows(tuple(range(offset, offset + heads)), heads)
    if width % head_dim == 0:  # features before all else
        for offset in _offsets(width // head_dim, heads):
            yield Rows(tuple(range(offset, offset + heads)), width // head_dim)
    if width % (heads * head_dim) == 0:  # features of several kinds in turn
        kinds = width // (heads * head_dim)
        for kind in range(kinds):
            yield Rows(tuple(range(kind, width, head_dim * kinds)), kinds)
            yield Rows(tuple(range(kind, heads * kinds, kinds)), heads * kinds)


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
