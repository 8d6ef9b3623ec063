"""How runs ended beside their control, from their traces alone."""

from pathlib import Path

import pytest

from foreshock.lab.scoring.courses import courses, draw_courses

TRACES = sorted((Path(__file__).parents[2] / "lab" / "traces").glob("key-bias-small_*_seed8.jsonl.gz"))


def test_arms_are_told_beside_the_control_of_their_recipe_and_seed() -> None:
    ended = {course.arm: course for course in courses(TRACES)}
    assert set(ended) == {"control", "rescued", "untreated"}
    assert ended["control"].excess is None
    assert ended["control"].first_warning is None
    untreated, rescued = ended["untreated"], ended["rescued"]
    assert untreated.excess == pytest.approx(untreated.loss / ended["control"].loss - 1)
    assert untreated.offset > rescued.offset > ended["control"].offset
    assert (untreated.switches, rescued.switches) == (0, 2)


def test_a_run_without_its_control_is_compared_with_nothing() -> None:
    alone = [path for path in TRACES if "untreated" in path.name]
    assert courses(alone)[0].excess is None


def test_the_arms_of_one_recipe_are_drawn_for_the_head_that_was_warned_about(tmp_path: Path) -> None:
    draw_courses(tmp_path / "courses.png", TRACES)
    assert (tmp_path / "courses.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_several_recipes_or_of_no_head_is_refused(tmp_path: Path) -> None:
    foreign = TRACES[0].with_name("key-bias_fp32_batch32.jsonl.gz")
    with pytest.raises(ValueError, match="of 2 recipes and seeds"):
        draw_courses(tmp_path / "no.png", [TRACES[0], foreign])
    with pytest.raises(ValueError, match="no head to draw"):
        draw_courses(tmp_path / "no.png", [path for path in TRACES if "control" in path.name])
