"""Plays a recorded run through the detectors of today, and into a service, by the messages that a live agent sends.

The verdicts are made anew; recorded switches are passed on as history, and no policy acts.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import httpx

from foreshock.contract import wire
from foreshock.lab.recording.trace import Trace, read_trace, readings
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors

_EVENTS_OF_A_BATCH = 64


def judged(trace: Trace, config: DetectorConfig | None = None) -> Iterator[wire.Event]:
    """The trace's events with today's risk and today's verdicts in place of the recorded ones."""
    detectors = Detectors(trace.heads, config)
    seen = readings(trace)
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


def replay(
    path: Path,
    trace: Trace | None = None,
    *,
    url: str | None = None,
    token: str | None = None,
    run: str | None = None,
    steps_per_second: float | None = None,
    on_event: Callable[[wire.Event], None] = lambda event: None,
) -> str:
    """Play the trace at `path`, which is `trace` where it has been read; the name of the run it became.

    Without `url` nothing is sent. steps_per_second: as fast as possible by default. Raises ValueError for a file that
    is no trace, and for a service that is not there or refuses.
    """
    trace = read_trace(path) if trace is None else trace
    name = run or f"replay-{path.name.removesuffix('.gz').removesuffix('.jsonl')}"
    events = _paced(judged(trace), steps_per_second, on_event)
    if url is None:
        for _ in events:
            pass
    else:
        _send(events, url, token, name, at_once=steps_per_second is not None)
    return name


def _paced(
    events: Iterable[wire.Event], steps_per_second: float | None, on_event: Callable[[wire.Event], None]
) -> Iterator[wire.Event]:
    """Stamp each event with the present time, which is when the page shall show it, and wait where a pace is asked."""
    began = time.monotonic()
    for event in events:
        if steps_per_second:
            time.sleep(max(0.0, began + event.step / steps_per_second - time.monotonic()))
        if isinstance(event, wire.Started | wire.Sample | wire.Finished):
            event = event.model_copy(update={"unix_seconds": time.time()})
        on_event(event)
        yield event


def _send(events: Iterable[wire.Event], url: str, token: str | None, run: str, *, at_once: bool) -> None:
    boot = f"{time.time_ns() // 1_000_000:013d}-0-{secrets.token_hex(4)}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=headers, timeout=30.0) as client:
        waiting, sequence = iter(events), 0
        while part := tuple(islice(waiting, 1 if at_once else _EVENTS_OF_A_BATCH)):
            sequence += 1
            _post(client, wire.Batch(run=run, rank=0, boot=boot, sequence=sequence, events=part), url)


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
        raise ValueError(f"no service answers at {url} ({type(error).__name__}); start one: foreshock serve") from None
    if reply.is_error:
        raise ValueError(f"the service at {url} refused the run: {reply.status_code} {reply.text[:300]}")
