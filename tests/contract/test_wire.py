"""What is sent is what arrives, to the bit; what is malformed is refused with a sentence."""

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
def test_an_array_arrives_with_the_same_bits(values: np.ndarray) -> None:
    arrived = Array.model_validate_json(Array.of(values).model_dump_json()).numpy()
    assert arrived.shape == values.shape
    assert arrived.tobytes() == values.tobytes()


@given(st.floats())
def test_a_scalar_arrives_also_when_it_is_not_finite_and_the_json_stays_valid(loss: float) -> None:
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
def test_a_malformed_array_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Array.model_validate(fields)


_NEARLY_BASE_64 = st.text(alphabet="AAQQzz//++09=-_ \n\u00e9", min_size=6, max_size=6)


@given(_NEARLY_BASE_64.map(lambda six: six + "==") | st.tuples(_NEARLY_BASE_64, _NEARLY_BASE_64).map("AAQQ".join))
def test_an_array_takes_the_base_64_that_the_standard_library_takes_when_it_is_strict(data: str) -> None:
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
def test_a_sample_that_contradicts_itself_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        sample(**fields)


@pytest.mark.parametrize("name", ["", "a b", "<b>", "x" * 129, "a\n", "é"])
def test_a_name_that_is_not_an_identifier_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="is not an identifier"):
        Batch(run=name, rank=0, boot="b", sequence=1, events=(sample(),))


def test_an_order_may_name_a_mode_that_its_reader_does_not_know_but_no_text_that_is_no_name() -> None:
    assert Command(id="c", mode="faster_rows", reason="", issued_by="x").mode == "faster_rows"
    for name in ("", "Fast", "a b", "x" * 65, "a\n"):
        with pytest.raises(ValidationError, match="should match pattern"):
            Command(id="c", mode=name, reason="", issued_by="x")


def test_fields_and_kinds_of_events_that_are_unknown_are_skipped_each_event_in_its_place() -> None:
    said = {"run": "r", "rank": 0, "boot": "b", "sequence": 1, "colour": "red"}
    moon = {"kind": "moon_phase", "phase": 0.5}
    known = {**json.loads(sample().model_dump_json()), "tide": {"height": [1, 2]}}
    batch = read_batch(json.dumps({**said, "events": [moon, known, moon]}).encode())
    assert [event.kind for event in batch.events] == ["unknown", "sample", "unknown"]
    assert batch.events[0] == Unknown(name="moon_phase")
    assert batch.events[1] == sample()


def test_a_cause_that_only_a_newer_agent_knows_reads_as_other_and_what_is_no_cause_is_refused() -> None:
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
    none: tuple[Any, ...] = (None, 5, "", "Rounding", "a\nb", ["rounding"])
    for cause in none:
        with pytest.raises(ValidationError, match="cause"):
            Verdict(**fields | {"cause": cause})
        if cause is not None:  # null: it is the first cause
            with pytest.raises(ValidationError, match="corrected_from"):
                Verdict(**fields | {"cause": "rounding", "corrected_from": cause})


@pytest.mark.parametrize("events", ['[{"kind": 5}]', "[{}]", '[{"kind": "moon_phase"}, {"kind": "sample"}]', "[5]"])
def test_what_is_malformed_is_refused_beside_what_is_unknown(events: str) -> None:
    text = f'{{"run": "r", "rank": 0, "boot": "b", "sequence": 1, "events": {events}}}'
    with pytest.raises(ValidationError):
        read_batch(text.encode())


def test_a_switch_names_one_mode_for_each_head() -> None:
    with pytest.raises(ValidationError, match="same length"):
        Switched(id="s", step=1, outcome="applied", heads=((0, 0),), before=(), after=("plain",), reason="")


def test_head_refs_follow_the_order_of_the_arrays() -> None:
    layers = [
        Layer(layer=4, name="a", heads=(2, 3), kv_heads=1, head_dim=8, served_by="kernel"),
        Layer(layer=5, name="b", heads=(0,), kv_heads=1, head_dim=8, served_by="kernel"),
    ]
    assert head_refs(layers) == [(4, 2), (4, 3), (5, 0)]
