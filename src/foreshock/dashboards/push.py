"""Loads the boards into a Grafana that is not provisioned by file, with the library grafana-api 1.0.3.

That library has been unmaintained since 2020 and is used only here. Its methods for data sources use numeric ids, which
Grafana 13 rejects, so these calls use the paths directly.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaException
from grafana_api.grafana_face import GrafanaFace

from foreshock.contract.route import RouteError, route_to
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import DATASOURCE_UID, FOLDER, SCRAPE_INTERVAL_SECONDS, Links

_TIMEOUT_SECONDS: Final = 10.0
_CERTIFICATES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


class GrafanaError(Exception):
    """Grafana rejected a call or could not be reached; the message is meant for people."""


def push(url: str, token: str, links: Links, *, prometheus_url: str | None = None) -> Iterator[str]:
    """Create or update the folder, the data source and the boards; yield a sentence for each. It can be repeated.

    token: of a service account with the role Editor. With `prometheus_url` the data source is created too, which needs
    the role Admin; without it the boards use the data source with uid foreshock-prometheus, or the one that the viewer
    chooses. Raises ValueError for an invalid address or token, GrafanaError if a call fails.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.username is not None:
        raise ValueError(f"{url!r} is not the address of a Grafana; write it like https://grafana.example/prefix")
    if not token:
        raise ValueError("no token was given; create a service account in Grafana and pass its token")
    prefix = f"{parts.path.strip('/')}/".lstrip("/")
    where = {"host": parts.netloc, "protocol": parts.scheme, "url_path_prefix": prefix}
    named = next((name for name in _CERTIFICATES if os.environ.get(name)), "")
    try:
        route = route_to(url)
    except RouteError as error:
        raise GrafanaError(str(error)) from None
    face = GrafanaFace(auth=token, timeout=_TIMEOUT_SECONDS, verify=os.environ.get(named) or True, **where)
    face.api.s.trust_env = False  # requests would use a proxy on loopback too, and the passwords of ~/.netrc
    if route.proxy is not None:
        user, password = route.proxy.auth or (None, None)
        face.api.s.proxies = {parts.scheme: str(route.proxy.url.copy_with(username=user, password=password))}
    try:
        yield from _push(face, url.rstrip("/"), links, prometheus_url)
    except GrafanaException as error:
        raise GrafanaError(f"{url} refused: {error}") from error
    except requests.exceptions.JSONDecodeError as error:
        raise GrafanaError(f"the response of {url} is not JSON; is it a Grafana?") from error
    except requests.RequestException as error:
        raise GrafanaError(f"{url}{route} cannot be reached: {error}") from error
    except OSError as error:
        raise GrafanaError(f"{named or 'a file'} cannot be used for TLS: {error}") from error
    finally:
        face.api.s.close()


def _push(face: GrafanaFace, url: str, links: Links, prometheus_url: str | None) -> Iterator[str]:
    health = face.api.GET("/health")
    if not isinstance(health, dict) or "database" not in health:
        raise GrafanaError(f"{url} answers, but not as a Grafana does")
    yield f"Grafana {health.get('version', 'unknown')} at {url}"
    folder = _found(lambda: face.folder.get_folder(FOLDER))
    if folder is None:
        face.folder.create_folder(FOLDER, FOLDER)
    elif folder["title"] != FOLDER:  # without `overwrite` Grafana wants the folder's version
        face.folder.update_folder(FOLDER, FOLDER, overwrite=True)
    yield f"folder {FOLDER}"
    if prometheus_url is not None:
        yield f"data source {DATASOURCE_UID}" + _datasource(face, prometheus_url)
    for board in boards(links).values():  # without numeric ids, which differ between installations
        body = {"dashboard": {**board, "id": None}, "folderUid": FOLDER, "overwrite": True}
        saved = face.dashboard.update_dashboard({**body, "message": "foreshock dashboards push"})
        yield f"board {url}/d/{saved['uid']}"


def _datasource(face: GrafanaFace, prometheus_url: str) -> str:
    """Create or update the data source; return a clause if it cannot be changed."""
    path = f"/datasources/uid/{DATASOURCE_UID}"
    same = {"uid": DATASOURCE_UID, "name": "foreshock", "type": "prometheus", "access": "proxy", "url": prometheus_url}
    wanted = {**same, "jsonData": {"httpMethod": "POST", "timeInterval": f"{SCRAPE_INTERVAL_SECONDS}s"}}
    found = _found(lambda: face.api.GET(path))
    if found is None:
        face.datasource.create_datasource(wanted)
    elif found.get("readOnly"):
        return " is provisioned by file, so it was not changed"
    else:
        face.api.PUT(path, json=wanted)
    return ""


def _found(call: Callable[[], Any]) -> Any:
    """Return the response, or None if Grafana answers 404."""
    try:
        return call()
    except GrafanaException as error:
        if error.status_code == requests.codes.not_found:
            return None
        raise
