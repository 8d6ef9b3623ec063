"""Replay recorded runs through the current detectors, and optionally send them to a service as a live agent does.

The replay computes the verdicts again. It passes recorded switches on as history, and does not apply a policy.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from heapq import merge
from itertools import repeat

import httpx

from foreshock.client import http_client
from foreshock.contract import wire
from foreshock.contract.route import unanswered
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors

_EVENTS_OF_A_BATCH = 64


def judged(trace: Trace, config: DetectorConfig | None = None) -> Iterator[wire.Event]:
    """Yield the trace's events with the risk and verdicts of the current detectors in place of the recorded ones."""
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
    """Return the verdicts of the current detectors on a recorded run."""
    return [event for event in judged(trace, config) if isinstance(event, wire.Verdict)]


def replay(
    traces: Mapping[str, Trace],
    *,
    url: str | None = None,
    token: str | None = None,
    steps_per_second: float | None = None,
    on_event: Callable[[str, wire.Event], None] = lambda run, event: None,
) -> None:
    """Replay traces concurrently, in the order of their steps; the keys of `traces` are the names of the runs.

    Events are sent only if `url` is given. steps_per_second: as fast as possible by default. Raises ValueError if the
    service is unreachable or rejects a batch.
    """
    events = merge(*(zip(repeat(run), judged(trace)) for run, trace in traces.items()), key=lambda each: each[1].step)
    boots = {run: f"{time.time_ns() // 1_000_000:013d}-0-{secrets.token_hex(4)}" for run in traces}
    sequences = dict.fromkeys(traces, 0)
    with ExitStack() as stack:
        client = None if url is None else stack.enter_context(http_client(url, token, 30.0))
        for part in _due(events, steps_per_second or math.inf, on_event):
            for run, boot in boots.items():
                own = tuple(event for name, event in part if name == run)
                if client is not None and own:
                    sequences[run] += 1
                    _post(client, wire.Batch(run=run, rank=0, boot=boot, sequence=sequences[run], events=own))


def _due(
    events: Iterable[tuple[str, wire.Event]], steps_per_second: float, on_event: Callable[[str, wire.Event], None]
) -> Iterator[list[tuple[str, wire.Event]]]:
    """Yield the events in batches when their steps are due, with the current time."""
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


def _post(client: httpx.Client, batch: wire.Batch) -> None:
    url = str(client.base_url).rstrip("/")
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
