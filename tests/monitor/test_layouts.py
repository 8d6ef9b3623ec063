"""The layout of a projection is found by its numbers, whatever it is, and none is found where none fits."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.monitor.attention.layout_check import Call, Corners, Numbers, Parts, parts_of

HEADS, KEYS, DIM, SEQUENCES, LENGTH = 4, 2, 8, 3, 5
FIRST = np.array([True, False, True, False])
Places = np.ndarray[Any, np.dtype[np.int64]]


def rounded(x: Numbers, bits: int) -> Numbers:
    mantissa, exponent = np.frexp(x)
    kept: Numbers = np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
    return kept


def turned(x: Numbers, rng: np.random.Generator, pairs: str) -> Numbers:
    """Each head [t, H, D] turned by angles of its token, but for tokens that begin a sequence."""
    half = x.shape[2] // 2
    one, other = (x[..., ::2], x[..., 1::2]) if pairs == "neighbours" else (x[..., :half], x[..., half:])
    angle = rng.uniform(0, 6, (len(x), 1, half)) * ~FIRST[:, None, None]
    both = one * np.cos(angle) - other * np.sin(angle), one * np.sin(angle) + other * np.cos(angle)
    return np.stack(both, -1).reshape(x.shape) if pairs == "neighbours" else np.concatenate(both, -1)


def normed(x: Numbers, gain: Numbers | float = 1.0, over: tuple[int, ...] = (2,)) -> Numbers:
    divided: Numbers = gain * x / np.sqrt(np.square(x).mean(over, keepdims=True))
    return divided


def call(outputs: dict[str, Numbers], query: Numbers, key: Numbers, value: Numbers, bits: int = 52) -> Call:
    grid = SEQUENCES, LENGTH
    of_outputs = {name: Corners(rounded(x, bits), grid) for name, x in outputs.items()}
    of_query, of_key, of_value = (Corners(rounded(x, bits), grid) for x in (query, key, value))
    return Call(of_outputs, of_query, of_key, of_value, 2.0**-bits)


def drawn(rng: np.random.Generator, heads: int = HEADS, dim: int = DIM) -> Numbers:
    numbers: Numbers = rng.normal(size=(4, heads, dim))
    return numbers


ON_THE_WAY: dict[str, Callable[[Numbers, np.random.Generator], Numbers]] = {
    "as they are": lambda x, rng: x,
    "scaled": lambda x, rng: x * DIM**-0.5,
    "with a bias": lambda x, rng: x + rng.normal(size=x.shape[1:]),
    "turned in halves": lambda x, rng: turned(x, rng, "halves"),
    "turned side by side": lambda x, rng: turned(x, rng, "neighbours"),
    "normalised and turned": lambda x, rng: turned(normed(x), rng, "halves"),
    "normalised with a gain": lambda x, rng: turned(normed(x, rng.uniform(0.5, 2, DIM)), rng, "halves"),
    "less their mean": lambda x, rng: normed(x - x.mean(2, keepdims=True), rng.uniform(0.5, 2, DIM)),
    "each token normalised": lambda x, rng: turned(normed(x, over=(1, 2)), rng, "halves"),
}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from(["".join(p) for p in itertools.permutations("khd")]),
    st.sampled_from(["".join(p) for p in itertools.permutations("qkv")]), st.sampled_from(sorted(ON_THE_WAY)),
    st.sampled_from([52, 23, 10, 7]),
)  # fmt: skip
def test_a_fused_projection_is_found_in_any_order_whatever_happens_to_its_heads_on_the_way(
    seed: int, axes: str, kinds: str, how: str, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = {kind: drawn(rng) for kind in "qkv"}
    fused = np.einsum(f"kthd->t{axes}", np.stack([parts[kind] for kind in kinds])).reshape(4, -1)
    query, key = (ON_THE_WAY[how](parts[kind], rng) for kind in "qk")
    found = parts_of(call({"qkv": fused}, query, key, parts["v"], bits))
    np.testing.assert_array_equal(fused[:, found.query.rows.outputs], parts["q"])
    np.testing.assert_array_equal(fused[:, found.key.rows.outputs], parts["k"])
    assert found.query.normalised == ("normalised" in how or "mean" in how)


def places(heads: int, widths: list[int], order: str) -> list[Places]:
    """Outputs of each part by head and feature, [H, D] each: heads first, parts first, or features first."""
    starts = np.cumsum([0, *widths])
    head = np.arange(heads)[:, None]
    of_order: dict[str, Callable[[int, int], Places]] = {
        "heads first": lambda start, width: head * starts[-1] + start + np.arange(width),
        "parts first": lambda start, width: heads * start + head * width + np.arange(width),
        "features first": lambda start, width: (start + np.arange(width)) * heads + head,
    }
    return [of_order[order](start, width) for start, width in zip(starts, widths, strict=False)]


def latent(
    seed: int, orders: tuple[str, str] = ("heads first", "heads first"), bits: int = 52
) -> tuple[Call, list[Places]]:
    """A call of latent attention, and where query, key and query of the shared keys truly lie."""
    rng = np.random.default_rng(seed)
    own, shared = DIM, DIM // 2
    query_own, query_shared = places(HEADS, [own, shared], orders[0])
    key_own, values = places(HEADS, [own, own + 1], orders[1])
    widths = {"down": 7, "up_q": HEADS * (own + shared), "up_kv": HEADS * (2 * own + 1)}
    outputs = {name: rng.normal(size=(4, width)) for name, width in widths.items()}
    of_query, of_keys = outputs["up_q"], outputs["up_kv"]
    query = np.concatenate([of_query[:, query_own], turned(of_query[:, query_shared], rng, "halves")], -1) * 1.25
    key = np.concatenate([of_keys[:, key_own], np.repeat(rng.normal(size=(4, 1, shared)), HEADS, 1)], -1)
    return call(outputs, query, key, of_keys[:, values], bits), [query_own, key_own, query_shared]


ORDERS = st.sampled_from(["heads first", "parts first", "features first"])


def assert_found(found: Parts, true: list[Places]) -> None:
    for part, expected in zip(found[:3], true, strict=True):
        assert part is not None
        np.testing.assert_array_equal(np.sort(part.rows.outputs, 1), np.sort(expected, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.tuples(ORDERS, ORDERS), st.sampled_from([52, 23, 10, 7]))
def test_every_part_of_latent_queries_and_keys_is_found(seed: int, orders: tuple[str, str], bits: int) -> None:
    given_call, true = latent(seed, orders, bits)
    assert_found(parts_of(given_call), true)


def replaced(given_call: Call, side: str, numbers: Numbers) -> Call:
    return given_call._replace(**{side: getattr(given_call, side)._replace(numbers=numbers)})


def test_values_that_are_keys_and_outputs_that_are_both_queries_and_keys_are_named() -> None:
    given_call, (_, of_keys, _) = latent(3)
    outputs = given_call.outputs["up_kv"].numbers
    assert not parts_of(given_call).keys_are_values
    assert parts_of(replaced(given_call, "value", outputs[:, of_keys])).keys_are_values
    one = np.concatenate([outputs[:, of_keys], given_call.query.numbers[..., DIM:]], -1)
    with pytest.raises(ValueError, match="outputs of up_kv are queries and keys at once"):
        parts_of(replaced(given_call, "query", one))


def test_heads_that_no_projection_gives_are_refused_with_a_sentence() -> None:
    given_call, _ = latent(3)
    query = given_call.query.numbers
    mixed = query + 0.5 * query[::-1]  # as a convolution over tokens
    for bent in (np.tanh(query), mixed):
        with pytest.raises(ValueError, match=r"projections \(down, up_q, up_kv\) give its queries, 4 heads of 8"):
            parts_of(replaced(given_call, "query", bent))
