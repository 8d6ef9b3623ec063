"""`foreshock diagnose`: what is wrong in a person's own code is a sentence that names the place."""

from pathlib import Path

import pytest
from tests.cli.typed import TRACE, foreshock
from tests.lab.tagger_model import diagnosed


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            "fails",
            "tagger_model:fails() failed with RuntimeError: the data are not mounted (tagger_model.py, line",
        ),
        ("gives_nothing", "is no function that returns (model, loss)"),
        ("gives_a_number", "loss() gave a float"),
        ("gives_many_losses", "loss() gave a tensor of shape [1, 20, 40]"),
        ("without_a_graph", "the loss has no graph"),
        ("with_one_batch", "the loss of batch 2 of 2 failed with StopIteration"),
        ("nowhere", "tests.lab.tagger_model has none that is called 'nowhere'"),
    ],
)
def test_what_is_wrong_in_a_persons_own_code_is_a_sentence_that_names_the_place(
    build: str, sentence: str, tmp_path: Path
) -> None:
    said = diagnosed(tmp_path, build=build)
    assert said.exit_code == 1
    assert sentence in said.stderr


def test_a_module_and_a_head_that_do_not_exist_are_sentences(tmp_path: Path) -> None:
    assert "has no head 0.9; it has 0.0 to 1.2" in diagnosed(tmp_path, more=("--head", "0.9")).stderr
    for command in ("diagnose", "doctor"):
        said = foreshock(command, "no_such_module:build")
        assert said.exit_code == 1
        assert "the module no_such_module of no_such_module:build failed" in said.stderr


def test_no_line_ends_in_blanks_where_the_output_is_a_file() -> None:
    lines = foreshock("diagnose", str(TRACE)).stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line.endswith(" ")] == []
