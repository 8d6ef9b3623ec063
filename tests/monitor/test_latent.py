"""The parts of latent queries and keys are placed by the numbers of a call; where these do not tell, not at all."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.monitor.model.layouts import Call, InconclusiveCallError, Numbers, parts_of

TOKENS = 16


def turned(x: Numbers, rng: np.random.Generator, before: str, after: str) -> Numbers:
    """Each token's pairs of features [t, H, D] turned by angles of its own; `before` and `after`: which pair up."""
    half = x.shape[2] // 2
    one, other = (x[..., ::2], x[..., 1::2]) if before == "neighbours" else (x[..., :half], x[..., half:])
    angle = rng.uniform(0, 6, (len(x), 1, half))
    both = one * np.cos(angle) - other * np.sin(angle), one * np.sin(angle) + other * np.cos(angle)
    return np.stack(both, -1).reshape(x.shape) if after == "neighbours" else np.concatenate(both, -1)


def places(heads: int, widths: list[int], order: str) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Outputs of each part by head and feature, [H, D] each: heads first, parts first, or features first."""
    starts = np.cumsum([0, *widths])
    found = []
    for start, width in zip(starts, widths, strict=False):
        head, feature = np.arange(heads)[:, None], np.arange(width)
        of_order = {
            "heads first": head * starts[-1] + start + feature,
            "parts first": heads * start + head * width + feature,
            "features first": (start + feature) * heads + head,
        }
        found.append(of_order[order])
    return found


ORDERS = st.sampled_from(["heads first", "parts first", "features first"])
PAIRS = st.sampled_from(["neighbours", "halves"])


def call(
    seed: int, heads: int, own: int, shared: int, orders: tuple[str, str], pairs: tuple[str, str], bits: int = 52
) -> tuple[Call, list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """A call of latent attention, rounded to so many bits, and where query, key and query of the shared truly lie."""
    rng = np.random.default_rng(seed)
    query_own, query_shared = places(heads, [own, shared], orders[0])
    key_own, values = places(heads, [own, own + 1], orders[1])
    outputs = {
        "down": rng.normal(size=(TOKENS, 7)),
        "up_q": rounded(rng.normal(size=(TOKENS, heads * (own + shared))), bits),
        "up_kv": rounded(rng.normal(size=(TOKENS, heads * (2 * own + 1))), bits),
    }
    of_query, of_keys = outputs["up_q"], outputs["up_kv"]
    rotary = turned(of_query[:, query_shared], rng, *pairs)
    of_all = np.repeat(rng.normal(size=(TOKENS, 1, shared)), heads, 1)
    given = Call(
        outputs,
        rounded(np.concatenate([of_query[:, query_own], rotary], -1) * 1.25, bits),
        rounded(np.concatenate([of_keys[:, key_own], of_all], -1), bits),
        of_keys[:, values],
        2.0**-bits,
    )
    return given, [query_own, key_own, query_shared]


def rounded(x: Numbers, bits: int) -> Numbers:
    mantissa, exponent = np.frexp(x)
    kept: Numbers = np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
    return kept


@settings(max_examples=60)
@given(
    st.integers(0, 1000), st.integers(2, 5), st.integers(1, 9), st.sampled_from([2, 4, 8]),
    st.tuples(ORDERS, ORDERS), st.tuples(PAIRS, PAIRS), st.sampled_from([52, 23, 10, 7]),
)  # fmt: skip
def test_every_part_is_found_in_every_order_and_precision(
    seed: int, heads: int, own: int, shared: int, orders: tuple[str, str], pairs: tuple[str, str], bits: int
) -> None:
    given, true = call(seed, heads, own, shared, orders, pairs, bits)
    found = parts_of(given)
    assert [part.name for part in found if part is not None] == ["up_q", "up_kv", "up_q"]
    for part, expected in zip(found, true, strict=True):
        assert part is not None
        np.testing.assert_array_equal(np.sort(part.rows.places(part.head_dim), 1), np.sort(expected, 1))


def plain(bits: int = 52) -> tuple[Call, list[np.ndarray[Any, np.dtype[np.int64]]]]:
    return call(3, 4, 8, 4, ("heads first", "heads first"), ("halves", "halves"), bits)


@settings(max_examples=40)
@given(st.sampled_from([52, 23, 10, 7]), st.sampled_from(["query", "key"]), st.sampled_from([(2,), (1, 2)]))
def test_behind_a_norm_of_each_head_or_of_all_no_part_is_found(bits: int, side: str, over: tuple[int, ...]) -> None:
    given, _ = plain(bits)
    for features in (slice(0, 8), slice(8, 12)) if side == "query" else (slice(0, 8),):
        whole = getattr(given, side).copy()
        part = whole[..., features]
        whole[..., features] = rounded(part / np.sqrt(np.square(part).mean(over, keepdims=True)), bits)
        with pytest.raises(ValueError, match="in no known order do the outputs of its projections"):
            parts_of(given._replace(**{side: whole}))


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_norm_over_many_heads_that_hardly_differs_from_token_to_token_is_not_taken_for_rounding(side: str) -> None:
    given, _ = call(3, 16, 64, 4, ("heads first", "heads first"), ("halves", "halves"), 7)
    parts_of(given)
    whole = getattr(given, side).copy()
    sizes = np.sqrt(np.square(whole[..., :64]).mean((1, 2), keepdims=True))
    assert np.std(sizes) / np.mean(sizes) < 4 * given.error
    whole[..., :64] = rounded(whole[..., :64] / sizes, 7)
    with pytest.raises(ValueError, match="in no known order do the outputs of its projections"):
        parts_of(given._replace(**{side: whole}))


def test_what_is_not_of_each_head_alone_is_refused_with_a_sentence() -> None:
    given, (_, of_keys, _) = plain()
    with pytest.raises(ValueError, match="its keys are the same in all heads"):
        parts_of(given._replace(key=np.repeat(given.key[:, :1], 4, 1)))
    with pytest.raises(ValueError, match="outputs of up_kv are keys and values at once"):
        parts_of(given._replace(value=given.outputs["up_kv"][:, of_keys[:, :3]]))
    one = np.concatenate([given.outputs["up_kv"][:, of_keys], given.query[..., 8:]], -1)
    with pytest.raises(ValueError, match="outputs of up_kv are queries and keys at once"):
        parts_of(given._replace(query=one))
    bent = np.concatenate([np.tanh(given.query[..., :8]), given.query[..., 8:]], -1)
    with pytest.raises(ValueError, match=r"projections \(down, up_q, up_kv\) give its queries"):
        parts_of(given._replace(query=bent))


def test_numbers_that_are_equal_zero_or_not_finite_tell_nothing() -> None:
    given, _ = plain()
    twice = {**given.outputs, "again": given.outputs["up_q"]}
    one_token = {name: np.repeat(x[:1], TOKENS, 0) for name, x in given.outputs.items()}
    zeros = {name: np.zeros_like(x) for name, x in given.outputs.items()}
    for changed in (
        given._replace(outputs=twice),
        given._replace(
            outputs=one_token, query=np.repeat(given.query[:1], TOKENS, 0), key=np.repeat(given.key[:1], TOKENS, 0)
        ),
        given._replace(outputs=zeros, query=np.zeros_like(given.query)),
        given._replace(key=np.where(given.key > 2, np.inf, given.key)),
        given._replace(outputs={**given.outputs, "down": np.full((TOKENS, 7), np.nan)}),
    ):
        with pytest.raises(InconclusiveCallError):
            parts_of(changed)


def test_without_keys_that_heads_share_all_features_are_each_heads_own() -> None:
    given, (query, key, _) = plain()
    found = parts_of(given._replace(query=given.query[..., :8], key=given.key[..., :8]))
    np.testing.assert_array_equal(found.query.rows.places(8), query)
    np.testing.assert_array_equal(found.key.rows.places(8), key)
    assert found.query_of_shared is None
