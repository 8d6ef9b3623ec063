"""The wire format: messages round-trip bit for bit, and malformed ones are rejected with an explanation."""

import json
from binascii import a2b_base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from foreshock.contract.slots import MOST_SLOTS, identity_row
from foreshock.contract.wire import (
    Array,
    Batch,
    Command,
    Layer,
    Sample,
    Switched,
    Unknown,
    Verdict,
    head_refs,
    read_batch,
)


def sample(**fields: object) -> Sample:
    return Sample.model_validate({"step": 3, "since_step": 1, "unix_seconds": 0.0, **fields})


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=4), elements=st.floats(width=64)))
def test_array_round_trips_bit_for_bit(values: np.ndarray) -> None:
    arrived = Array.model_validate_json(Array.of(values).model_dump_json()).numpy()
    assert arrived.shape == values.shape
    assert arrived.tobytes() == values.tobytes()


@given(st.floats())
def test_loss_round_trips_as_valid_json_even_if_not_finite(loss: float) -> None:
    text = Batch(run="r", rank=0, boot="b", sequence=1, events=(sample(loss=loss),)).model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    event = Batch.model_validate_json(text).events[0]
    assert isinstance(event, Sample)
    assert event.loss is not None
    assert np.array(event.loss).tobytes() == np.array(loss).tobytes() or (np.isnan(loss) and np.isnan(event.loss))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": "<f8", "shape": [2], "data": "AAAA"}, "needs 16 bytes, got 3"),
        ({"dtype": "<f8", "shape": [1], "data": "AAAAAAAAAA!="}, "not base64"),
        ({"dtype": "<f2", "shape": [1], "data": "AAA="}, "Input should be"),
        ({"dtype": "<f8", "shape": [-1], "data": ""}, "greater than or equal to 0"),
    ],
)
def test_malformed_array_is_rejected(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Array.model_validate(fields)


_NEARLY_BASE_64 = st.text(alphabet="AAQQzz//++09=-_ \n\u00e9", min_size=6, max_size=6)


@given(_NEARLY_BASE_64.map(lambda six: six + "==") | st.tuples(_NEARLY_BASE_64, _NEARLY_BASE_64).map("AAQQ".join))
def test_array_accepts_the_same_base64_as_strict_a2b_base64(data: str) -> None:
    fields: dict[str, Any] = {"dtype": "<f4", "shape": [1 if len(data) == 8 else 3], "data": data}
    try:
        values = a2b_base64(data, strict_mode=True)
    except ValueError:
        with pytest.raises(ValidationError):
            Array.model_validate(fields)
    else:
        if len(values) == 4 * fields["shape"][0]:
            assert Array.model_validate(fields).raw == values


WIDTHS = r"must be int64 of shape \[heads, 13 to 64 slots\], got <i8"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        *(({"states": Array.of(np.zeros((2, slots), np.int64))}, WIDTHS) for slots in (3, MOST_SLOTS + 1)),
        (
            {"states": Array.of(np.stack([identity_row()] * 2)), "modes": Array.of(np.zeros(3, np.int32))},
            "different numbers of heads",
        ),
        ({"since_step": 5}, "since_step 5 is after step 3"),
    ],
)
def test_inconsistent_sample_is_rejected(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        sample(**fields)


@pytest.mark.parametrize("name", ["", "a b", "<b>", "x" * 129, "a\n", "é"])
def test_run_name_that_is_not_an_identifier_is_rejected(name: str) -> None:
    with pytest.raises(ValidationError, match="is not an identifier"):
        Batch(run=name, rank=0, boot="b", sequence=1, events=(sample(),))


def test_command_accepts_an_unknown_mode_name_but_not_a_malformed_one() -> None:
    assert Command(id="c", mode="faster_rows", reason="", issued_by="x").mode == "faster_rows"
    for name in ("", "Fast", "a b", "x" * 65, "a\n"):
        with pytest.raises(ValidationError, match="should match pattern"):
            Command(id="c", mode=name, reason="", issued_by="x")


def test_unknown_fields_are_ignored_and_unknown_events_keep_their_place() -> None:
    batch_fields = {"run": "r", "rank": 0, "boot": "b", "sequence": 1, "colour": "red"}
    moon = {"kind": "moon_phase", "phase": 0.5}
    known = {**json.loads(sample().model_dump_json()), "tide": {"height": [1, 2]}}
    batch = read_batch(json.dumps({**batch_fields, "events": [moon, known, moon]}).encode())
    assert [event.kind for event in batch.events] == ["unknown", "sample", "unknown"]
    assert batch.events[0] == Unknown(name="moon_phase")
    assert batch.events[1] == sample()


def test_unknown_cause_reads_as_other_and_a_malformed_cause_is_rejected() -> None:
    fields: dict[str, Any] = {
        "id": "v",
        "step": 1,
        "state": "raised",
        "severity": "warning",
        "signal": "s",
        "sentence": ".",
    }
    for name, read in (("entropy collapse", "other"), ("rounding", "rounding"), ("score growth", "score growth")):
        assert Verdict(**fields | {"cause": name}).cause == read
        corrected = Verdict(**fields | {"cause": "rounding", "corrected_from": name})
        assert corrected.corrected_from == read
    assert Verdict(**fields | {"cause": "rounding", "corrected_from": "not finite"}).corrected_from == "not finite"
    malformed: tuple[Any, ...] = (None, 5, "", "Rounding", "a\nb", ["rounding"])
    for cause in malformed:
        with pytest.raises(ValidationError, match="cause"):
            Verdict(**fields | {"cause": cause})
        if cause is not None:  # null means that the cause was never corrected
            with pytest.raises(ValidationError, match="corrected_from"):
                Verdict(**fields | {"cause": "rounding", "corrected_from": cause})


@pytest.mark.parametrize("events", ['[{"kind": 5}]', "[{}]", '[{"kind": "moon_phase"}, {"kind": "sample"}]', "[5]"])
def test_malformed_event_is_rejected_although_unknown_events_are_accepted(events: str) -> None:
    text = f'{{"run": "r", "rank": 0, "boot": "b", "sequence": 1, "events": {events}}}'
    with pytest.raises(ValidationError):
        read_batch(text.encode())


def test_switched_event_needs_one_mode_per_head() -> None:
    with pytest.raises(ValidationError, match="same length"):
        Switched(id="s", step=1, outcome="applied", heads=((0, 0),), before=(), after=("plain",), reason="")


def test_head_refs_follow_the_array_order() -> None:
    layers = [
        Layer(layer=4, name="a", heads=(2, 3), kv_heads=1, head_dim=8, served_by="kernel"),
        Layer(layer=5, name="b", heads=(0,), kv_heads=1, head_dim=8, served_by="kernel"),
    ]
    assert head_refs(layers) == [(4, 2), (4, 3), (5, 0)]
