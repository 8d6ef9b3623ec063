"""The layout of a projection is found by its numbers, whatever it is, and none is found where none fits."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from foreshock.monitor.model.layouts import Numbers, Rows, Seen, alike, fit, fused_rows, says_nothing, separate_rows

HEADS, KEYS, DIM, TOKENS = 4, 2, 8, 5
RANDOM = np.random.default_rng(3)


def drawn(heads: int = HEADS) -> Numbers:
    numbers: Numbers = RANDOM.normal(size=(TOKENS, heads, DIM)) * np.arange(1, heads + 1)[:, None]
    return numbers


def seen(outputs: Numbers, heads: Numbers, *, whole: bool = True, error: float = 1e-7) -> Seen:
    first = np.arange(TOKENS) < 2
    return Seen((outputs.reshape(TOKENS, -1),), heads, whole, first, error)


def in_order(order: str, query: Numbers, key: Numbers, value: Numbers) -> Numbers:
    """One projection of all three, [t, C]; its axes in this order, k standing for which of the three it is."""
    stacked = np.stack([query, key, value])  # k t h d
    outputs: Numbers = np.einsum(f"kthd->t{order}", stacked).reshape(TOKENS, -1)
    return outputs


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("khd")])
@pytest.mark.parametrize("kinds", ["".join(p) for p in itertools.permutations("qkv")])
def test_a_fused_projection_in_any_order_of_its_axes_and_its_three_parts_is_found(order: str, kinds: str) -> None:
    parts = {"q": drawn(), "k": drawn(), "v": drawn()}
    outputs = in_order(order, *(parts[kind] for kind in kinds))
    of_query, of_key = seen(outputs, parts["q"]), seen(outputs, parts["k"])
    fitting = {
        (query, key)
        for query, key in fused_rows(outputs.shape[1], HEADS, HEADS, DIM)
        if fit(query, of_query) and fit(key, of_key)
    }
    ((query, key),) = fitting
    assert np.array_equal(outputs[:, query.places(DIM)], parts["q"])
    assert np.array_equal(outputs[:, key.places(DIM)], parts["k"])


@pytest.mark.parametrize("groups", [1, KEYS])
def test_key_heads_that_stand_with_their_queries_are_told_from_those_that_stand_apart(groups: int) -> None:
    query, key, value = drawn(), drawn(KEYS), drawn(KEYS)
    parts = [np.split(x, groups, axis=1) for x in (query, key, value)]
    outputs = np.concatenate([part[g] for g in range(groups) for part in parts], axis=1).reshape(TOKENS, -1)
    for given in (key, key.repeat(HEADS // KEYS, 1), np.tile(key, (1, HEADS // KEYS, 1))):
        pairs = set(fused_rows(outputs.shape[1], HEADS, given.shape[1], DIM))
        fitting = [pair for pair in pairs if fit(pair[0], seen(outputs, query)) and fit(pair[1], seen(outputs, given))]
        ((of_query, of_key),) = fitting
        assert np.array_equal(outputs[:, of_query.places(DIM)], query)
        assert np.array_equal(outputs[:, of_key.places(DIM)], given)


def turned(x: Numbers, block: int, part: int = DIM) -> Numbers:
    """Pairs of features turned by angles of each token; the first two tokens stand at the start and are not."""
    out = x.copy()
    pairs = x[..., :part].reshape(*x.shape[:2], -1, 2, block // 2)
    angle = np.maximum(np.arange(TOKENS) - 1, 0)[:, None, None, None] * RANDOM.uniform(size=(part // block, block // 2))
    one, other = pairs[..., 0, :], pairs[..., 1, :]
    made = [one * np.cos(angle) - other * np.sin(angle), one * np.sin(angle) + other * np.cos(angle)]
    out[..., :part] = np.stack(made, -2).reshape(*x.shape[:2], part)
    return out


def normed(x: Numbers, gain: Numbers | float = 1.0) -> Numbers:
    divided: Numbers = gain * x / np.sqrt(np.square(x).mean(2, keepdims=True))
    return divided


PLAIN: dict[str, Callable[[Numbers], Numbers]] = {
    "as they are": lambda x: x,
    "scaled": lambda x: x * DIM**-0.5,
    "with a bias": lambda x: x + RANDOM.normal(size=(HEADS, DIM)),
    "rotary positions in halves": lambda x: turned(x, DIM),
    "rotary positions side by side": lambda x: turned(x, 2),
    "rotary positions of a part": lambda x: turned(x, 4, part=4),
    "rotary positions of two axes": lambda x: turned(x, DIM // 2),
}
NORMALISED: dict[str, Callable[[Numbers], Numbers]] = {
    "normalised": normed,
    "normalised with a gain, turned": lambda x: turned(normed(x, RANDOM.uniform(0.5, 2, DIM)), DIM),
    "normalised and turned": lambda x: turned(normed(x), DIM),
    "less their mean": lambda x: normed(x - x.mean(2, keepdims=True), RANDOM.uniform(0.5, 2, DIM)),
}


@pytest.mark.parametrize("how", [*PLAIN, *NORMALISED])
def test_what_happens_on_the_way_to_attention_is_allowed_for_and_no_other_layout_fits(how: str) -> None:
    query = drawn()
    given = (PLAIN | NORMALISED)[how](query)
    outputs = np.einsum("thd->tdh", query)
    fitting = [
        (rows, normalised)
        for normalised in (False, True)
        for rows in dict.fromkeys(separate_rows(HEADS * DIM, HEADS, DIM))
        if fit(rows, seen(outputs, given), normalised=normalised)
    ]
    assert {rows for rows, _ in fitting} == {Rows(tuple(range(HEADS)), HEADS)}
    assert (False in {normalised for _, normalised in fitting}) == (how in PLAIN)


def test_a_gain_of_each_feature_of_each_head_is_believed_only_of_a_module_that_has_a_norm() -> None:
    query = drawn()
    whole = query / np.sqrt(np.square(query).mean((1, 2), keepdims=True)) * RANDOM.uniform(0.5, 2, (HEADS, DIM))
    rows = Rows(tuple(range(0, HEADS * DIM, DIM)))
    shown = seen(query, turned(whole, DIM))
    assert fit(rows, shown, normalised=True, normed=True)
    assert not fit(rows, shown, normalised=True)
    other = Rows(tuple(range(HEADS)), HEADS)
    assert not fit(other, shown, normalised=True, normed=True)


def test_heads_that_a_convolution_mixed_with_other_tokens_fit_nothing() -> None:
    query = drawn()
    mixed = query.copy()
    mixed[1:] += 0.5 * query[:-1]  # the first token is as it was
    for rows, normalised in itertools.product(separate_rows(HEADS * DIM, HEADS, DIM), (False, True)):
        assert not fit(rows, seen(query, mixed), normalised=normalised)


def test_tokens_that_come_from_elsewhere_are_left_out_where_lengths_differ_and_nowhere_else() -> None:
    query = drawn()
    joined = query.copy()
    joined[:-1] = drawn()[:-1]
    rows = Rows(tuple(range(0, HEADS * DIM, DIM)))
    assert fit(rows, seen(query, joined, whole=False))
    assert not fit(rows, seen(query, joined))


def test_numbers_that_tell_no_layout_from_another_are_known_as_such() -> None:
    constant = np.ones((TOKENS, HEADS, DIM))
    one, other = Rows((0, DIM, 2 * DIM, 3 * DIM)), Rows((0, 1, 2, 3), HEADS)
    assert fit(one, seen(constant, constant))
    assert alike(one, other, seen(constant, constant))
    assert not alike(one, other, seen(drawn(), constant))
    assert says_nothing(seen(np.zeros((TOKENS, HEADS, DIM)), constant))
    assert says_nothing(seen(constant * np.nan, constant))
    assert not says_nothing(seen(drawn(), drawn()))


def test_operands_in_16_bits_are_compared_as_exactly_as_they_are_rounded() -> None:
    query = drawn()
    rounded = query * (1 + RANDOM.uniform(-(2**-8), 2**-8, query.shape))
    rows = Rows(tuple(range(0, HEADS * DIM, DIM)))
    assert fit(rows, seen(query, rounded, error=2**-7))
    assert not fit(rows, seen(query, rounded))
    for other in set(separate_rows(HEADS * DIM, HEADS, DIM)) - {rows}:
        assert not fit(other, seen(query, rounded, error=2**-7))


def test_a_projection_of_another_width_has_no_layout() -> None:
    assert not list(separate_rows(HEADS * DIM + 1, HEADS, DIM))
    assert not list(separate_rows(3 * DIM, HEADS, DIM))
    assert not list(fused_rows((2 * HEADS - 1) * DIM, HEADS, HEADS, DIM))
