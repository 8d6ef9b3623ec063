"""Recordings packed by columns: what is read is what was written."""

import gzip
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.short_traces import TRACES

from foreshock.lab.recording.packed import pack, read_header, read_lines, text_of, unpack

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: float(f"{value:.4g}")),
    st.sampled_from([0, 0.0, -0.0, 1.0, 1, 2**62, -(2**63), 5e-324, 1.7976931348623157e308, 123456789012345678.0]),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=4), st.lists(NUMBERS, max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1, max_size=3), inner)),
    max_leaves=12,
)
LINES = st.lists(st.dictionaries(st.sampled_from(["kind", "loss", "slots", "step"]), VALUES), min_size=1, max_size=6)


@pytest.mark.full
@given(LINES)
def test_lines_that_were_packed_read_back_text_for_text(lines: list[dict[str, Any]]) -> None:
    assert text_of(unpack(pack(lines))) == text_of(lines)  # unlike ==, text tells 1 from 1.0


def test_lists_of_every_length_come_back_to_their_own_line_and_place() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "a", "x": [1, 2.0], "y": {"x": [3, 4]}, "z": [[5, 6], [7, 8, 9]]},
        {"kind": "b", "x": [10, 11], "z": [[], [12.5]]},
        {"kind": "a", "x": [13, 1e-300], "y": {"x": [15, 16, 17]}, "z": [[18, "NaN"], [19, 20]]},
    ]
    assert unpack(pack(lines)) == lines


def test_a_line_with_the_key_that_marks_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="empty key at a/inner; give lines whose keys have names"):
        pack([{"kind": "a", "inner": {"": 1}}])


@pytest.mark.parametrize("cut", [10, 200, -10])
def test_a_packed_recording_that_is_cut_short_is_refused_with_a_sentence(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "run.trace.xz"
    path.write_bytes(pack([{"kind": "sample", "x": [step + 0.5, step * 3]} for step in range(300)])[:cut])
    with pytest.raises(ValueError, match="is not a whole trace: not a whole packed recording"):
        read_lines(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a whole trace"),
        (b"[]\n0\n", "holds no lines; give a trace with at least one sample"),
        (b'[[1,2,1]]\n1\n{"x":{"":0}}\n12', "is not a whole trace"),
    ],
)
def test_xz_that_holds_no_recording_is_refused_with_a_sentence(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.trace.xz"
    path.write_bytes(lzma.compress(content))
    with pytest.raises(ValueError, match=sentence):
        read_lines(path)


def test_gzipped_and_packed_lines_read_alike_and_the_packed_ones_are_smaller(tmp_path: Path) -> None:
    lines = read_lines(TRACES / "shared-values_untreated_seed2.trace.xz")
    gzipped, packed = tmp_path / "run.jsonl.gz", tmp_path / "run.trace.xz"
    gzipped.write_bytes(gzip.compress(text_of(lines).encode(), 9))
    packed.write_bytes(pack(lines))
    assert text_of(read_lines(gzipped)) == text_of(read_lines(packed)) == text_of(lines)
    assert read_header(gzipped) == read_header(packed) == lines[0]
    assert packed.stat().st_size < 0.7 * gzipped.stat().st_size
