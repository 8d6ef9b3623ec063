"""The Python client, against a real service in a separate process."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest
from tests.faults.hostile_server import closed_port
from tests.server.answering_agent import AnsweringAgent

from foreshock.client import Matrix, Service, ServiceError
from foreshock.server.testing import FakeRank, LiveService

STEPS = 7


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service with one run of three layers with heads 0, 2 and 5; the loss of step 3 is NaN."""
    with LiveService(tmp_path_factory.mktemp("service")) as running:
        rank = FakeRank(run="team-a/run-9", layers=3, heads=(0, 2, 5))
        samples = [rank.sample(step, loss=float("nan") if step == 3 else step / 4) for step in range(1, STEPS + 1)]
        running.post(rank.batch(rank.started(), *samples, rank.verdict(STEPS, layer=2, head=5)))
        yield running


@pytest.fixture
def service(live: LiveService) -> Iterator[Service]:
    with Service(live.url) as client:
        yield client


def test_runs_and_events_are_listed_and_filtered_by_kind(service: Service) -> None:
    assert [run["run"] for run in service.runs()] == ["team-a/run-9"]
    assert service.run("team-a/run-9")["warnings"][0]["sentence"] == "layer 2 head 5 drifts"
    assert [event["kind"] for event in service.events("team-a/run-9")] == ["incident", "verdict", "started"]
    assert [event["kind"] for event in service.events("team-a/run-9", "started")] == ["started"]


def test_user_without_a_login_name_can_order_and_edit_notes(
    service: Service, live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that runs under a bare user ID has no login name to look up."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    with AnsweringAgent(live, FakeRank(run="no-login-name")):
        order = service.switch("no-login-name", "row_corrected", reason="a test", dry_run=True)
        assert service.describe("no-login-name", notes="a test")["notes"] == "a test"
    assert order["issued_by"] == "user 3999999999 (local)"


def test_series_has_numpy_arrays_and_converts_to_pandas(service: Service) -> None:
    loss = service.series("team-a/run-9", "run.loss")
    assert loss.steps.tolist() == list(range(1, STEPS + 1))
    assert loss.last.dtype == np.float64
    assert np.isnan(loss.last[2])
    assert loss.last[[0, 1, 3]].tolist() == [0.25, 0.5, 1.0]
    frame = loss.frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame.index.name == "step"
    assert frame["last"].loc[6] == 1.5


def test_head_series_has_the_values_that_the_rank_sent(service: Service) -> None:
    rank = FakeRank(run="team-a/run-9", layers=3, heads=(0, 2, 5))
    one_head = service.series("team-a/run-9", "head.score_offset", layer=1, head=5)
    offsets = rank.words(6).view(np.float64)[5]  # layer 1, its third head
    assert one_head.worst_head is None
    assert any(np.isclose(one_head.last[5], value / 1000, rtol=1e-12) for value in offsets)
    worst_heads = service.series("team-a/run-9", "head.score_offset", layer=1)
    assert worst_heads.worst_head is not None
    assert set(worst_heads.worst_head) <= {0.0, 2.0, 5.0}


def test_matrix_finds_the_head_with_the_largest_value(service: Service) -> None:
    matrix = service.matrix("team-a/run-9", "head.score_offset", 5)
    assert matrix.values.shape == (3, 3)
    assert matrix.heads.tolist() == [0, 2, 5]
    layer, head, value = matrix.worst()
    assert abs(value) == np.abs(matrix.values).max()
    line = service.series("team-a/run-9", "head.score_offset", layer=layer, head=head)
    assert line.last[line.steps == 5] == value


def test_matrix_without_finite_values_has_no_worst_head() -> None:
    empty = Matrix("r", "m", "", 3, np.arange(1), np.arange(2), np.full((1, 2), np.nan))
    with pytest.raises(ValueError, match="run r has no finite m at step 3"):
        empty.worst()


def test_order_is_applied_and_undone(live: LiveService, service: Service) -> None:
    with AnsweringAgent(live, FakeRank(run="orders", boot="b2")), Service(live.url, who="tester") as tester:
        order = tester.switch("orders", "row_corrected", reason="a test", heads=[(1, 2), (0, 0)])
        done = service.wait(order, 60)
        (undo,) = (service.wait(order, 60) for order in service.undo(done["id"], reason="test done"))
    assert done["state"] == "applied"
    assert done["issued_by"].startswith("tester")
    assert [answer["after"] for answer in done["ranks"]] == [["row_corrected", "row_corrected"]]
    assert undo["undoes"] == done["id"]
    assert [order["id"] for order in service.commands("orders")] == [undo["id"], done["id"]]


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda s: s.run("nobody"), "There is no run 'nobody'"),
        (lambda s: s.series("team-a/run-9", "nonsense"), "nonsense"),
        (
            lambda s: s.series("team-a/run-9", "head.score_offset"),
            "pass a layer of run team-a/run-9; its layers: 0, 1, 2",
        ),
        (lambda s: s.series("team-a/run-9", "head.score_offset", layer=9), "has no layer 9; `foreshock runs team-a"),
        (lambda s: s.series("team-a/run-9", "run.loss", from_step=10, to_step=3), "from_step 10 is after to_step 3"),
        (lambda s: s.series("team-a/run-9", "head.score_offset", layer=1, head=3), "has no layer 1 head 3"),
        (lambda s: s.series("team-a/run-9", "head.score_offset", head=3), "head needs layer"),
        (lambda s: s.switch("team-a/run-9", "fast", reason="x"), "mode"),
    ],
)
def test_invalid_request_raises_service_error(service: Service, ask: object, sentence: str) -> None:
    assert callable(ask)
    with pytest.raises(ServiceError, match=sentence):
        ask(service)


@pytest.mark.parametrize(
    "run", ["other/../team-a/run-9", "team-a/run-9?", "team-a/run-9#2", "team-a/./run-9", "\x01\udcff"]
)
def test_special_characters_in_a_run_name_never_address_another_run(service: Service, run: str) -> None:
    requests = (
        lambda: service.run(run),
        lambda: service.delete(run, reason="a test"),
        lambda: service.switch(run, "row_corrected", reason="a test"),
        lambda: list(service.events(run)),
    )
    for ask in requests:
        with pytest.raises(ServiceError, match="There is no run"):
            ask()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8765", "ftp://127.0.0.1", "http://[::1", "http://", "http://127.0.0.1:port"]
)
def test_invalid_service_url_is_rejected(url: str) -> None:
    with pytest.raises(ServiceError, match=r"is not the address of a service; use http://HOST:PORT"):
        Service(url)


@pytest.mark.parametrize("token", ["two\nlines", "schlüssel", "nul\0"])
def test_invalid_token_is_rejected_without_printing_it(token: str) -> None:
    with pytest.raises(ServiceError, match="printable ASCII") as error:
        Service("http://127.0.0.1:8765", token)
    assert token not in str(error.value)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (httpx.Response(200, text="<html>"), "is not JSON; is it foreshock"),
        (httpx.Response(200, json=[1]), "answered with a list, not an object"),
        (httpx.Response(502, text="bad gateway"), "answered 502 without problem details"),
        (httpx.Response(401, json={"detail": "No token."}), "No token.\nset a token"),
    ],
)
def test_unexpected_response_raises_service_error(reply: httpx.Response, sentence: str) -> None:
    with (
        Service("http://elsewhere", transport=httpx.MockTransport(lambda request: reply)) as client,
        pytest.raises(ServiceError, match=sentence),
    ):
        client.run("r")


@pytest.mark.promise("A28")
def test_cookies_and_redirects_are_ignored_and_requests_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    heads = []

    def answered(request: httpx.Request) -> httpx.Response:
        heads.append(len(request.headers.raw))
        moved = {"set-cookie": "a=b", "location": "http://xn--a/"}
        return httpx.Response(302 if len(heads) == 3 else 200, headers=moved, json={"runs": [], "next_cursor": None})

    with Service("http://127.0.0.1:1", transport=httpx.MockTransport(answered)) as client:
        for _ in range(2):
            assert list(client.runs()) == []
        with pytest.raises(ServiceError, match="answered 302"):
            list(client.runs())
    assert len(set(heads)) == 1
    assert caplog.records == []


@pytest.mark.promise("A27")
@pytest.mark.parametrize(
    ("name", "value"), [("SSL_CERT_FILE", "/nope/ca.pem"), ("HTTPS_PROXY", "127.0.0.1:bad"), ("ALL_PROXY", "ftp://x")]
)
def test_invalid_proxy_or_certificate_variable_is_named_but_ignored_for_localhost(
    name: str, value: str, live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ServiceError, match=name):
        Service("https://service.example")
    with Service(live.url) as client:
        assert [run["run"] for run in client.runs()]
    monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", proxy := closed_port())
    with Service("http://service.example") as away, pytest.raises(ServiceError, match=rf"{proxy} \(HTTP_PROXY\)"):
        away.run("any")


def test_url_and_token_come_from_arguments_environment_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def answered(request: httpx.Request) -> httpx.Response:
        sent.append((str(request.url.copy_with(path="/")), request.headers["authorization"]))
        return httpx.Response(200, json={"run": "r"})

    def request_run(*given: str) -> None:
        with Service(*given, transport=httpx.MockTransport(answered)) as client:
            client.run("r")

    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("FORESHOCK_URL", "https://foreshock.example:99")
    monkeypatch.setenv("FORESHOCK_TOKEN_FILE", str(file))
    request_run()
    monkeypatch.setenv("FORESHOCK_TOKEN", "of-the-variable")
    request_run()
    request_run("http://elsewhere", "of-the-caller\n")
    assert sent == [
        ("https://foreshock.example:99/", "Bearer of-the-file"),
        ("https://foreshock.example:99/", "Bearer of-the-variable"),
        ("http://elsewhere/", "Bearer of-the-caller"),
    ]
    monkeypatch.delenv("FORESHOCK_TOKEN")
    file.unlink()
    with pytest.raises(ServiceError, match="cannot be read: FileNotFoundError"):
        Service("http://127.0.0.1:1")
