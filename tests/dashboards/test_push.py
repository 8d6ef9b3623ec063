"""`push` against a stand-in for Grafana that answers as Grafana's documents say, over real HTTP on loopback."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foreshock.dashboards.boards import boards
from foreshock.dashboards.grafana_client import GrafanaClient, GrafanaError
from foreshock.dashboards.push import push
from foreshock.dashboards.rules import Links, alerts

TOKEN = "glsa_stand-in"
PROMETHEUS = "http://prometheus:9090"

Reply = tuple[int, Any]


class FakeGrafana(ThreadingHTTPServer):
    """Grafana's routes that `push` uses, with the answers and the refusals of Grafana 13 as it documents them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders: dict[str, Any] = {}
        self.datasources: dict[str, Any] = {}
        self.dashboards: dict[str, Any] = {}
        self.rule_groups: dict[tuple[str, str], Any] = {}
        self.calls: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: Any, headers: Any) -> Reply:
        """Status and body (None: no body at all) of a call."""
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
        if match := re.fullmatch(r"/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", path):
            return self._rule_group(method, body, headers, match[1], match[2])
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
        old = self.dashboards.get(board["uid"])
        if old is not None and old.get("provisioned"):
            return 400, {"message": "Cannot save provisioned dashboard"}
        if old is not None and not body.get("overwrite") and board.get("version") != old["version"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = 1 if old is None else old["version"] + 1
        self.dashboards[board["uid"]] = {**board, "version": version, "folderUid": body["folderUid"]}
        return 200, {"uid": board["uid"], "status": "success", "version": version, "url": f"/d/{board['uid']}/x"}

    def _rule_group(self, method: str, body: Any, headers: Any, folder: str, group: str) -> Reply:
        if method == "DELETE":
            if self.rule_groups.pop((folder, group), None) is None:
                return 404, {"message": "alert rule group not found"}
            return 204, None
        for rule in body["rules"]:
            missing = {"title", "condition", "data", "noDataState", "execErrState", "for", "folderUID"} - set(rule)
            if missing or rule["ruleGroup"] != group:
                return 400, {"message": f"invalid alert rule: {missing}"}
        if not isinstance(body["interval"], int) or body["interval"] % 10:
            return 400, {"message": "interval must be divisible by 10"}
        self.rule_groups[folder, group] = {**body, "editable": headers["X-Disable-Provenance"] == "true"}
        return 200, body


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
        """Quiet."""


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(grafana: FakeGrafana) -> Iterator[GrafanaClient]:
    made = GrafanaClient(grafana.url, TOKEN)
    yield made
    made.close()


# What push does


def test_push_makes_folder_data_source_and_boards(grafana: FakeGrafana, client: GrafanaClient) -> None:
    said = list(push(client, Links(), prometheus_url=PROMETHEUS))
    assert said[0] == f"Grafana 13.2.0 at {grafana.url}"
    assert grafana.folders["foreshock"]["title"] == "foreshock"
    assert grafana.datasources["foreshock-prometheus"]["url"] == PROMETHEUS
    assert set(grafana.dashboards) == {board["uid"] for board in boards(Links()).values()}
    assert {board["folderUid"] for board in grafana.dashboards.values()} == {"foreshock"}
    assert not grafana.rule_groups, "alert rules are pushed only when asked for"


def test_push_again_changes_nothing_but_the_version(grafana: FakeGrafana, client: GrafanaClient) -> None:
    list(push(client, Links(), prometheus_url=PROMETHEUS))
    first = json.loads(json.dumps(grafana.dashboards))
    list(push(client, Links(), prometheus_url=PROMETHEUS))
    for uid, board in grafana.dashboards.items():
        assert board == {**first[uid], "version": 2}
    assert len(grafana.folders) == len(grafana.datasources) == 1


def test_push_wins_over_a_board_that_someone_has_changed_since(grafana: FakeGrafana, client: GrafanaClient) -> None:
    list(push(client, Links()))
    grafana.dashboards["foreshock-run"].update(version=41, panels=[])
    list(push(client, Links()))
    assert grafana.dashboards["foreshock-run"]["version"] == 42
    assert grafana.dashboards["foreshock-run"]["panels"]


def test_a_renamed_folder_gets_its_name_back_whatever_its_version(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.folders["foreshock"] = {"uid": "foreshock", "title": "renamed", "version": 7}
    list(push(client, Links()))
    assert grafana.folders["foreshock"] == {"uid": "foreshock", "title": "foreshock", "version": 8}


def test_a_data_source_provisioned_by_file_is_left_alone(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.datasources["foreshock-prometheus"] = {"name": "foreshock", "url": "http://other:9090", "readOnly": True}
    said = list(push(client, Links(), prometheus_url=PROMETHEUS))
    assert "data source foreshock-prometheus is provisioned by file; left as it is" in said
    assert grafana.datasources["foreshock-prometheus"]["url"] == "http://other:9090"


def test_alert_rules_are_pushed_editable_and_removed_on_request(grafana: FakeGrafana, client: GrafanaClient) -> None:
    list(push(client, Links(), alert_rules="push"))
    group = grafana.rule_groups["foreshock", "foreshock"]
    assert [rule["title"] for rule in group["rules"]] == [alert.name for _, alert in alerts()]
    assert group["editable"]
    assert list(push(client, Links(), alert_rules="remove"))[-1] == "alert rules removed"  # the answer is an empty 204
    assert not grafana.rule_groups
    assert list(push(client, Links(), alert_rules="remove"))[-1] == "no alert rules to remove"


def test_push_never_uses_a_numeric_id(grafana: FakeGrafana, client: GrafanaClient) -> None:
    for _ in range(2):
        list(push(client, Links(), prometheus_url=PROMETHEUS, alert_rules="push"))
    assert not [path for _, path in grafana.calls if re.search(r"/\d+(/|$)|/id/|/name/", path)]
    assert all(board["id"] is None for board in grafana.dashboards.values())


def test_a_grafana_behind_a_path_is_reached(grafana: FakeGrafana) -> None:
    client = GrafanaClient(f"{grafana.url}/some/prefix/", TOKEN)
    with pytest.raises(GrafanaError):
        client.version()
    client.close()
    assert grafana.calls == [("GET", "/some/prefix/api/health")]


# What push says when it cannot


def test_a_wrong_token_is_a_sentence(grafana: FakeGrafana) -> None:
    client = GrafanaClient(grafana.url, "wrong")
    with pytest.raises(GrafanaError, match="refused: Unauthorized") as caught:
        list(push(client, Links()))
    client.close()
    assert caught.value.status == 401
    assert not grafana.folders


def test_a_board_provisioned_by_file_is_refused_in_grafanas_words(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.dashboards["foreshock-overview"] = {"provisioned": True, "version": 1}
    with pytest.raises(GrafanaError, match="Cannot save provisioned dashboard"):
        list(push(client, Links()))


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
