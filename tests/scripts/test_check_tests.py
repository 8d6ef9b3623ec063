"""Test files stand where their module's name says, and the check that holds them to it finds each way to fail."""

from pathlib import Path

import pytest
from tests.loading import module_at

CHECK = module_at(Path(__file__).parents[2] / "scripts" / "check_tests.py")
LONG, SHORT = "x = 1\n" * 101, "x = 1\n" * 100


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which nothing is wrong."""
    for name, text in {
        "monitor/sampling/norms.py": LONG,
        "tests/zoo/test_norms.py": "",
        "lab/run.py": LONG,
        "lab/run_set.py": LONG,
        "tests/lab/test_run.py": "",
        "tests/lab/deep/test_run_set_twice.py": "",
        "kernels/ties.py": LONG,
        "tests/kernels/test_triton_ties.py": "y = 1\n" * 400,
        "server/short.py": SHORT,
        "server/store/migrations/0001.py": LONG,
        "server/ui/node_modules/x/y.py": LONG,
        "server/testing.py": LONG,
        "tests/server/conftest.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


LISTED = {"server/testing.py": "is what `tests/server/conftest.py` stands on"}


def found(tree: Path, listed: dict[str, str] = LISTED) -> list[str]:
    return list(CHECK.findings(tree, listed))


def test_the_list_of_those_without_is_short() -> None:
    """Whether it is right is asked by `make check`."""
    assert 0 < len(CHECK.WITHOUT) < 20


def test_a_tree_in_which_all_is_named_is_quiet(tree: Path) -> None:
    assert found(tree) == []


@pytest.mark.parametrize(
    ("moved", "to", "module"),
    [
        ("tests/zoo/test_norms.py", "tests/lab/test_norms.py", "monitor/sampling/norms.py"),
        ("tests/lab/test_run.py", "tests/lab/test_runs.py", "lab/run.py"),
        ("tests/lab/deep/test_run_set_twice.py", "tests/lab/test_set.py", "lab/run_set.py"),
        ("tests/kernels/test_triton_ties.py", "tests/kernels/test_attention_ties.py", "kernels/ties.py"),
    ],
)
def test_a_long_module_whose_test_file_is_gone_is_named_with_the_file_it_should_have(
    tree: Path, moved: str, to: str, module: str
) -> None:
    (tree / moved).rename(tree / to)
    [sentence] = found(tree)
    assert sentence.startswith(f"{module} has over 100 lines and no test file of its name: tests/")


def test_a_longer_name_is_not_the_test_file_of_a_shorter_one(tree: Path) -> None:
    (tree / "tests/lab/test_run.py").unlink()
    assert len(found(tree)) == 1  # test_run_set_twice is of run_set


def test_a_module_that_grows_needs_one(tree: Path) -> None:
    (tree / "server/short.py").write_text(LONG)
    [sentence] = found(tree)
    assert "tests/server/test_short.py" in sentence


def test_a_listed_module_that_has_one_is_short_or_is_gone_leaves_the_list(tree: Path) -> None:
    (tree / "tests/server/test_testing.py").write_text("")
    assert ["needs no test file" in sentence for sentence in found(tree)] == [True]
    (tree / "tests/server/test_testing.py").unlink()
    (tree / "server/testing.py").write_text(SHORT)
    assert ["needs no test file" in sentence for sentence in found(tree)] == [True]
    (tree / "server/testing.py").unlink()
    assert ["is not there" in sentence for sentence in found(tree)] == [True]


@pytest.mark.parametrize("reason", ["is easy", "is tested by `tests/server/test_gone.py`"])
def test_a_reason_names_the_file_that_tests_the_module(tree: Path, reason: str) -> None:
    [sentence] = found(tree, {"server/testing.py": reason})
    assert sentence.startswith("server/testing.py: the module, or the file that is said to test it, is not there")


def test_a_file_of_more_than_400_lines_is_named_with_its_length_be_it_a_module_or_a_test(tree: Path) -> None:
    (tree / "tests/kernels/test_triton_ties.py").write_text("y = 1\n" * 401)
    assert found(tree) == ["tests/kernels/test_triton_ties.py has 401 lines; at most 400"]
    (tree / "server/testing.py").write_text("y = 1\n" * 401)
    assert "server/testing.py has 401 lines; at most 400" in found(tree)
