"""A message that is built later, in another thread, says the same as one built at once; a fault in it costs one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faults.hostile_server import HostileServer, acknowledge, hostile_server
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT
from foreshock.monitor import attach
from foreshock.monitor.sampling.collector import Counted, SampleDraft

QUICK: dict[str, Any] = {"run": "a-run", "sample_every_steps": 1, "sample_every_seconds": 0.0, "quiet": True}


def draft(**changes: Any) -> SampleDraft:
    norm = np.array([1.5, math.nan, 2.5, math.inf], dtype=np.float32)
    fields: dict[str, Any] = {
        "step": 5,
        "since_step": 2,
        "words": np.arange(4 * SLOT_COUNT, dtype=np.int64).reshape(4, SLOT_COUNT) - 7,
        "modes": np.array([0, 1, 2, 0], dtype=np.int32),
        "losses": np.array([1.0, math.inf, 3.0]),
        "grad_norms": np.array([0.5, math.nan]),
        "norms": {"query_norm": norm, "key_norm": norm, "query_key_norm": norm},
        "learning_rate": 1e-3,
        "step_seconds": 0.1,
        "agent_seconds": 1e-5,
    }
    return SampleDraft(Counted(**{**fields, **changes}), np.array([0.0, 0.25, 1.0, 0.5]))


@pytest.mark.parametrize("norms", [True, False])
def test_a_message_built_without_validation_passes_it_and_is_exact_to_the_bit(norms: bool) -> None:
    given = draft() if norms else draft(norms={})
    received = wire.Sample.model_validate_json(given.build().model_dump_json())
    words = received.words()
    assert words is not None
    np.testing.assert_array_equal(words, given.counted.words)
    assert received.modes == wire.Array.of(given.counted.modes)
    assert received.risk == wire.Array.of(np.array([0.0, 0.25, 1.0, 0.5], dtype=np.float32))
    for name in ("query_norm", "key_norm", "query_key_norm"):
        expected = wire.Array.of(given.counted.norms[name]) if norms else None
        assert getattr(received, name) == expected
    assert (received.loss, received.loss_max, received.loss_nonfinite_steps) == (math.inf, math.inf, 1)
    assert received.grad_norm is not None
    assert math.isnan(received.grad_norm)


def test_the_queue_counts_a_draft_as_large_as_its_message() -> None:
    built = draft().build()
    arrays = (built.states, built.modes, built.risk, built.query_norm, built.key_norm, built.query_key_norm)
    assert draft().nbytes == pytest.approx(sum(len(a.data) for a in arrays if a is not None), rel=0.05)


def test_a_run_of_a_moment_is_sent_whole(tmp_path: Path) -> None:
    for attempt in range(5):
        with hostile_server(acknowledge) as server:
            agent = attach(tiny_gpt(), **QUICK, url=server.url, spool_directory=tmp_path)
            agent.step(float(attempt))
            agent.close()
            assert [event["loss"] for event in server.events("sample")] == [float(attempt)]


def events_at_the_service(server: HostileServer, spool: Path, *, listening: bool) -> list[dict[str, Any]]:
    model = tiny_gpt()
    agent = attach(model, **QUICK, url=server.url, spool_directory=spool, norms_every_steps=2, strict=True)
    if listening:
        agent.subscribe(Listener())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        agent.step(train_step(model, optimizer, step), learning_rate=0.1)
    agent.close()
    timed = {"unix_seconds", "step_seconds", "agent_seconds"}
    return [{k: v for k, v in event.items() if k not in timed} for event in server.events("sample")]


def test_the_service_gets_the_same_whether_or_not_somebody_listens(tmp_path: Path) -> None:
    with hostile_server(acknowledge) as first, hostile_server(acknowledge) as second:
        alone = events_at_the_service(first, tmp_path, listening=False)
        listened = events_at_the_service(second, tmp_path, listening=True)
    assert [event["step"] for event in alone] == [1, 2, 3, 4]
    assert alone == listened


@pytest.mark.promise("A15")
def test_a_sample_that_cannot_be_built_is_counted_and_costs_no_other_event(tmp_path: Path) -> None:
    with hostile_server(acknowledge) as server:
        agent = attach(tiny_gpt(), **QUICK, url=server.url, spool_directory=tmp_path)
        agent.step(1.0)
        assert agent._outbox.sender is not None
        agent._outbox.sender.put(draft(modes=np.zeros(3, dtype=np.int32)))
        agent.step(2.0)
        agent.close()
        assert [event["step"] for event in server.events("sample")] == [1, 2]
        assert server.events("finished")
        assert agent._outbox.sender.dropped == {"unbuilt": 1}
