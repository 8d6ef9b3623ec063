"""Batches mutated from the wire up, each followed by reads: whatever is acknowledged can be read by everybody."""

import json
import math
from collections import Counter, defaultdict
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.test_fuzz import (
    READS,
    Fuzzed,
    assert_the_healthy_run_is_whole,
    odd_numbers,
    odd_text,
    odd_values,
    places,
    read_everything,
    whole_batch,
)
from tests.server.test_fuzz import fuzzed as fuzzed
from tests.server.test_fuzz import many as many

from foreshock.contract.wire import Sample
from foreshock.server.readings import SPAN, build
from foreshock.server.testing import FakeRank

HUGE = (10**400, -(10**400), 1e308, -1e308, 2**63 - 1, 2**63, 2**53 + 1, -0.0, 5e-324, math.nan, math.inf, -math.inf)

HEALTHY = "run-1"
"""The run that nobody fuzzes: it must be whole at the end."""

MIDDLE = 2 * SPAN
"""Where the heads of the others are read; their losses lie on both sides."""


def at(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        value = value[key]
    return value


def resized(draw: st.DrawFn, batch: Any) -> None:
    """An array whose shape and bytes disagree with the layers, with one another, or with sense."""
    arrays = [p for p in places(batch) if isinstance(at(batch, p), dict) and "shape" in at(batch, p)]
    array = at(batch, draw(st.sampled_from(arrays)))
    shape = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([2**31, 2**62, -1])), max_size=4)
    array["shape"] = draw(st.one_of(shape, st.just(array["shape"][::-1]), st.just([0, *array["shape"]])))
    array["data"] = draw(
        st.sampled_from([array["data"], array["data"] * 2, array["data"][:-4], "", "AAAA", "====", "é"])
    )


def replaced(draw: st.DrawFn, batch: Any) -> None:
    *way, last = draw(st.sampled_from([p for p in places(batch) if p]))
    at(batch, tuple(way))[last] = draw(st.one_of(odd_values, odd_text, odd_numbers, st.sampled_from(HUGE)))


def same_kind(draw: st.DrawFn, batch: Any) -> None:
    """A number for a number, a text for a text: what the types let through."""
    leaves = [p for p in places(batch) if p and isinstance(at(batch, p), int | float | str)]
    named: dict[str, list[tuple[Any, ...]]] = defaultdict(list)  # every field as often, however long its rows
    for p in leaves:
        named[next(key for key in reversed(p) if isinstance(key, str))].append(p)
    *way, last = draw(st.sampled_from(draw(st.sampled_from(sorted(named.items())))[1]))
    old = at(batch, (*way, last))
    new = odd_text if isinstance(old, str) else st.one_of(st.sampled_from(HUGE), odd_numbers)
    at(batch, tuple(way))[last] = draw(new)


def repeated(draw: st.DrawFn, batch: Any) -> None:
    """Events twice, in another order, with the words of two events in one."""
    events = draw(st.permutations(batch["events"]))
    one, other = draw(st.sampled_from(events)), draw(st.sampled_from(events))
    batch["events"] = [*events, {**other, **one}][: draw(st.integers(1, len(events) + 1))]


def loss_alone(run: str, step: int) -> bytes:
    """A batch with the loss of a step at which no head was read, as norms are read now and then."""
    sample = Sample(step=step, since_step=step - 1, unix_seconds=1.0, loss=3.0)
    return FakeRank(run=run, rank=9).batch(sample, sequence=step).model_dump_json().encode()


@st.composite
def wire_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A run and the bytes sent in its name."""
    batch = whole_batch()
    batch["run"] = run = draw(st.sampled_from([f"wire-{n}" for n in range(5)]))
    batch["rank"] = draw(st.integers(0, 3))
    batch["sequence"] = draw(st.integers(1, 2**53))
    for event in batch["events"]:
        event["step"] += MIDDLE
    for change in draw(
        st.lists(
            st.sampled_from([same_kind, same_kind, same_kind, replaced, resized, repeated]), min_size=1, max_size=2
        )
    ):
        try:
            change(draw, batch)
        except (LookupError, TypeError, AttributeError):
            continue  # the change before it left nothing to change
    if batch.get("run") == HEALTHY:  # Hypothesis draws words that stand in the code, too
        batch["run"] = run
    text = json.dumps(batch)
    if draw(st.integers(1, 10)) == 10:  # a key twice: JSON's readers take the last
        key = draw(st.sampled_from(["rank", "run", "sequence", "events", "boot"]))
        value = draw(odd_values.filter(lambda value: value != HEALTHY))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}"
    body = text.encode("utf-8", "surrogatepass")
    return run, body[: draw(st.sampled_from([*[len(body)] * 17, len(body) // 2, len(body) - 1, 1]))]


def headers() -> st.SearchStrategy[dict[str, str]]:
    """Headers that the service reads, with words that it does not expect."""
    odd = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=40)
    ages = st.sampled_from(["0", "-1", "nan", "1e308", "9" * 300, "soon"])
    return st.fixed_dictionaries(
        {},
        optional={
            "foreshock-process-age": st.one_of(ages, odd),
            "foreshock-replayed": st.sampled_from(["true", "TRUE", ""]),
            "content-encoding": st.sampled_from(["gzip", "identity", "br"]),
            "idempotency-key": odd,
            "accept": odd,
            "origin": st.sampled_from(["http://[", "null", "http://127.0.0.1:8765", "\u00e9"]),
            "x-forwarded-for": odd,
            "range": st.sampled_from(["bytes=0-0", "bytes=9-1", "x"]),
        },
    )


@pytest.mark.full
@pytest.mark.promise("S5")
def test_whatever_the_wire_brings_every_reader_goes_on(fuzzed: Fuzzed, many: settings) -> None:
    answers: Counter[int] = Counter()

    @many
    @given(wire_bodies(), headers(), st.sampled_from(READS), st.integers(1, 2 * MIDDLE))
    def case(named: tuple[str, bytes], beside: dict[str, str], path: str, step: int) -> None:
        run, body = named
        fuzzed.send("POST", "/v1/batches", loss_alone(run, step))
        status = fuzzed.send("POST", "/v1/batches", body, **beside).status_code
        answers[status] += 1
        fuzzed.send("GET", path.replace("{run}", run), None, **beside)
        fuzzed.send("GET", f"/v1/runs/{run}/curves?line=head.score_max&max_points=9", None)
        if answers.total() % 10 == 0:
            for run_id, span in product(range(1, 7), range(1, 4)):
                fuzzed.loop.run_until_complete(build(fuzzed.app.state.store, run_id, span))
        if answers.total() % 50 == 0:
            read_everything(fuzzed, run)

    case()
    assert {200, 422} <= answers.keys() <= {200, 403, 415, 422}  # 403: from a foreign page
    assert answers[200] > answers.total() // 20, "most of what is sent never reaches the store"
    for run in (*(f"wire-{n}" for n in range(5)), "run-1"):
        read_everything(fuzzed, run)
    assert_the_healthy_run_is_whole(fuzzed)


@pytest.mark.promise("S5")
def test_no_method_or_header_breaks_any_address(fuzzed: Fuzzed, many: settings) -> None:
    methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"])

    @many
    @given(methods, st.sampled_from(READS), headers(), st.one_of(st.none(), st.binary(max_size=60)))
    def case(method: str, path: str, beside: dict[str, str], body: bytes | None) -> None:
        fuzzed.send(method, path.replace("{run}", "run-1"), body, **beside)

    case()
    assert_the_healthy_run_is_whole(fuzzed)
