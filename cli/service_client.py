"""What the command line asks of the service."""

from types import TracebackType
from typing import Any, Final, Self

import httpx

from foreshock.cli.errors import CommandError

DEFAULT_URL: Final = "http://127.0.0.1:8765"


class ServiceClient:
    """Talks JSON to one service; every failure is a CommandError with a sentence."""

    def __init__(self, url: str, token: str | None, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=10.0, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """GET, decoded. Raises CommandError."""
        return self._send("GET", path, params={k: v for k, v in query.items() if v is not None})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST of JSON, decoded. Raises CommandError."""
        return self._send("POST", path, json=body)

    def _send(self, method: str, path: str, **options: Any) -> Any:
        try:
            reply = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise CommandError(
                f"no service answers at {self._url} ({type(error).__name__}); "
                "start one with `foreshock serve`, or name it with --url or FORESHOCK_URL"
            ) from None
        if reply.is_success:
            return reply.json()
        raise CommandError(_problem(reply))


def _problem(reply: httpx.Response) -> str:
    try:
        problem = reply.json()
        lines = [str(problem["detail"])]
        lines += [f"  {item['where']}: {item['message']}" for item in problem.get("errors", [])]
    except (ValueError, KeyError, TypeError):
        return f"{reply.request.url} answered {reply.status_code}, not in the service's words; is it foreshock?"
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        lines.append("give a token with --token or FORESHOCK_TOKEN")
    return "\n".join(lines)
