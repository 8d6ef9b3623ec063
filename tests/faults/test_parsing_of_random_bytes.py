"""Parsers of external input: random bytes give a message or a ValidationError."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from foreshock.contract import wire
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport.sender import Sender
from foreshock.monitor.transport.spool import MemoryStore

COMMAND = b'{"id":"c1","mode":"exact_delta","reason":"asked","issued_by":"ada","heads":[[0,1]]}'
ACK = b'{"boot":"boot-1","acknowledged":1,"commands":[' + COMMAND + b"]}"


@pytest.fixture
def fuzz(sizes: Any, record_property: Callable[[str, Any], None]) -> settings:
    """Hypothesis settings with the tier's number of cases."""
    cases = sizes("reader_cases", quick=300, long=50_000)
    record_property("cases", cases)
    return sizes.fuzzed(cases)  # type: ignore[no-any-return]


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with some replaced, removed or inserted; sometimes entirely random bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    body = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        position = draw(st.integers(0, len(body) - 1))
        piece = draw(
            st.sampled_from([b"", b"\x00", b"\xff", b"9" * 30, b"null", b"[[[[", b'"', b"-1", b"1e999", b"{}"])
        )
        body[position : position + draw(st.integers(0, 8))] = piece
        if not body:
            break
    return bytes(body)


@pytest.mark.promise("A4")
def test_random_acknowledgement_bytes_never_raise_or_acknowledge_wrongly(fuzz: settings) -> None:
    config = AgentConfig(run="a-run", url="http://127.0.0.1:9", spool_directory=None)
    sender = Sender(config, run="a-run", boot="boot-1", health=lambda: (0, {}))
    store = MemoryStore("boot-1", 2**20)
    store.append(1, b"{}")

    @fuzz
    @given(mutated(ACK))
    def case(body: bytes) -> None:
        acknowledged = sender._acknowledged(store, 1, body)
        commands = sender.commands()
        assert acknowledged or not commands
        if acknowledged:
            assert wire.Ack.model_validate_json(body).acknowledged == 1

    case()


@pytest.mark.promise("S5")
def test_random_batch_bytes_are_parsed_or_rejected_with_a_validation_error(fuzz: settings) -> None:
    sample = wire.Sample(step=1, since_step=0, unix_seconds=0.0, loss=1.0)
    batch = wire.Batch(run="a-run", rank=0, boot="b", sequence=1, events=(sample,)).model_dump_json().encode()

    @fuzz
    @given(mutated(batch))
    def case(body: bytes) -> None:
        try:
            parsed = wire.Batch.model_validate_json(body)
        except ValidationError:
            return
        assert wire.Batch.model_validate_json(parsed.model_dump_json()) == parsed or "NaN" in parsed.model_dump_json()

    case()
