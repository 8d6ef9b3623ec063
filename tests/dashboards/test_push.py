"""`push` to a fake Grafana that replies as Grafana's documentation says, over real HTTP on loopback."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foreshock.dashboards.boards import boards
from foreshock.dashboards.push import GrafanaError, push
from foreshock.dashboards.rules import Links

TOKEN = "glsa_stand-in"
PROMETHEUS = "http://prometheus:9090"
Reply = tuple[int, Any]


class FakeGrafana(ThreadingHTTPServer):
    """Grafana's routes that `push` uses, with the replies and errors that Grafana 13 documents."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders: dict[str, Any] = {}
        self.datasources: dict[str, Any] = {}
        self.dashboards: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: Any, headers: Any) -> Reply:
        """Status and body (None: empty) of the reply to a request."""
        if path == "/api/health":
            return 200, {"database": "ok", "version": "13.2.0", "commit": "unknown"}
        if headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key", "messageId": "api-key.invalid"}
        routes = (
            (r"/api/folders(?:/([^/]+))?", self._folder),
            (r"/api/datasources/uid/([^/]+)", self._datasource),
            (r"/api/datasources", self._new_datasource),
            (r"/api/dashboards/db", self._dashboard),
        )
        for pattern, route in routes:
            if match := re.fullmatch(pattern, path):
                return route(method, body, *match.groups())
        return 404, {"message": "Not found"}

    def _folder(self, method: str, body: Any, uid: str | None) -> Reply:
        if method == "POST":
            if body["uid"] in self.folders:
                return 409, {"message": "a folder with that UID already exists"}
            self.folders[body["uid"]] = {**body, "version": 1}
            return 200, self.folders[body["uid"]]
        if uid not in self.folders:
            return 404, {"message": "folder not found", "status": "not-found"}
        if method == "PUT":
            folder = self.folders[uid]
            if not body.get("overwrite") and body.get("version") != folder["version"]:
                return 412, {"message": "the folder has been changed by someone else", "status": "version-mismatch"}
            folder.update(title=body["title"], version=folder["version"] + 1)
        return 200, self.folders[uid]

    def _new_datasource(self, method: str, body: Any) -> Reply:
        if any(source["name"] == body["name"] for source in self.datasources.values()):
            return 409, {"message": "data source with the same name already exists"}
        self.datasources[body["uid"]] = body
        return 200, {"datasource": body, "id": 1, "message": "Datasource added", "name": body["name"]}

    def _datasource(self, method: str, body: Any, uid: str) -> Reply:
        if uid not in self.datasources:
            return 404, {"message": "Data source not found"}
        if method == "PUT":
            if self.datasources[uid].get("readOnly"):
                return 403, {"message": "Cannot update read-only data source"}
            self.datasources[uid] = body
            return 200, {"datasource": body, "message": "Datasource updated"}
        return 200, self.datasources[uid]

    def _dashboard(self, method: str, body: Any) -> Reply:
        board = body["dashboard"]
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        existing = self.dashboards.get(board["uid"])
        if existing is not None and existing.get("provisioned"):
            return 400, {"message": "Cannot save provisioned dashboard"}
        if existing is not None and not body.get("overwrite") and board.get("version") != existing["version"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = 1 if existing is None else existing["version"] + 1
        self.dashboards[board["uid"]] = {**board, "version": version, "folderUid": body["folderUid"]}
        return 200, {"uid": board["uid"], "status": "success", "version": version, "url": f"/d/{board['uid']}/x"}


class _Handler(BaseHTTPRequestHandler):
    server: FakeGrafana

    def _reply(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.calls.append((self.command, self.path))
        status, answer = self.server.answer(self.command, self.path, body, self.headers)
        text = answer.encode() if isinstance(answer, str) else b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = _reply  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def push_all(grafana: FakeGrafana, **options: str) -> list[str]:
    return list(push(grafana.url, TOKEN, Links(), **options))


def test_push_creates_everything_and_a_second_push_changes_only_versions(grafana: FakeGrafana) -> None:
    assert push_all(grafana, prometheus_url=PROMETHEUS)[0] == f"Grafana 13.2.0 at {grafana.url}"
    assert grafana.folders["foreshock"]["title"] == "foreshock"
    assert grafana.datasources["foreshock-prometheus"]["url"] == PROMETHEUS
    assert set(grafana.dashboards) == {board["uid"] for board in boards(Links()).values()}
    assert {board["folderUid"] for board in grafana.dashboards.values()} == {"foreshock"}
    first = json.loads(json.dumps(grafana.dashboards))
    push_all(grafana, prometheus_url=PROMETHEUS)
    assert grafana.dashboards == {uid: {**board, "version": 2} for uid, board in first.items()}
    assert len(grafana.folders) == len(grafana.datasources) == 1
    numeric = re.compile(r"/\d+(/|$)|/id/|/name/")
    assert not [path for _, path in grafana.calls if numeric.search(path)], "numbers differ between installations"
    assert all(board["id"] is None for board in grafana.dashboards.values())


def test_push_overwrites_edits_but_not_provisioned_objects(grafana: FakeGrafana) -> None:
    push_all(grafana)
    grafana.dashboards["foreshock-run"].update(version=41, panels=[])
    grafana.folders["foreshock"] = {"uid": "foreshock", "title": "renamed", "version": 7}
    grafana.datasources["foreshock-prometheus"] = {"name": "foreshock", "url": "http://other:9090", "readOnly": True}
    lines = push_all(grafana, prometheus_url=PROMETHEUS)
    assert grafana.dashboards["foreshock-run"]["version"] == 42
    assert grafana.dashboards["foreshock-run"]["panels"]
    assert grafana.folders["foreshock"] == {"uid": "foreshock", "title": "foreshock", "version": 8}
    assert "data source foreshock-prometheus is provisioned by file, so it was not changed" in lines
    assert grafana.datasources["foreshock-prometheus"]["url"] == "http://other:9090"
    grafana.dashboards["foreshock-overview"] = {"provisioned": True, "version": 1}
    with pytest.raises(GrafanaError, match="Cannot save provisioned dashboard"):
        push_all(grafana)


def test_push_uses_the_path_prefix_and_reports_a_wrong_token(grafana: FakeGrafana) -> None:
    with pytest.raises(GrafanaError):
        list(push(f"{grafana.url}/some/prefix/", TOKEN, Links()))
    assert grafana.calls == [("GET", "/some/prefix/api/health")]
    with pytest.raises(GrafanaError, match="refused: Unauthorized"):
        list(push(grafana.url, "wrong", Links()))
    assert not grafana.folders


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((200, "<html>Sign in</html>"), "is not JSON; is it a Grafana"),
        ((200, {"status": "UP"}), "not as a Grafana does"),
        ((200, None), "is not JSON; is it a Grafana"),
        ((502, "Bad Gateway"), "refused: Server Error 502: Bad Gateway"),
        ((503, {"error": "starting"}), "refused: Server Error 503"),
    ],
)
def test_unexpected_reply_or_unreachable_server_is_reported(
    grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, answer: Reply, sentence: str
) -> None:
    monkeypatch.setattr(grafana, "answer", lambda *_: answer)
    with pytest.raises(GrafanaError, match=sentence):
        push_all(grafana)
    with pytest.raises(GrafanaError, match="cannot be reached"):
        list(push("http://127.0.0.1:1", TOKEN, Links()))


@pytest.mark.parametrize("url", ["", "grafana:3000", "ftp://grafana", "http://", "http://admin:admin@grafana"])
def test_invalid_address_or_empty_token_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a Grafana"):
        list(push(url, TOKEN, Links()))
    with pytest.raises(ValueError, match="no token was given"):
        list(push("http://grafana", "", Links()))


@pytest.mark.promise("A27")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PROXY", "http://127.0.0.1:9"),
        ("HTTP_PROXY", "127.0.0.1:bad"),
        ("ALL_PROXY", "socks9://127.0.0.1:9"),
        ("NO_PROXY", "[::1]"),
        ("REQUESTS_CA_BUNDLE", "/nope/ca.pem"),
        ("SSL_CERT_FILE", "/nope/ca.pem"),
    ],
)
def test_local_grafana_is_reached_despite_proxy_and_certificate_variables(
    name: str, value: str, grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert push_all(grafana)
    if name != "NO_PROXY":
        with pytest.raises(GrafanaError, match=name):
            list(push(f"http{'s' * (not name.endswith('PROXY'))}://grafana.example", TOKEN, Links()))
