"""The few calls to Grafana that `push` needs, over the library grafana-api 1.0.3.

That library has been unmaintained since 2020. Its generic caller (`api.GET` and so on) is sound and carries every
route; its typed methods are used where they still fit a current Grafana. What is known to be wrong with it is mended
here and nowhere else, so that another client can take its place:

- It reads every answer as JSON, so an empty one (204 No Content) raises after the call has succeeded.
- Its data source methods use numeric ids, which Grafana 13 refuses; uids go through the generic caller.
"""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, urlsplit

import requests
from grafana_api.grafana_api import GrafanaException
from grafana_api.grafana_face import GrafanaFace

Json = dict[str, Any]

_NOT_FOUND: Final = 404


class GrafanaError(Exception):
    """Grafana refused a call or could not be reached. `status` is 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class GrafanaClient:
    """One Grafana, reached with a service account's token (role Editor; Admin to add the data source)."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.username is not None:
            raise ValueError(f"{url!r} is not the address of a Grafana; write it like https://grafana.example/prefix")
        if not token:
            raise ValueError("no token was given; make a service account in Grafana and give its token")
        self.url = url.rstrip("/")
        prefix = parts.path.strip("/")
        self._face = GrafanaFace(
            auth=token,
            host=parts.netloc,
            protocol=parts.scheme,
            url_path_prefix=f"{prefix}/" if prefix else "",
            timeout=timeout_seconds,
        )

    def close(self) -> None:
        """Close the connections."""
        self._face.api.s.close()

    def version(self) -> str:
        """Grafana's version. Raises GrafanaError where nothing answers or something else than Grafana does."""
        health = self._call(lambda: self._face.api.GET("/health"))
        if not isinstance(health, dict) or "database" not in health:
            raise GrafanaError(f"{self.url} answers, but not as a Grafana does")
        return str(health.get("version", "unknown"))

    def upsert_folder(self, uid: str, title: str) -> None:
        """Make the folder, or give it this title."""
        folder = self._find(lambda: self._face.folder.get_folder(quote(uid, safe="")))
        if folder is None:
            self._call(lambda: self._face.folder.create_folder(title, uid))
        elif folder["title"] != title:
            # Without `overwrite` Grafana wants the folder's version and answers 412 when it has moved on.
            self._call(lambda: self._face.folder.update_folder(uid, title, overwrite=True))

    def ensure_datasource(self, definition: Json) -> bool:
        """Add the data source or bring it up to date; False when it was provisioned by file and may not be changed."""
        path = f"/datasources/uid/{quote(definition['uid'], safe='')}"
        found = self._find(lambda: self._face.api.GET(path))
        if found is None:
            self._call(lambda: self._face.datasource.create_datasource(definition))
        elif found.get("readOnly"):
            return False
        else:
            self._call(lambda: self._face.api.PUT(path, json=definition))
        return True

    def upsert_dashboard(self, board: Json, folder_uid: str, message: str) -> str:
        """Save the board over whatever has its uid; returns its address."""
        # `overwrite` because a board from a file has no version, and Grafana answers 412 to an old one; a null id
        # because numbers differ between installations and the uid decides.
        body = {"dashboard": {**board, "id": None}, "folderUid": folder_uid, "overwrite": True, "message": message}
        saved = self._call(lambda: self._face.dashboard.update_dashboard(body))
        return f"{self.url}/d/{saved['uid']}"

    def _find(self, call: Callable[[], Any]) -> Any:
        """The answer, or None where Grafana says that there is no such thing."""
        try:
            return self._call(call)
        except GrafanaError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def _call(self, call: Callable[[], Any]) -> Any:
        """The answer as data, None where it is empty. Every fault becomes a GrafanaError with a sentence."""
        try:
            return call()
        except GrafanaException as error:
            raise GrafanaError(f"{self.url} refused: {error}", error.status_code) from error
        except requests.exceptions.JSONDecodeError as error:
            if not error.doc.strip():
                return None
            raise GrafanaError(f"{self.url} answered with something else than JSON; is it a Grafana?") from error
        except requests.RequestException as error:
            raise GrafanaError(f"{self.url} cannot be reached: {error}") from error
