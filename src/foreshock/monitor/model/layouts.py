"""Which outputs of a projection are which head's features, found by their numbers in what attention is given.

A fused projection is laid out as its model likes: [Q | K | V], a part of each for every key head, features before
heads, and more; no name shows which. So the queries and keys of a few tokens of a call are looked for among the
projection's outputs of these tokens, under every layout of the field. What may happen between the two is allowed for:
a constant factor, a bias, rotary positions and a norm of each head with its gains.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) a part of each key is its head's own, made
from a latent, and another part, which carries the positions, is the same in all heads (`parts_of`).
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_LEAST: Final = 1e-4
"""Relative difference of two numbers that are called equal, of operands that round less."""


class Rows(NamedTuple):
    """The outputs of each head h: starts[h], starts[h] + stride, ..., head_dim of them."""

    starts: tuple[int, ...]
    stride: int = 1

    def places(self, head_dim: int) -> npt.NDArray[np.int64]:
        """Outputs by head and feature, int64 [H, D]."""
        places: npt.NDArray[np.int64] = np.array(self.starts)[:, None] + self.stride * np.arange(head_dim)
        return places


class Seen(NamedTuple):
    """What one call showed of a projection. float64, t tokens."""

    outputs: tuple[Numbers, ...]
    """[t, C] of the tokens, for each order in which the projection may hold them."""
    heads: Numbers
    """[t, H, D], as attention was given them."""
    whole: bool
    """The projection made all tokens that attention was given, and no others."""
    first: npt.NDArray[np.bool_]
    """Which tokens begin a sequence [t]: rotary positions leave them as they are."""
    error: float
    """The largest relative rounding error of either."""


def separate_rows(width: int, heads: int, head_dim: int) -> Iterator[Rows]:
    """Layouts of a projection of one kind, queries or keys, for the heads that attention is given.

    Keys may be of fewer heads than attention is given: then each stands for several, next to each other or in turn.
    """
    own = width // head_dim
    if own * head_dim != width or not own or heads % own:
        return
    orders = [[h // (heads // own) for h in range(heads)], [h % own for h in range(heads)]]
    orders += [[(h % n) * (own // n) + h // n for h in range(own)] for n in _divisors(own)] if own == heads else []
    for order in orders:
        yield Rows(tuple(h * head_dim for h in order))
        yield Rows(tuple(order), own)


def fused_rows(width: int, heads: int, key_heads: int, head_dim: int) -> Iterator[tuple[Rows, Rows]]:
    """Layouts of a projection of queries, keys and values: the rows of the queries, and those of the keys as attention
    is given them, `key_heads` of them."""
    own = (width // head_dim - heads) // 2
    if width != (heads + 2 * own) * head_dim or own < 1 or heads % own or key_heads % own:
        return
    each = key_heads // own
    readers = [[k // each for k in range(key_heads)], [k % own for k in range(key_heads)]]
    for order in itertools.permutations("qkv"):
        for query, key in _of_order(order, heads, own, head_dim):
            for reader in readers:
                yield query, Rows(tuple(key.starts[k] for k in reader), key.stride)


def _of_order(order: tuple[str, ...], heads: int, own: int, head_dim: int) -> Iterator[tuple[Rows, Rows]]:
    counts = {"q": heads, "k": own, "v": own}
    for groups in _divisors(own):  # 1: Q, K and V of all heads; `own`: those of each key head together
        wide = sum(counts.values()) // groups
        before = {kind: sum(counts[k] for k in order[: order.index(kind)]) // groups for kind in "qk"}

        def block(kind: str, head: int, wide: int = wide, groups: int = groups, before: dict[str, int] = before) -> int:
            group, within = divmod(head, counts[kind] // groups)
            return group * wide + before[kind] + within

        query, key = ([block(kind, h) for h in range(counts[kind])] for kind in "qk")
        yield Rows(tuple(h * head_dim for h in query)), Rows(tuple(h * head_dim for h in key))
    start = {kind: sum(counts[k] for k in order[: order.index(kind)]) for kind in "qk"}
    # features before heads: within Q, K and V, and where these stand within a feature
    yield tuple(Rows(tuple(start[k] * head_dim + h for h in range(counts[k])), counts[k]) for k in "qk")  # type: ignore[misc]
    yield tuple(Rows(tuple(start[k] + h for h in range(counts[k])), sum(counts.values())) for k in "qk")  # type: ignore[misc]
    if heads == own:  # a query, a key and a value next to each other
        at = {kind: order.index(kind) for kind in "qk"}
        yield tuple(Rows(tuple(h * head_dim * 3 + at[k] for h in range(heads)), 3) for k in "qk")  # type: ignore[misc]
        yield tuple(Rows(tuple(h * 3 + at[k] for h in range(heads)), heads * 3) for k in "qk")  # type: ignore[misc]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def fit(rows: Rows, seen: Seen, *, normalised: bool = False, normed: bool = False) -> bool:
    """Whether these outputs are the heads that attention was given, as they are or, where `normalised`, with each head
    divided by its norm. `normed`: the module has a norm for them, which may have a gain for each feature of each."""
    index = rows.places(seen.heads.shape[2])
    allowed = max(_LEAST, 4 * seen.error)
    for outputs in seen.outputs:
        if not normalised and seen.whole and not _may_fit(outputs, index, seen.heads, allowed):
            continue
        ours = outputs[:, index]
        usable = np.any(ours, axis=(1, 2)) & np.any(seen.heads, axis=(1, 2))
        if not usable.any():
            continue
        part = (ours[usable], seen.heads[usable], allowed, np.all if seen.whole else np.any)
        if _normalised(*part, seen.first[usable], normed) if normalised else _plain(*part):
            return True
    return False


def alike(one: Rows, other: Rows, seen: Seen) -> bool:
    """Whether the outputs of two layouts are the same numbers, so that nothing shows which it is."""
    dim = seen.heads.shape[2]
    return all(np.allclose(x[:1, one.places(dim)], x[:1, other.places(dim)], rtol=_LEAST, atol=0) for x in seen.outputs)


def says_nothing(seen: Seen) -> bool:
    """Whether no layout can be found from it: numbers that are not finite, or nothing but zeros."""
    given = (*seen.outputs, seen.heads)
    return not all(np.isfinite(x).all() and np.any(x) for x in given)


def _may_fit(outputs: Numbers, index: npt.NDArray[np.int64], heads: Numbers, allowed: float) -> bool:
    """Whether the heads of a token, or of the difference of two, are as long as they are for attention, up to a factor:
    most layouts are ruled out by that."""
    usable = np.flatnonzero(np.any(outputs, axis=1) & np.any(heads, axis=(1, 2)))
    if not usable.size:
        return False
    pairs = [(outputs[usable[0]], heads[usable[0]])]
    if usable.size > 1:
        pairs.append((outputs[usable[0]] - outputs[usable[-1]], heads[usable[0]] - heads[usable[-1]]))
    sizes = ([np.linalg.norm(x, axis=1)[None, :, None] for x in (ours[index], theirs)] for ours, theirs in pairs)
    return any(_apart(*(_scaled(x, per_head=False) for x in both))[0] <= allowed for both in sizes)


def _plain(ours: Numbers, theirs: Numbers, allowed: float, quorum: Any) -> bool:
    """As they are, but for a constant factor, rotary positions or a bias that is added. Both [t, H, D]."""
    if _same(ours, theirs, allowed, quorum, per_head=False):
        factors = _sizes(theirs) / _sizes(ours)
        return quorum is np.any or bool(np.ptp(factors) <= 4 * allowed * factors.max())
    if quorum is np.any or len(ours) < 3:
        return False
    ours, theirs = (x[1:] - x[:1] for x in (ours, theirs))
    return bool(np.any(ours)) and bool(
        np.all(_apart(_scaled(ours, per_head=False), _scaled(theirs, per_head=False)) <= allowed)
    )


def _normalised(
    ours: Numbers, theirs: Numbers, allowed: float, quorum: Any, first: npt.NDArray[np.bool_], normed: bool
) -> bool:
    """With each head, or all of a token, divided by their norm, less their mean or not. A gain is found in those tokens
    that no position turned."""
    features = ours.shape[2]
    for centred in (False, True):
        ours = ours - ours.mean(2, keepdims=True) if centred else ours
        if any(_same(ours, theirs, allowed, quorum, per_head=per_head) for per_head in (False, True)):
            return True
        unturned, given = ours[first], theirs[first]
        if _gained(_scaled(unturned, per_head=True).reshape(-1, features), given.reshape(-1, features), allowed):
            return True
        whole = _scaled(unturned, per_head=False).reshape(len(unturned), -1)
        if normed and _gained(whole, given.reshape(len(unturned), -1), allowed):
            return True
    return False


def _same(ours: Numbers, theirs: Numbers, allowed: float, quorum: Any, *, per_head: bool) -> bool:
    ours, theirs = (_scaled(x, per_head=per_head) for x in (ours, theirs))
    return bool(quorum(_apart(ours, theirs) <= allowed)) or _rotated(ours, theirs, allowed, quorum)


def _sizes(x: Numbers) -> Numbers:
    sizes: Numbers = np.sqrt(np.square(x).sum((1, 2)))
    return sizes


def _scaled(x: Numbers, *, per_head: bool) -> Numbers:
    """Each token, or each head of each token, divided by its norm."""
    size = np.sqrt(np.square(x).sum(2 if per_head else (1, 2), keepdims=True))
    scaled: Numbers = x / np.where(size == 0, 1.0, size)
    return scaled


def _apart(ours: Numbers, theirs: Numbers) -> Numbers:
    """How far tokens are apart [t], relative to their norms."""
    apart: Numbers = _sizes(ours - theirs) / np.maximum(_sizes(theirs), np.finfo(np.float64).tiny)
    return apart


def _rotated(ours: Numbers, theirs: Numbers, allowed: float, quorum: Any) -> bool:
    """Whether pairs of features were turned, all of each head's or those of a part of it, and the others left alone."""
    norms = [np.sqrt(np.square(x).sum(2, keepdims=True)) for x in (ours, theirs)]
    if not quorum(_apart(*norms) <= allowed):
        return False
    dim = ours.shape[2]
    for turned in sorted({dim, dim // 2, dim // 4, dim * 3 // 4} - {0}, reverse=True):
        for start in {0, dim - turned}:
            part = np.arange(start, start + turned)
            for block in (b for b in _divisors(turned) if b % 2 == 0):
                if quorum(_apart(*(_pairs(x, part, block) for x in (ours, theirs))) <= allowed):
                    return True
    return False


def _pairs(x: Numbers, part: npt.NDArray[np.int64], block: int) -> Numbers:
    """The norms of the pairs in a part of the features, of which both halves of each block pair up, and the others as
    they are."""
    turned = x[..., part].reshape(*x.shape[:2], -1, 2, block // 2)
    return np.concatenate(
        [np.hypot(turned[..., 0, :], turned[..., 1, :]).reshape(*x.shape[:2], -1), np.delete(x, part, 2)], 2
    )


def _gained(ours: Numbers, theirs: Numbers, allowed: float) -> bool:
    """Whether `theirs` [n, F] is `ours` times a gain for each of the F features, by least squares over n samples."""
    if len(ours) < 2:
        return False
    gain = (ours * theirs).sum(0) / np.maximum(np.square(ours).sum(0), np.finfo(np.float64).tiny)
    return bool(np.linalg.norm(theirs - gain * ours) <= allowed * np.linalg.norm(theirs))


_STEADY: Final = 1e-5
"""The same for a factor of a whole head, from token to token: it is a mean over many numbers."""


class Call(NamedTuple):
    """What one call was given and its projections gave, of t tokens. float64."""

    outputs: Mapping[str, Numbers]
    """[t, C], by name of the projection."""
    query: Numbers
    """[t, H, D]"""
    key: Numbers
    """[t, H, D]"""
    value: Numbers
    """[t, H, Dv]"""
    error: float
    """The largest relative rounding error of them."""


class Placed(NamedTuple):
    """Some features of every head, `head_dim` of them: outputs of one projection."""

    name: str
    rows: Rows
    head_dim: int


class Parts(NamedTuple):
    """As the fields of Projection (monitor/model/layers.py)."""

    query: Placed
    key: Placed
    query_of_shared: Placed | None


class InconclusiveCallError(Exception):
    """This call shows nothing: several outputs are the same numbers, or nothing but zeros. Another call may not."""


def parts_of(call: Call) -> Parts:
    """Where the parts of queries and keys come from.

    Raises ValueError with a sentence where they are no outputs of the projections as they stand, for example behind a
    norm; InconclusiveCallError where this call does not show it.
    """
    given = (*call.outputs.values(), call.query, call.key)
    if not all(np.isfinite(x).all() for x in given) or not np.any(call.query):
        raise InconclusiveCallError
    shared = np.all(call.key == call.key[:, :1], axis=(0, 1))
    if shared.all():
        raise ValueError("its keys are the same in all heads")
    key = _placed("own keys", call.key[..., ~shared], call, rotated=False)
    query = _placed("queries", call.query[..., ~shared], call, rotated=False)
    of_shared = _placed("queries of the shared keys", call.query[..., shared], call) if shared.any() else None
    for other in (query, of_shared):
        if other is not None and other.name == key.name and np.intersect1d(_outputs(other), _outputs(key)).size:
            raise ValueError(f"outputs of {key.name} are queries and keys at once")
    if _are_values(key, call):
        raise ValueError(f"outputs of {key.name} are keys and values at once")
    return Parts(query, key, of_shared)


def _outputs(placed: Placed) -> npt.NDArray[np.int64]:
    return placed.rows.places(placed.head_dim)


def _placed(what: str, part: Numbers, call: Call, *, rotated: bool = True) -> Placed:
    """The one projection whose outputs are this part [t, H, D] of all heads."""
    found = {
        (name, rows)
        for name, outputs in call.outputs.items()
        for rows in _rows_of(outputs, part, call.error, rotated=rotated)
    }
    if not found:
        raise ValueError(
            f"in no known order do the outputs of its projections ({', '.join(call.outputs)}) give its {what}, as "
            "behind a norm they do not"
        )
    if len(found) > 1:
        raise InconclusiveCallError
    ((name, rows),) = found
    return Placed(name, rows, part.shape[2])


def _rows_of(outputs: Numbers, part: Numbers, error: float, *, rotated: bool) -> Iterator[Rows]:
    """Layouts in which outputs [t, C] are the features of a part [t, H, D], as they are or turned by the positions."""
    copied = _copied(outputs, part, error)
    if copied is not None:
        yield copied
    elif rotated and part.shape[2] % 2 == 0:
        yield from _turned(outputs, part, error)


def _copied(outputs: Numbers, part: Numbers, error: float) -> Rows | None:
    heads, features = part.shape[1:]
    start = _column(outputs, part[:, 0, 0], error)
    next_head = _column(outputs, part[:, 1, 0], error)
    next_feature = _column(outputs, part[:, 0, min(1, features - 1)], error)
    if start is None or next_head is None or next_feature is None:
        return None
    rows = Rows(tuple(start + h * (next_head - start) for h in range(heads)), max(1, next_feature - start))
    places = rows.places(features)
    inside = places.min() >= 0 and places.max() < outputs.shape[1]
    return rows if inside and _follows(outputs[:, places], part, error) else None


def _turned(outputs: Numbers, part: Numbers, error: float) -> Iterator[Rows]:
    """Pairs of features keep their length. Neighbours pair up, or the two halves; here and there not always alike, and
    with the features of a head next to each other or those of all heads in turn."""
    heads, features = part.shape[1:]
    for apart in {1, features // 2}:
        lengths = _lengths(part, apart)
        for stride, gap in ((s, s * a) for s in {1, heads} for a in {1, features // 2}):
            if gap >= outputs.shape[1]:
                continue
            pairs = np.hypot(outputs[:, :-gap], outputs[:, gap:])
            start, next_head = (_column(pairs, lengths[:, h, 0], error) for h in (0, 1))
            if start is None or next_head is None:
                continue
            rows = Rows(tuple(start + h * (next_head - start) for h in range(heads)), stride)
            places = rows.places(features)
            inside = places.min() >= 0 and places.max() < outputs.shape[1]
            if inside and _follows(_lengths(outputs[:, places], gap // stride), lengths, error):
                yield rows


def _lengths(part: Numbers, apart: int) -> Numbers:
    """The lengths of the pairs of features of part [t, H, D] that lie so far apart, [t, H, D / 2]."""
    pairs = part.reshape(*part.shape[:2], -1, 2, apart)
    return np.hypot(pairs[..., 0, :], pairs[..., 1, :]).reshape(*part.shape[:2], -1)


def _column(outputs: Numbers, wanted: Numbers, error: float) -> int | None:
    """Which of outputs [t, C] is `wanted` [t] times some factor; None: none."""
    if not np.any(wanted):
        raise InconclusiveCallError
    sizes = np.linalg.norm(outputs, axis=0)
    units = outputs / np.where(sizes == 0, 1.0, sizes)
    distances = np.linalg.norm(units - (wanted / np.linalg.norm(wanted))[:, None], axis=0)
    found = np.flatnonzero(distances <= max(_LEAST, 4 * error))
    if found.size > 1:
        raise InconclusiveCallError
    return int(found[0]) if found.size else None


def _follows(ours: Numbers, theirs: Numbers, error: float) -> bool:
    """Whether `theirs` [t, H, D] is `ours` times one factor for each head, the same for all tokens: a norm would have
    another one for each token."""
    squares, products = np.square(ours).sum(2), (ours * theirs).sum(2)
    if not squares.any(0).all():
        return False
    factors = products.sum(0) / squares.sum(0)
    off = np.linalg.norm(theirs - factors[:, None] * ours, axis=2)
    if np.any(off > max(_LEAST, 8 * error) * np.linalg.norm(theirs, axis=2)):
        return False
    seen = squares > 0
    each = products / np.where(seen, squares, 1.0)
    steady = max(_STEADY, 8 * error / ours.shape[2] ** 0.5)
    return bool(np.all((np.abs(each - factors) <= steady * np.abs(factors)) | ~seen))


def _are_values(key: Placed, call: Call) -> bool:
    """Whether a head's own keys are among its values: to scale them would scale what it reads."""
    keys = call.outputs[key.name][:, _outputs(key)]
    if call.value.shape[1] != keys.shape[1]:
        return False
    one, other = (x / np.maximum(np.linalg.norm(x, axis=0), np.finfo(np.float64).tiny) for x in (keys, call.value))
    return bool(np.einsum("thd,the->hde", one, other).max(initial=0.0) > 1 - max(_LEAST, 4 * call.error) ** 2 / 2)
