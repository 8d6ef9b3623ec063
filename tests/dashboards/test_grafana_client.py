"""The calls to Grafana: what cannot be answered is a sentence."""

import pytest
from tests.dashboards.fake_grafana import TOKEN, FakeGrafana, Reply

from foreshock.dashboards.grafana_client import GrafanaClient, GrafanaError
from foreshock.dashboards.push import push
from foreshock.dashboards.rules import Links


def test_a_grafana_behind_a_path_is_reached(grafana: FakeGrafana) -> None:
    client = GrafanaClient(f"{grafana.url}/some/prefix/", TOKEN)
    with pytest.raises(GrafanaError):
        client.version()
    client.close()
    assert grafana.calls == [("GET", "/some/prefix/api/health")]


def test_a_wrong_token_is_a_sentence(grafana: FakeGrafana) -> None:
    client = GrafanaClient(grafana.url, "wrong")
    with pytest.raises(GrafanaError, match="refused: Unauthorized") as caught:
        list(push(client, Links()))
    client.close()
    assert caught.value.status == 401
    assert not grafana.folders


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((200, "<html>Sign in</html>"), "something else than JSON; is it a Grafana"),
        ((200, {"status": "UP"}), "not as a Grafana does"),
        ((200, None), "not as a Grafana does"),
        ((502, "Bad Gateway"), "refused: Server Error 502: Bad Gateway"),
        ((503, {"error": "starting"}), "refused: Server Error 503"),
    ],
)
def test_an_answer_that_is_not_grafanas_is_a_sentence(
    grafana: FakeGrafana, client: GrafanaClient, monkeypatch: pytest.MonkeyPatch, answer: Reply, sentence: str
) -> None:
    monkeypatch.setattr(grafana, "answer", lambda *_: answer)
    with pytest.raises(GrafanaError, match=sentence):
        client.version()


def test_a_grafana_that_is_down_is_a_sentence() -> None:
    client = GrafanaClient("http://127.0.0.1:1", TOKEN)
    with pytest.raises(GrafanaError, match="cannot be reached"):
        list(push(client, Links()))
    client.close()


@pytest.mark.parametrize("url", ["", "grafana:3000", "ftp://grafana", "http://", "http://admin:admin@grafana"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a Grafana"):
        GrafanaClient(url, TOKEN)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no token was given"):
        GrafanaClient("http://grafana", "")
