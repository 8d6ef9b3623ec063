"""Every generated file is what the catalogue says today, and says that it is generated."""

from pathlib import Path

from foreshock.dashboards.generate import GENERATED, check, generate

REPOSITORY = Path(__file__).parents[2]


def test_the_committed_files_are_what_the_catalogue_says() -> None:
    assert check(REPOSITORY) == [], "run `foreshock dashboards generate` and commit the result"


def test_check_finds_what_was_edited_what_is_missing_and_what_is_left_over(tmp_path: Path) -> None:
    generate(tmp_path)
    assert check(tmp_path) == []
    edited, missing, left = (
        GENERATED / name for name in ("boards/run.json", "prometheus-rules.yml", "boards/old.json")
    )
    (tmp_path / edited).write_text("edited")
    (tmp_path / missing).unlink()
    (tmp_path / left).write_text("{}")
    assert check(tmp_path) == sorted([edited, missing, left])
