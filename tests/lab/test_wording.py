"""What a diagnosis says: one command for each layer that rounding drives, other words for another cause, no hole."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.wording import Diagnosis, HeadCourse, Trial, explain, lines

QUESTIONS = ["Where", "In delta?", "Carried by", "Directions", "Rounding", "What to do"]


def course(layer: int = 0, head: int = 0, **told: Any) -> HeadCourse:
    """A head of which everything was recorded, unless told otherwise."""
    known: dict[str, Any] = {
        "warned_step": 3000,
        "cause": "rounding",
        "offset": 6.25,
        "offset_change": 4.5,
        "largest_score": 80.4,
        "delta_one_sidedness": 0.031,
        "delta_same_sign": 0.9,
        "delta_z": 5.2,
        "tied_rows": 0.1,
        "query_norm": 3.14,
        "query_norm_over_others": 2.0,
    }
    return HeadCourse(layer=layer, head=head, **(known | told))


def said_of(*courses: HeadCourse, trials: tuple[Trial | str, ...] = ()) -> Diagnosis:
    named = [(each.layer, each.head) for each in courses]
    diagnosis = Diagnosis(sources=["a trace"], named=named, courses=list(courses), trials=list(trials))
    explain(diagnosis)
    return diagnosis


def test_a_head_that_rounding_drives_is_told_with_its_numbers_and_their_meaning() -> None:
    diagnosis = said_of(course(1, 2))
    assert [title for title, _ in lines(diagnosis)] == QUESTIONS
    assert diagnosis.findings["where"] == [
        "layer 1 head 2: warned at step 3000, cause rounding; offset +6.2 nats (+4.5 since half of the run); "
        "largest |score| 80; W_Q norm 3.1, 2.0x the median of the others."
    ]
    [delta] = diagnosis.findings["delta"]
    assert "is one-signed, +0.031 of its size on average, +5.2 standard errors, 90% of the run" in delta


@given(heads=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
def test_each_layer_gets_one_command_that_names_its_heads_and_no_others(heads: set[tuple[int, int]]) -> None:
    advice = said_of(*(course(*head, offset=0.5) for head in sorted(heads))).advice
    told = set()
    for sentence in advice:
        [layer] = re.findall(r"--layer (\d+)", sentence)
        told |= {(int(layer), int(head)) for head in re.findall(r"--head (\d+)", sentence)}
        assert f"--mode {DEFAULT_MITIGATION}" in sentence
    assert told == heads
    assert len(advice) == len({layer for layer, _ in heads})


def test_another_cause_gets_no_switch_and_is_told_where_to_look() -> None:
    [advice] = said_of(course(2, 1, cause="score growth", offset=0.1)).advice
    assert "--mode" not in advice
    assert advice.startswith("layer 2 head 1: the cause is another than rounding. Look at the learning rate")


def test_a_head_that_was_never_warned_about_gets_none_however_far_it_is() -> None:
    assert said_of(course(warned_step=None, cause=None, offset=99.0)).advice == [
        "Nothing: no head was warned about. Keep watching."
    ]


@pytest.mark.parametrize(("offset", "drifted"), [(2.9, False), (3.0, True), (-40.0, True), (None, False)])
def test_what_has_grown_is_taken_out_only_where_it_has_and_what_was_tried_is_told(
    offset: float | None, drifted: bool
) -> None:
    trial = Trial(origin="FILE", added_nats={"layer 0 key head 0": 5.0}, loss_before=1.23456, loss_after=1.23455)
    advice = said_of(course(offset=offset), trials=(trial, "it has no key bias")).advice
    assert any("remove_offset" in sentence for sentence in advice) == drifted
    tried = "Tried at FILE: the bias of the keys adds +5.0 nats to layer 0 key head 0; without it the loss of a batch"
    assert any(sentence.startswith(tried) for sentence in advice) == drifted
    assert ("Not so here: it has no key bias." in advice) == drifted


NUMBERS = (
    *("offset", "offset_change", "largest_score", "delta_one_sidedness", "delta_same_sign", "delta_z", "tied_rows"),
    *("query_norm", "query_norm_over_others"),
)


@given(told=st.fixed_dictionaries(dict.fromkeys(NUMBERS, st.none() | st.floats(-1e6, 1e6))))
def test_what_was_not_recorded_leaves_no_hole(told: dict[str, Any]) -> None:
    diagnosis = said_of(course(**told))
    for _, sentences in lines(diagnosis):
        assert sentences
        for sentence in sentences:
            assert not re.search(r"None|nan|inf\b|  |\( ", sentence), sentence
            assert sentence.endswith(".")


def test_without_tensors_the_questions_that_need_them_say_how_to_get_them() -> None:
    findings = said_of(course()).findings
    for question in ("carriers", "directions", "arithmetic"):
        [sentence] = findings[question]
        assert sentence.startswith("needs tensors: add a checkpoint (foreshock lab run --checkpoint FILE)")


def test_numbers_that_are_none_are_null_in_json() -> None:
    text = said_of(course(offset=math.nan, largest_score=math.inf)).as_json()
    [told] = json.loads(text)["courses"]
    assert (told["offset"], told["largest_score"], told["head"]) == (None, None, 0)
