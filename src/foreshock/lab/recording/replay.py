"""Plays a recorded run through the detectors of today, and into a service, by the messages that a live agent sends.

The verdicts are made anew; recorded switches are passed on as history, and no policy acts.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from heapq import merge

import httpx

from foreshock.client import http_client
from foreshock.contract import wire
from foreshock.contract.route import unanswered
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors

_EVENTS_OF_A_BATCH = 64


def judged(trace: Trace, config: DetectorConfig | None = None) -> Iterator[wire.Event]:
    """The trace's events with today's risk and today's verdicts in place of the recorded ones, as an agent has them."""
    head_dims = {layer.layer: layer.head_dim for layer in trace.started.layers}
    detectors, seen = Detectors(trace.heads, config, head_dims), readings(trace)
    yield trace.started
    for event in trace.events:
        if isinstance(event, wire.Sample) and event.states is not None:
            verdicts = detectors.update(next(seen))
            yield event.model_copy(update={"risk": wire.Array.of(detectors.risk.astype("<f4"))})
            yield from verdicts
        elif isinstance(event, wire.Sample | wire.Switched):
            yield event
    last = trace.samples[-1]
    yield wire.Finished(step=last.step, unix_seconds=last.unix_seconds, status="completed")


def verdicts(trace: Trace, config: DetectorConfig | None = None) -> list[wire.Verdict]:
    """What the detectors say of a recorded run."""
    return [event for event in judged(trace, config) if isinstance(event, wire.Verdict)]


def run_of(trace: Trace) -> str:
    """The run that a trace becomes which is given no name."""
    return f"replay-{trace.name}"


def replay(
    trace: Trace,
    *,
    url: str | None = None,
    token: str | None = None,
    run: str | None = None,
    steps_per_second: float | None = None,
    on_event: Callable[[wire.Event], None] = lambda event: None,
) -> str:
    """Play a trace; the name of the run that it became. See `replay_together`."""
    name = run or run_of(trace)
    replay_together(
        {name: trace},
        url=url,
        token=token,
        steps_per_second=steps_per_second,
        on_event=lambda _, event: on_event(event),
    )
    return name


def replay_together(
    traces: Mapping[str, Trace],
    *,
    url: str | None = None,
    token: str | None = None,
    steps_per_second: float | None = None,
    on_event: Callable[[str, wire.Event], None] = lambda run, event: None,
) -> None:
    """Play traces side by side, step by step, each as the run of its name.

    Without `url` nothing is sent. steps_per_second: as fast as possible by default. Raises ValueError for a service
    that is not there or refuses.
    """
    events = merge(*(_named(run, trace) for run, trace in traces.items()), key=lambda each: each[1].step)
    with ExitStack() as stack:
        senders: dict[str, _Sender] = {}
        if url is not None:
            client = stack.enter_context(http_client(url, token, 30.0))
            senders = {run: _Sender(client, url, run) for run in traces}
        for part in _due(events, steps_per_second or math.inf, on_event):
            for run, sender in senders.items():
                sender.send(tuple(event for name, event in part if name == run))


def _named(run: str, trace: Trace) -> Iterator[tuple[str, wire.Event]]:
    return ((run, event) for event in judged(trace))


def _due(
    events: Iterable[tuple[str, wire.Event]], steps_per_second: float, on_event: Callable[[str, wire.Event], None]
) -> Iterator[list[tuple[str, wire.Event]]]:
    """The events in parts, each as soon as its steps have come, with the present time."""
    part: list[tuple[str, wire.Event]] = []
    began = time.monotonic()
    for run, event in events:
        due = began + event.step / steps_per_second
        if part and (len(part) >= _EVENTS_OF_A_BATCH or due > time.monotonic()):
            yield part
            part = []
        time.sleep(max(0.0, due - time.monotonic()))
        if isinstance(event, wire.Started | wire.Sample | wire.Finished):
            event = event.model_copy(update={"unix_seconds": time.time()})
        on_event(run, event)
        part.append((run, event))
    if part:
        yield part


class _Sender:
    """Sends one run to a service, as its agent would."""

    def __init__(self, client: httpx.Client, url: str, run: str) -> None:
        self._client, self._url, self._run, self._sequence = client, url, run, 0
        self._boot = f"{time.time_ns() // 1_000_000:013d}-0-{secrets.token_hex(4)}"

    def send(self, events: tuple[wire.Event, ...]) -> None:
        """One batch, if there is anything in it."""
        if events:
            self._sequence += 1
            _post(
                self._client,
                wire.Batch(run=self._run, rank=0, boot=self._boot, sequence=self._sequence, events=events),
                self._url,
            )


def _post(client: httpx.Client, batch: wire.Batch, url: str) -> None:
    try:
        for _ in range(50):
            reply = client.post(
                "/v1/batches", content=batch.model_dump_json(), headers={"Content-Type": "application/json"}
            )
            if reply.status_code not in (429, 503):
                break
            time.sleep(float(reply.headers.get("Retry-After", 1)))
    except httpx.HTTPError as error:
        raise ValueError(f"no service answers at {unanswered(url, error)}; start one: foreshock serve") from None
    if reply.is_error:
        raise ValueError(f"the service at {url} refused the run: {reply.status_code} {reply.text[:300]}")
