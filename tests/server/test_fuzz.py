"""Fuzzing on both databases: requests generated from the OpenAPI document, and mutated batches followed by reads."""

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.overrides import settings_with
from tests.server.postgresql import new_database

from foreshock.contract.wire import AgentHealth, Finished, Sample
from foreshock.server.app import create_app
from foreshock.server.readings import SPAN, build
from foreshock.server.settings import Settings
from foreshock.server.testing import FakeRank

READS = (
    "/v1/runs",
    "/v1/runs/{run}",
    "/v1/runs/{run}/events",
    "/v1/runs/{run}/commands",
    "/v1/runs/{run}/curves?line=run.loss",
    "/v1/runs/{run}/curves?line=head.risk",
    "/v1/runs/{run}/curves?line=head.score_max&max_points=9",
    "/v1/runs/{run}/curves?line=head.score_max:0&line=run.loss",
    "/v1/runs/{run}/curves?line=head.score_max:0:2&line=run.loss&max_points=3",
    "/v1/runs/{run}/matrix?metric=head.mode",
    "/v1/runs/{run}/matrix?metric=head.score_offset",
    "/v1/runs/{run}/matrix?metric=head.query_norm",
    "/v1/runs/{run}/curves?line=run.worst_risk",
    "/v1/catalog",
    "/v1/audit",
    "/v1/session",
    "/metrics",
    "/healthz",
    "/readyz",
    "/",
)
METHODS = ("get", "put", "post", "delete", "patch", "options", "head")


@pytest.fixture
def fuzz_settings(sizes: Any, record_property: Callable[[str, Any], None]) -> settings:
    """Hypothesis settings with the number of cases of the tier."""
    cases = sizes("fuzz_cases", quick=200, long=6_250)
    record_property("cases", cases)
    return sizes.fuzzed(cases)  # type: ignore[no-any-return]


arbitrary_text = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=40),
    st.sampled_from(
        [
            "",
            "run-1",
            "\ud800",
            "a\udc00",
            "../..",
            "%2e%2e",
            "a;b",
            "a\\b",
            "\x00",
            "' OR 1=1 --",
            "{{7*7}}",
            "<img onerror=x>",
        ]
    ),
)
arbitrary_numbers = st.one_of(
    st.integers(), st.integers(-2, 2), st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**63), 10**40]), st.floats()
)
arbitrary_values = st.recursive(
    st.one_of(st.none(), st.booleans(), arbitrary_numbers, arbitrary_text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(arbitrary_text, inner, max_size=4)),
    max_leaves=8,
)


class Fuzzed:
    """A service in this process and its OpenAPI document."""

    def __init__(self, database_url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.app = create_app(
            settings_with(Settings, database_url=database_url, migrate=True, run_batches_per_second=1e9)
        )
        self.document = self.app.openapi()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://127.0.0.1:8765"
        )
        self._life = self.app.router.lifespan_context(self.app)
        self.loop.run_until_complete(self._life.__aenter__())
        rank = FakeRank()
        seed = rank.batch(rank.started(), rank.sample(1), rank.verdict(1))
        assert self.send("POST", "/v1/batches", seed.model_dump_json().encode()).status_code == 200
        order = {"who": "ann", "reason": "drift", "heads": [[0, 2]], "mode": "exact_delta"}
        made = self.send("POST", "/v1/runs/run-1/commands", json.dumps(order).encode())
        self.known = ("run-1", str(made.json()["id"]))

    def send(self, method: str, path: str, body: bytes | None, **headers: str) -> httpx.Response:
        """Send a request and return the response, which must not be a server error."""
        given = {"content-type": "application/json", **headers} if body is not None else headers
        raw = {name.encode(): value.encode("latin-1") for name, value in given.items()}
        response = self.loop.run_until_complete(self._client.request(method, path, content=body, headers=raw))
        assert response.status_code < 500, (method, path, body, response.text)
        if response.status_code >= 400 and method != "HEAD":
            problem = response.json()
            assert response.headers["content-type"] == "application/problem+json"
            assert problem["status"] == response.status_code
            assert problem["detail"]
            assert "Traceback" not in response.text
        return response

    def close(self) -> None:
        self.loop.run_until_complete(self._client.aclose())
        self.loop.run_until_complete(self._life.__aexit__(None, None, None))
        self.loop.close()


def read_everything(fuzzed: Fuzzed, run: str) -> None:
    for path in READS:
        fuzzed.send("GET", path.replace("{run}", run), None)


def assert_healthy_run_unchanged(fuzzed: Fuzzed) -> None:
    """Assert that the run from before the fuzzing is unchanged."""
    detail = fuzzed.send("GET", "/v1/runs/run-1", None).json()
    assert (detail["last_step"], len(detail["layers"]), len(detail["warnings"])) == (1, 2, 1)
    assert 'foreshock_run_step{run="run-1"} 1.0' in fuzzed.send("GET", "/metrics", None).text


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.servers, pytest.mark.full])]
)
def fuzzed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """A service on a new store, for each kind of database."""
    url = f"sqlite:///{tmp_path_factory.mktemp('fuzz')}/fuzz.db"
    if request.param == "postgresql":
        url = asyncio.run(new_database(request.getfixturevalue("postgres")))
    service = Fuzzed(url)
    yield service
    service.close()


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def values_of(document: dict[str, Any], schema: dict[str, Any], depth: int = 4) -> st.SearchStrategy[Any]:
    """Values that mostly match the schema."""
    schema = resolved(document, schema)
    right: st.SearchStrategy[Any] = arbitrary_values
    kind = schema.get("type")
    if "enum" in schema:
        right = st.sampled_from(schema["enum"])
    elif "const" in schema:
        right = st.just(schema["const"])
    elif branches := schema.get("anyOf") or schema.get("oneOf"):
        right = st.one_of(*(values_of(document, branch, depth - 1) for branch in branches))
    elif kind == "object" and depth > 0:
        known = {name: values_of(document, own, depth - 1) for name, own in schema.get("properties", {}).items()}
        needed = {name: own for name, own in known.items() if name in schema.get("required", [])}
        spare = {name: own for name, own in known.items() if name not in needed}
        right = st.fixed_dictionaries(needed, optional=spare)
    elif kind == "array" and depth > 0:
        right = st.lists(values_of(document, schema.get("items", {}), depth - 1), max_size=3)
    elif kind in ("integer", "number"):
        right = st.one_of(st.integers(0, 20), arbitrary_numbers)
    elif kind == "boolean":
        right = st.booleans()
    elif kind == "string":
        right = arbitrary_text
    return st.one_of(right, right, right, arbitrary_values)


@st.composite
def requests(draw: st.DrawFn, fuzzed: Fuzzed) -> tuple[str, str, bytes | None]:
    """A method, a path with its query, and a body."""
    document, known = fuzzed.document, fuzzed.known
    path = draw(st.sampled_from([p for p in sorted(document["paths"]) if p != "/v1/stream"]))
    item = document["paths"][path]
    method = draw(st.sampled_from([*sorted(item), *sorted(item), *METHODS]))
    operation = item.get(method, {})
    query = []
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            value = draw(st.one_of(st.sampled_from(known), arbitrary_text))
            path = path.replace("{" + parameter["name"] + "}", quote(str(value), safe="/", errors="surrogatepass"))
        elif parameter["in"] == "query" and draw(st.booleans()):
            value = draw(values_of(document, parameter["schema"]))
            query.append(f"{parameter['name']}={quote(str(value), errors='surrogatepass')}")
    path = path.replace("{run}", known[0]).replace("{command}", known[1])
    body = None
    if content := operation.get("requestBody", {}).get("content"):
        value = draw(values_of(document, content["application/json"].get("schema", {})))
        body = json.dumps(value).encode("utf-8", "surrogatepass")
    return method.upper(), path + ("?" + "&".join(query) if query else ""), body


@pytest.mark.full
@pytest.mark.promise("S5")
def test_requests_from_openapi_document_never_break_the_service(fuzzed: Fuzzed, fuzz_settings: settings) -> None:
    @fuzz_settings
    @given(requests(fuzzed))
    def case(request: tuple[str, str, bytes | None]) -> None:
        fuzzed.send(*request)

    case()
    read_everything(fuzzed, "run-1")
    assert_healthy_run_unchanged(fuzzed)


def whole_batch() -> Any:
    rank = FakeRank(run="fuzzed")
    health = AgentHealth(step=2, dropped={"queue_full": 1}, faults={})
    done = Finished(step=3, unix_seconds=3.0, status="completed")
    return json.loads(rank.batch(rank.started(), rank.sample(1), rank.verdict(1), health, done).model_dump_json())


def paths_in(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield prefix
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from paths_in(inner, (*prefix, key))


HUGE = (10**400, -(10**400), 1e308, -1e308, 2**63 - 1, 2**63, 2**53 + 1, -0.0, 5e-324, math.nan, math.inf, -math.inf)

HEALTHY = "run-1"
"""A run that is not fuzzed and must not change."""

MIDDLE = 2 * SPAN
"""The step of head data in the fuzzed runs; their losses are at steps on both sides."""


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def resize(draw: st.DrawFn, batch: Any) -> None:
    """Change an array so that its shape and bytes do not match each other or the layers."""
    arrays = [p for p in paths_in(batch) if isinstance(value_at(batch, p), dict) and "shape" in value_at(batch, p)]
    array = value_at(batch, draw(st.sampled_from(arrays)))
    shape = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([2**31, 2**62, -1])), max_size=4)
    array["shape"] = draw(st.one_of(shape, st.just(array["shape"][::-1]), st.just([0, *array["shape"]])))
    array["data"] = draw(
        st.sampled_from([array["data"], array["data"] * 2, array["data"][:-4], "", "AAAA", "====", "é"])
    )


def replace(draw: st.DrawFn, batch: Any) -> None:
    *parent, last = draw(st.sampled_from([p for p in paths_in(batch) if p]))
    value_at(batch, tuple(parent))[last] = draw(
        st.one_of(arbitrary_values, arbitrary_text, arbitrary_numbers, st.sampled_from(HUGE))
    )


def replace_with_same_type(draw: st.DrawFn, batch: Any) -> None:
    """Replace a value with another one of the same type, which passes type checks."""
    leaves = [p for p in paths_in(batch) if p and isinstance(value_at(batch, p), int | float | str)]
    # choose each field equally often, regardless of its length
    named: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for p in leaves:
        named[next(key for key in reversed(p) if isinstance(key, str))].append(p)
    *parent, last = draw(st.sampled_from(draw(st.sampled_from(sorted(named.items())))[1]))
    old = value_at(batch, (*parent, last))
    new = arbitrary_text if isinstance(old, str) else st.one_of(st.sampled_from(HUGE), arbitrary_numbers)
    value_at(batch, tuple(parent))[last] = draw(new)


def repeat_events(draw: st.DrawFn, batch: Any) -> None:
    """Reorder events and add one that merges two of them."""
    events = draw(st.permutations(batch["events"]))
    one, other = draw(st.sampled_from(events)), draw(st.sampled_from(events))
    batch["events"] = [*events, {**other, **one}][: draw(st.integers(1, len(events) + 1))]


def loss_only(run: str, step: int) -> bytes:
    """A batch with the loss of a step without head data."""
    sample = Sample(step=step, since_step=step - 1, unix_seconds=1.0, loss=3.0)
    return FakeRank(run=run, rank=9).batch(sample, sequence=step).model_dump_json().encode()


@st.composite
def wire_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A run and the body of a batch that names it."""
    batch = whole_batch()
    batch["run"] = run = draw(st.sampled_from([f"wire-{n}" for n in range(5)]))
    batch["rank"] = draw(st.integers(0, 3))
    batch["sequence"] = draw(st.integers(1, 2**53))
    for event in batch["events"]:
        event["step"] += MIDDLE
    for change in draw(
        st.lists(
            st.sampled_from(
                [replace_with_same_type, replace_with_same_type, replace_with_same_type, replace, resize, repeat_events]
            ),
            min_size=1,
            max_size=2,
        )
    ):
        try:
            change(draw, batch)
        except (LookupError, TypeError, AttributeError):
            continue  # an earlier change removed the target
    if batch.get("run") == HEALTHY:  # Hypothesis also draws constants from the code
        batch["run"] = run
    text = json.dumps(batch)
    if draw(st.integers(1, 10)) == 10:  # a repeated key: JSON parsers use the last one
        key = draw(st.sampled_from(["rank", "run", "sequence", "events", "boot"]))
        value = draw(arbitrary_values.filter(lambda value: value != HEALTHY))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}"
    body = text.encode("utf-8", "surrogatepass")
    return run, body[: draw(st.sampled_from([*[len(body)] * 17, len(body) // 2, len(body) - 1, 1]))]


def headers() -> st.SearchStrategy[dict[str, str]]:
    """Headers that the service reads, with unexpected values."""
    arbitrary = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=40)
    ages = st.sampled_from(["0", "-1", "nan", "1e308", "9" * 300, "soon"])
    return st.fixed_dictionaries(
        {},
        optional={
            "foreshock-process-age": st.one_of(ages, arbitrary),
            "foreshock-replayed": st.sampled_from(["true", "TRUE", ""]),
            "content-encoding": st.sampled_from(["gzip", "identity", "br"]),
            "idempotency-key": arbitrary,
            "accept": arbitrary,
            "origin": st.sampled_from(["http://[", "null", "http://127.0.0.1:8765", "\u00e9"]),
            "x-forwarded-for": arbitrary,
            "range": st.sampled_from(["bytes=0-0", "bytes=9-1", "x"]),
        },
    )


@pytest.mark.full
@pytest.mark.promise("S5")
def test_mutated_batches_never_break_a_reader(fuzzed: Fuzzed, fuzz_settings: settings) -> None:
    statuses: Counter[int] = Counter()

    @fuzz_settings
    @given(wire_bodies(), headers(), st.sampled_from(READS), st.integers(1, 2 * MIDDLE))
    def case(named: tuple[str, bytes], extra: dict[str, str], path: str, step: int) -> None:
        run, body = named
        fuzzed.send("POST", "/v1/batches", loss_only(run, step))
        status = fuzzed.send("POST", "/v1/batches", body, **extra).status_code
        statuses[status] += 1
        fuzzed.send("GET", path.replace("{run}", run), None, **extra)
        fuzzed.send("GET", f"/v1/runs/{run}/curves?line=head.score_max&max_points=9", None)
        if statuses.total() % 10 == 0:
            for run_id, span in product(range(1, 7), range(1, 4)):
                fuzzed.loop.run_until_complete(build(fuzzed.app.state.store, run_id, span))
        if statuses.total() % 50 == 0:
            read_everything(fuzzed, run)

    case()
    assert {200, 422} <= statuses.keys() <= {200, 403, 415, 422}  # 403 for a foreign Origin
    assert statuses[200] > statuses.total() // 20, "too few batches reach the store"
    for run in (*(f"wire-{n}" for n in range(5)), "run-1"):
        read_everything(fuzzed, run)
    assert_healthy_run_unchanged(fuzzed)


@pytest.mark.promise("S5")
def test_random_methods_and_headers_never_break_a_route(fuzzed: Fuzzed, fuzz_settings: settings) -> None:
    methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"])

    @fuzz_settings
    @given(methods, st.sampled_from(READS), headers(), st.one_of(st.none(), st.binary(max_size=60)))
    def case(method: str, path: str, extra: dict[str, str], body: bytes | None) -> None:
        fuzzed.send(method, path.replace("{run}", "run-1"), body, **extra)

    case()
    assert_healthy_run_unchanged(fuzzed)
