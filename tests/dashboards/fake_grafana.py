"""A stand-in for Grafana's API, as strict as Grafana is, and a client of it."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
