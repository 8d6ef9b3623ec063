"""Batches mutated from the wire up, each followed by reads: whatever is acknowledged can be read by everybody.

`make test` sends 300, the long tier 25,000, new ones every time.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.test_fuzz import Fuzzed, odd_numbers, odd_text, odd_values, places, whole_batch
from tests.server.test_fuzz import many as many

READS = (
    "/v1/runs",
    "/v1/runs/{run}",
    "/v1/runs/{run}/events",
    "/v1/runs/{run}/commands",
    "/v1/runs/{run}/series?metric=run.loss",
    "/v1/runs/{run}/series?metric=head.risk",
    "/v1/runs/{run}/curves?line=head.score_max:0&line=run.loss",
    "/v1/runs/{run}/matrix?metric=head.mode",
    "/v1/runs/{run}/matrix?metric=head.score_offset",
    "/v1/catalog",
    "/v1/audit",
    "/v1/session",
    "/metrics",
    "/healthz",
    "/readyz",
    "/",
)
HUGE = (10**400, -(10**400), 1e308, -1e308, 2**63 - 1, 2**63, 2**53 + 1, -0.0, 5e-324, math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    service = Fuzzed(tmp_path_factory.mktemp("wire"))
    yield service
    service.close()


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
    *way, last = draw(st.sampled_from(leaves))
    old = at(batch, (*way, last))
    new = odd_text if isinstance(old, str) else st.one_of(odd_numbers, st.sampled_from(HUGE))
    at(batch, tuple(way))[last] = draw(new)


def repeated(draw: st.DrawFn, batch: Any) -> None:
    """Events twice, in another order, with the words of two events in one."""
    events = draw(st.permutations(batch["events"]))
    one, other = draw(st.sampled_from(events)), draw(st.sampled_from(events))
    batch["events"] = [*events, {**other, **one}][: draw(st.integers(1, len(events) + 1))]


@st.composite
def wire_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A run and the bytes sent in its name."""
    batch = whole_batch()
    batch["run"] = run = draw(st.sampled_from([f"wire-{n}" for n in range(5)]))
    batch["rank"] = draw(st.integers(0, 3))
    batch["sequence"] = draw(st.integers(1, 2**53))
    for change in draw(st.lists(st.sampled_from([resized, replaced, same_kind, same_kind, repeated]), max_size=2)):
        try:
            change(draw, batch)
        except (LookupError, TypeError, AttributeError):
            continue  # the change before it left nothing to change
    text = json.dumps(batch)
    if draw(st.integers(0, 4)) == 0:  # a key twice: JSON's readers take the last
        key = draw(st.sampled_from(["rank", "run", "sequence", "events", "boot", "revision"]))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(draw(odd_values))}}}"
    body = text.encode("utf-8", "surrogatepass")
    return run, body[: draw(st.sampled_from([len(body), len(body), len(body), len(body) // 2, len(body) - 1, 1]))]


def read_everything(fuzzed: Fuzzed, run: str) -> None:
    for path in READS:
        fuzzed.send("GET", path.replace("{run}", run), None)


@pytest.mark.promise("S5")
def test_whatever_the_wire_brings_every_reader_goes_on(fuzzed: Fuzzed, many: settings) -> None:
    answers: set[int] = set()
    sent = [0]

    @many
    @given(wire_bodies(), st.sampled_from(READS))
    def case(named: tuple[str, bytes], path: str) -> None:
        run, body = named
        status = fuzzed.send("POST", "/v1/batches", body).status_code
        answers.add(status)
        sent[0] += 1
        fuzzed.send("GET", path.replace("{run}", run), None)
        if sent[0] % 50 == 0:
            read_everything(fuzzed, run)

    case()
    assert answers == {200, 422}
    for run in (*(f"wire-{n}" for n in range(5)), "run-1"):
        read_everything(fuzzed, run)
    # the healthy run beside them is whole
    assert fuzzed.send("GET", "/v1/runs/run-1", None).json()["last_step"] == 1
    assert 'foreshock_run_step{run="run-1"} 1.0' in fuzzed.send("GET", "/metrics", None).text
