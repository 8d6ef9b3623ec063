"""Recordings packed by columns read as they were recorded, and files that are none are refused."""

import lzma
from pathlib import Path

import pytest
from tests.lab.short_traces import TRACES

from foreshock.lab.recording.packed import read_lines
from foreshock.lab.shown.story import NAMES

SHOWN = TRACES.parent / "shown"


@pytest.mark.parametrize("name", NAMES)
def test_packed_lines_read_like_the_gzipped_ones_number_for_number(name: str) -> None:
    header, *gzipped = read_lines(SHOWN / f"{name}.jsonl.gz")
    packed = {repr(line) for line in read_lines(TRACES / header["shows"]["file"])}  # repr tells 1 from 1.0
    assert len(gzipped) > 100
    assert [line for line in gzipped if repr(line) not in packed] == []


@pytest.mark.parametrize("cut", [10, 200, -10])
def test_a_packed_recording_that_is_cut_short_is_refused_with_a_sentence(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "run.trace.xz"
    path.write_bytes((TRACES / "shared-values_untreated_seed2.trace.xz").read_bytes()[:cut])
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
