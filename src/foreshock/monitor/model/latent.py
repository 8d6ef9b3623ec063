"""Which outputs of a layer's projections are the parts of its queries and keys, found from the numbers of one call.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) a part of each key is its head's own, made
from a latent, and another part, which carries the positions, is the same in all heads. NumPy alone.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.monitor.model.layouts import Numbers, Rows

_LEAST: Final = 1e-4
"""Relative difference of two numbers that are called equal, of operands that round less."""
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
