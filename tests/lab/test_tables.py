"""What a diagnosis says: one command for each layer that rounding drives, other words for another cause, no hole."""

import math
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreshock.cli.output import plain
from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.tables import Diagnosis, HeadCourse, advise, of_courses


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


def advice(*courses: HeadCourse) -> list[str]:
    return advise(Diagnosis(["a trace"], [(each.layer, each.head) for each in courses], list(courses)))


def test_a_head_that_rounding_drives_is_told_with_its_numbers_and_their_meaning() -> None:
    assert dict(of_courses([course(1, 2), course(1, 3, warned_step=None, cause=None)])) == {
        "warned at step": ["3000, rounding", "no warning"],
        "offset, nats (since half of the run)": ["+6.2 (+4.5)"] * 2,
        "largest |score|": ["80"] * 2,
        "norm of W_Q (over the median of others)": ["3.1 (2.0)"] * 2,
        "error of delta, one-sided (standard errors)": ["+0.031 (+5.2)"] * 2,
        "blocks of the run with that sign": ["90%"] * 2,
        "rows with several P = 1": ["10.0%"] * 2,
    }


@given(heads=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
def test_where_rounding_was_warned_about_one_command_switches_every_head(heads: set[tuple[int, int]]) -> None:
    [said] = advice(*(course(*head) for head in sorted(heads)))
    assert f"foreshock switch RUN --mode {DEFAULT_MITIGATION} --reason" in said
    assert "--head" not in said


def test_another_cause_gets_no_switch_and_is_told_where_to_look() -> None:
    [said] = advice(course(2, 1, cause="score growth", offset=0.1))
    assert "--mode" not in said
    assert said.startswith("layer 2 head 1: the cause is another than rounding. Look at the learning rate")


def test_a_head_that_was_never_warned_about_gets_none_however_far_it_is() -> None:
    assert advice(course(warned_step=None, cause=None, offset=99.0)) == [
        "Nothing: no head was warned about. Keep watching."
    ]


NUMBERS = (
    *("offset", "offset_change", "largest_score", "delta_one_sidedness", "delta_same_sign", "delta_z", "tied_rows"),
    *("query_norm", "query_norm_over_others"),
)


@given(told=st.fixed_dictionaries(dict.fromkeys(NUMBERS, st.none() | st.floats(-1e6, 1e6))))
def test_what_was_not_recorded_leaves_no_hole(told: dict[str, Any]) -> None:
    for _, [cell] in of_courses([course(**told)]):
        assert cell
        assert not re.search(r"None|nan|inf\b|\(\)|\( ", cell), cell


def test_numbers_that_are_none_are_null_in_json() -> None:
    assert plain({"offset": math.nan, "scores": [math.inf, 1.0], "head": 0}) == {
        "offset": None,
        "scores": [None, 1.0],
        "head": 0,
    }
