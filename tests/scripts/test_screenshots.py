"""What `make screenshots` draws is what README and the documents show; sheets hold every view whole, side by side."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.loading import module_at

ROOT = Path(__file__).parents[2]
SHOTS = module_at(ROOT / "scripts" / "screenshots.py")
DETAILS = {f"details-{scheme}{suffix}" for scheme in ("light", "dark") for suffix in ("", "-phone")}
ELSEWHERE = {
    "paper-run": "scripts/explosion_picture.py",
    "lab-explosion": "lab/NOTEBOOK.md",
    "lab-leads": "lab/NOTEBOOK.md",
}
"""Pictures that no browser takes, and what says how they are drawn."""


def drawn() -> list[str]:
    return [picture.name for picture in [*SHOTS.pictures(("a", "b", "c")), *SHOTS.hard_pictures()]]


def shown() -> Iterator[str]:
    for folder, pages in ((ROOT, "*.md"), (ROOT / "docs", "**/*.md"), (ROOT / "lab", "*.md")):
        for page in folder.glob(pages):
            yield from re.findall(r"images/([a-z-]+)\.png", page.read_text())


def test_every_picture_that_lies_there_is_drawn_by_a_command_and_every_one_that_is_shown_lies_there() -> None:
    there = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert there == {*drawn(), *DETAILS, *ELSEWHERE}
    assert len(drawn()) == len(set(drawn()))
    assert set(shown()) <= there
    for name, source in ELSEWHERE.items():
        assert name in (ROOT / source).read_text()


def test_the_runs_that_are_replayed_are_in_the_repository() -> None:
    assert all(trace.is_file() for trace in SHOTS.RECORDED)


@pytest.mark.parametrize("number", range(3))
def test_a_long_name_is_as_long_as_a_name_may_be_and_tells_its_run_apart_at_its_end_alone(number: int) -> None:
    name = SHOTS.long_name(number)
    assert len(name) == 128
    assert (name[:-1], name[-1]) == (SHOTS.long_name(0)[:-1], str(number))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60) | st.integers(590, 640), st.integers(1, 9)), min_size=1, max_size=8),
    columns=st.integers(1, 4),
)
def test_a_sheet_shows_every_view_whole_and_none_over_another(sizes: list[tuple[int, int]], columns: int) -> None:
    views = [Image.new("RGB", size, (10 + i, 0, 0)) for i, size in enumerate(sizes)]
    whole = SHOTS.sheet(views, columns, "#ffffff")
    seen = {colour: count for count, colour in whole.getcolors(maxcolors=64)}
    for i, (width, height) in enumerate(sizes):
        assert seen[(10 + i, 0, 0)] == width * height
    edges = [whole.crop(box).getcolors() for box in ((0, 0, whole.width, 16), (0, 0, 16, whole.height))]
    assert all(len(colours or ()) == 1 for colours in edges)
