"""A client of the service for notebooks, scripts and the command line.

    from foreshock.client import Service

    with Service("http://127.0.0.1:8765", token="...") as service:
        names = [run["run"] for run in service.runs()]
        offsets = service.series("my-run", "head.score_offset", layer=1, head=0)
        print(offsets.steps[-1], offsets.last[-1])           # numpy; offsets.frame() is a pandas DataFrame
        service.switch("my-run", "row_corrected", reason="the offset of layer 1 head 0 grows", heads=[(1, 0)])

Responses other than series and matrices are the dictionaries of the HTTP API, including fields of newer services.
"""

import getpass
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx
import numpy as np
import numpy.typing as npt

from foreshock.contract.environment import as_header_carries, names_a_host, token_in
from foreshock.contract.route import transport_to, unanswered

DEFAULT_URL: Final = "http://127.0.0.1:8765"
SETTLED: Final = frozenset({"applied", "refused", "expired", "dry_run", "rejected", "cancelled"})
"""States of a command that no longer change."""

_DELETION_SECONDS: Final = 600.0
"""A long run is deleted in small transactions, so that other batches can be stored meanwhile."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class ServiceError(Exception):
    """The service cannot be reached, or refused the request; the message is meant for people."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one head, one layer or the whole run by step: P points, arrays of shape [P].

    A point covers the steps since the previous point: `low` and `high` are the smallest and largest value in these
    steps, `last` is the value at the last one, all in `unit`: seconds, bytes, steps, ratio, or empty for other numbers,
    such as scores and offsets (in nats). NaN means that nothing was counted. docs/metrics.md explains each metric.
    """

    run: str
    metric: str
    unit: str
    layer: int | None
    head: int | None
    """None for a metric of the whole run, and if `worst_head` is given."""
    steps: Integers
    low: Floats
    high: Floats
    last: Floats
    worst_head: Floats | None
    """The number of the layer's worst head at each point; None if one head or the whole run was requested."""

    def frame(self) -> Any:
        """Return a pandas DataFrame with the step as its index. Raises ModuleNotFoundError without pandas."""
        import pandas

        columns = {"low": self.low, "high": self.high, "last": self.last}
        if self.worst_head is not None:
            columns["worst_head"] = self.worst_head
        return pandas.DataFrame(columns, index=pandas.Index(self.steps, name="step"))


@dataclass(frozen=True, slots=True)
class Matrix:
    """One metric of every head at one step: `values` has the shape [layers, heads], NaN where there is no head.

    `layers` and `heads` are the numbers of its rows and columns, `unit` is as in Series; `step` is None if nothing was
    counted yet.
    """

    run: str
    metric: str
    unit: str
    step: int | None
    layers: Integers
    heads: Integers
    values: Floats

    def worst(self) -> tuple[int, int, float]:
        """Return (layer, head, value) of the largest absolute value. Raises ValueError if no value is finite."""
        if not np.isfinite(self.values).any():
            raise ValueError(f"run {self.run} has no finite {self.metric} at step {self.step}")
        row, column = np.unravel_index(np.nanargmax(np.abs(self.values)), self.values.shape)
        return int(self.layers[row]), int(self.heads[column]), float(self.values[row, column])


class Service:
    """A connection to one service. Every method raises ServiceError if the service is unreachable or refuses.

    url: its address; by default FORESHOCK_URL, else http://127.0.0.1:8765.
    token: a token with the scope that the call needs (`read`; `act` for orders and notes; `delete`). By default that of
    FORESHOCK_TOKEN, else that in the file named by FORESHOCK_TOKEN_FILE.
    who: the name of the person, by default this user; the audit trail records it with the reason of each action.
    timeout_seconds: time limit of a request; a deletion may take ten minutes.
    transport: an httpx transport, to reach a service other than by the network.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        who: str | None = None,
        timeout_seconds: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url: Final = url or os.environ.get("FORESHOCK_URL") or DEFAULT_URL
        try:
            token = given_token(token or os.environ.get("FORESHOCK_TOKEN"), os.environ.get("FORESHOCK_TOKEN_FILE"))
        except ValueError as error:
            raise ServiceError(str(error)) from None
        self._who = who
        self._http = http_client(self.url, token, timeout_seconds, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ---- runs and their data --------------------------------------------------------------------------------------

    def runs(self) -> Iterator[dict[str, Any]]:
        """Iterate over every run, the most recent first."""
        return self._pages("/v1/runs", "runs")

    def run(self, run: str) -> dict[str, Any]:
        """Return one run at its last step: its layers, the modes of its heads, its active warnings in words."""
        return self.get(path_of("runs", run))

    def incidents(self, run: str) -> list[dict[str, Any]]:
        """Return the incidents of a run, the most urgent first; heads by the steps left."""
        return list(self.get(path_of("runs", run, "incidents"))["incidents"])

    def resume_plan(self, run: str) -> dict[str, Any]:
        """Return the checkpoint to resume a failed run from, the lines that load it, and all known checkpoints."""
        return self.get(path_of("runs", run, "resume-plan"))

    def acknowledge(self, run: str, incident: str, *, reason: str) -> dict[str, Any]:
        """Acknowledge an incident; return it in its new state."""
        return self.post(path_of("runs", run, "acknowledge"), {"incident": incident, **self._said(reason)})

    def describe(
        self,
        run: str,
        *,
        display_name: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
    ) -> dict[str, Any]:
        """Give a run a display name, tags and notes. None leaves a field unchanged; an empty value removes it.

        Agents, alerts and addresses still use the run's name. Returns the same as `run`.
        """
        said = {"display_name": display_name, "tags": None if tags is None else list(tags), "notes": notes}
        given = {key: value for key, value in said.items() if value is not None}
        return self._send("PATCH", path_of("runs", run), json={"who": self._who or _user(), **given})

    def delete(self, run: str, *, reason: str) -> None:
        """Delete a run that no longer trains, with all its data. Needs a token with the scope `delete`.

        This is final.
        """
        self._answer("DELETE", path_of("runs", run), params=self._said(reason), timeout=_DELETION_SECONDS)

    def events(self, run: str, *kinds: str) -> Iterator[dict[str, Any]]:
        """Iterate over the events of a run, newest first; `kinds` such as verdict or switched, by default all."""
        return self._pages(path_of("runs", run, "events"), "events", kind=list(kinds) or None)

    def series(
        self,
        run: str,
        metric: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 1000,
    ) -> Series:
        """Return one metric by step; `metric` is its name in the catalogue (`run.loss`, `head.score_offset`, ...).

        A per-head metric needs `layer`; without `head` each point shows the layer's worst head.
        """
        if head is not None and layer is None:
            raise ServiceError("head needs layer: heads are numbered within their layer")
        if from_step is not None and to_step is not None and from_step > to_step:
            raise ServiceError(f"from_step {from_step} is after to_step {to_step}; give the lower one first")
        name = ":".join(str(part) for part in (metric, layer, head) if part is not None)
        reply = self.get(
            path_of("runs", run, "curves"), line=name, from_step=from_step, to_step=to_step, max_points=max_points
        )
        if reply["unknown"]:
            named = f"layer {layer}" + ("" if head is None else f" head {head}")
            raise ServiceError(f"run {run} has no {named}; `foreshock runs {run}` lists them")
        if len(reply["lines"]) != 1:
            has = ", ".join(str(line["layer"]) for line in reply["lines"]) or "none yet"
            raise ServiceError(f"{metric} is a per-head metric: pass a layer of run {run}; its layers: {has}")
        [line] = reply["lines"]
        worst = line.get("worst_head")
        return Series(
            run=reply["run"],
            metric=line["metric"],
            unit=line["unit"],
            layer=line["layer"],
            head=line["head"],
            steps=np.asarray(line["steps"], np.int64),
            low=_floats(line["low"]),
            high=_floats(line["high"]),
            last=_floats(line["last"]),
            worst_head=None if worst is None else _floats(worst),
        )

    def matrix(self, run: str, metric: str, step: int | None = None) -> Matrix:
        """Return one metric of every head, at `step` or just before it; by default at the last step."""
        path, query = path_of("runs", run, "matrix"), {"metric": metric, "max_steps": 0}
        reply = part = self.get(path, step=step, **query)
        rows = [(part["heads"], row) for row in part["values"]]
        layers = list(part["layers"])
        while (onward := part.get("next_layer")) is not None:  # a very wide run needs several requests
            part = self.get(path, step=reply["step"], from_layer=onward, **query)
            rows += [(part["heads"], row) for row in part["values"]]
            layers += part["layers"]
        heads = sorted({head for known, _ in rows for head in known})
        values = np.full((len(layers), len(heads)), np.nan)
        for i, (known, row) in enumerate(rows):
            values[i, np.searchsorted(heads, known)] = _floats(row)
        at = np.asarray(layers, np.int64), np.asarray(heads, np.int64)
        return Matrix(reply["run"], reply["metric"], reply["unit"], reply["step"], *at, values)

    # ---- orders ---------------------------------------------------------------------------------------------------

    def commands(self, run: str) -> list[dict[str, Any]]:
        """Return the newest commands of a run, newest first."""
        return list(self.get(path_of("runs", run, "commands"))["commands"])

    def command(self, command: str) -> dict[str, Any]:
        """Return one command with the answers of the ranks."""
        return self.get(path_of("commands", command))

    def switch(
        self,
        run: str,
        mode: str,
        *,
        reason: str,
        heads: Sequence[tuple[int, int]] | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Switch `heads`, pairs of (layer, head), to `mode`; by default all heads of the run.

        Returns the stored order; pass it to `wait`. With `dry_run` the agents only report what they would change.
        """
        return self.order(run, "switch", reason=reason, heads=heads, mode=mode, dry_run=dry_run)

    def order(self, run: str, action: str, *, reason: str, **more: Any) -> dict[str, Any]:
        """Send an order of any kind; `more`: further fields of the API's request. Returns the stored order."""
        return self.post(path_of("runs", run, "commands"), {"action": action, **more, **self._said(reason)})

    def switches(self, run: str, mode: str) -> dict[str, Any]:
        """Return the orders that add `mode` to every head, keeping each head's present modes: one for each of
        `changes`, and the heads that stay `unchanged`."""
        return self.get(path_of("runs", run, "switches"), mode=mode)

    def undo(self, command: str, *, reason: str, dry_run: bool = False) -> list[dict[str, Any]]:
        """Revert the modes that `command` changed; return the new commands."""
        order = {"dry_run": dry_run, **self._said(reason)}
        return list(self.post(path_of("commands", command, "undo"), order)["commands"])

    def approve(self, command: str, *, reason: str) -> dict[str, Any]:
        """Approve a proposed switch."""
        return self.post(path_of("commands", command, "approve"), self._said(reason))

    def reject(self, command: str, *, reason: str) -> dict[str, Any]:
        """Reject a proposed switch."""
        return self.post(path_of("commands", command, "reject"), self._said(reason))

    def cancel(self, command: str, *, reason: str) -> dict[str, Any]:
        """Cancel a pending or delivered command: no further rank receives it. Finished switches stay."""
        return self.post(path_of("commands", command, "cancel"), self._said(reason))

    def wait(self, command: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
        """Wait until all agents have answered, at most `seconds`; return the command in its new state."""
        deadline = time.monotonic() + seconds
        while command["state"] not in SETTLED and time.monotonic() < deadline:
            time.sleep(0.2)
            command = self.command(command["id"])
        return command

    def audit_export(self, after: int = 0) -> bytes:
        """Return the next rows of the audit trail after row `after`, as JSON lines, oldest first; empty at the end."""
        return self._answer("GET", "/v1/audit/export", params={"after": after}).content

    # ---- other requests of the HTTP API ---------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Send a GET request and decode the JSON response; query parameters that are None are left out."""
        return self._send("GET", path, params={k: v for k, v in query.items() if v is not None})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request with a JSON body and decode the JSON response."""
        return self._send("POST", path, json=body)

    def _said(self, reason: str) -> dict[str, Any]:
        return {"who": self._who or _user(), "reason": reason}

    def _pages(self, path: str, field: str, **query: Any) -> Iterator[dict[str, Any]]:
        cursor = None
        while True:
            page = self.get(path, cursor=cursor, **query)
            yield from page[field]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **options)
        try:
            reply = answer.json()
        except ValueError:
            raise ServiceError(f"the response of {answer.request.url} is not JSON; is it foreshock?") from None
        if not isinstance(reply, dict):
            raise ServiceError(f"{self.url} answered with a {type(reply).__name__}, not an object; is it foreshock?")
        return reply

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceError(
                f"no service answers at {unanswered(self.url, error)}; "
                "start one with `foreshock serve`, or set its address with --url or FORESHOCK_URL"
            ) from None
        if not reply.is_success:
            raise ServiceError(_problem(reply))
        return reply


def path_of(*parts: str) -> str:
    """Return a path under /v1. Names are quoted, so that a slash, dots or a question mark in them do no harm."""
    return "/v1/" + "/".join(quote(part, safe="", errors="replace") for part in parts)


def given_token(token: str | None, file: str | Path | None) -> str | None:
    """Return `token`, else the token in `file`. Raises ValueError if the file cannot be used."""
    return token or (token_in(Path(file)).get_secret_value() if file else None)


class _Connections(httpx.Client):
    """An httpx client that stores no cookies, follows no redirects, and logs no requests."""

    def __init__(self, transport: httpx.BaseTransport, **options: Any) -> None:
        super().__init__(transport=transport, trust_env=False, **options)
        self._direct = transport

    def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        reply = self._direct.handle_request(request)
        reply.request = request
        try:
            reply.read()
        finally:
            reply.close()
        return reply


def http_client(
    url: str, token: str | None, timeout_seconds: float, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """Return an httpx client for the service at `url`.

    Raises ServiceError for an invalid address or token, and for an unusable proxy or certificate of the environment.
    """
    if not names_a_host(url):
        raise ServiceError(f"{url} is not the address of a service; use http://HOST:PORT or https://HOST")
    try:
        headers = {"Authorization": f"Bearer {as_header_carries(token)}"} if token else {}
        transport = transport or transport_to(url)
    except (ValueError, OSError) as error:
        raise ServiceError(str(error)) from None
    return _Connections(transport, base_url=url, headers=headers, timeout=timeout_seconds)


def _user() -> str:
    """Return the name of this user, or the user id if there is no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return f"user {os.getuid()}"


def _floats(values: Sequence[Any]) -> Floats:
    # null means that nothing was counted; a non-finite number is encoded as a string
    return np.asarray([np.nan if value is None else float(value) for value in values], np.float64)


def _problem(reply: httpx.Response) -> str:
    try:
        problem = reply.json()
        lines = [str(problem["detail"])]
        lines += [f"  {item['where']}: {item['message']}" for item in problem.get("errors", [])]
    except (ValueError, KeyError, TypeError):
        return f"{reply.request.url} answered {reply.status_code} without problem details; is it foreshock?"
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        lines.append("set a token with --token-file, FORESHOCK_TOKEN or --token")
    return "\n".join(lines)
