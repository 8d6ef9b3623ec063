"""Files that take their place only when they are whole."""

from pathlib import Path

import pytest

from foreshock.lab.recording.whole_file import whole_file


def stopped_half_way(path: Path) -> None:
    with whole_file(path) as part:
        part.write_text("half of wh")
        raise KeyboardInterrupt


def test_what_ends_half_way_leaves_the_file_before_it_and_the_next_attempt_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "new" / "losses.jsonl"
    with whole_file(path) as part:
        part.write_text("before")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt):
        stopped_half_way(path)
    assert path.read_text() == "before"
    with whole_file(path) as part:
        part.write_text("after")
    assert path.read_text() == "after"
    assert list(path.parent.iterdir()) == [path]
