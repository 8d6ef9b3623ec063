"""Byte-pair text: kept in a file, named by its hash, made of what is installed."""

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.lab.texts import byte_pairs as module
from foreshock.lab.texts.byte_pairs import (
    MADE_FROM,
    PACKAGES,
    SHA256,
    VOCABULARY,
    byte_pairs,
    byte_pairs_file,
    make_byte_pairs,
)
from foreshock.lab.training.arm import CONTROL, UNTREATED
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes texts small, and theirs the folder of this test."""
    monkeypatch.setattr(module, "CHARACTERS", 300_000)
    monkeypatch.setattr(module, "PACKAGES", ("typer", "rich"))
    monkeypatch.setenv("FORESHOCK_TEXTS", str(tmp_path))
    return tmp_path


def test_a_text_that_was_not_made_is_asked_for_by_its_command(small: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it with `foreshock lab corpus byte-pairs`"):
        byte_pairs()


@pytest.mark.full
def test_the_same_packages_give_the_same_text_and_it_is_read_back(small: Path) -> None:
    made = make_byte_pairs()
    again = make_byte_pairs(small / "again.xz")
    assert made.sha256 == again.sha256 != SHA256
    assert torch.equal(made.tokens, byte_pairs().tokens)
    assert byte_pairs_file() == small / "byte-pairs.xz"
    assert 50_000 < len(made.tokens) < 300_000
    assert 256 < int(made.tokens.max()) < VOCABULARY
    assert "typer" in made.source


def test_a_missing_package_is_named(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("rich", "no-such-package"))
    with pytest.raises(FileNotFoundError, match="no-such-package is not installed"):
        make_byte_pairs()


@pytest.mark.full
def test_recipes_on_byte_pairs_train_on_them_in_either_arm(small: Path) -> None:
    make_byte_pairs()
    from dataclasses import replace

    recipe = find_recipe("kb256")
    tiny = replace(recipe, model=replace(recipe.model, layers=1, heads=2, width=16, context=32), batch=2)
    for arm in (UNTREATED, CONTROL):
        training = Training(tiny, arm, 1)
        with training.agent:
            first = float(training.advance())
            course = [float(training.advance()) for _ in range(40)]
        assert first == pytest.approx(np.log(VOCABULARY), rel=0.05)
        assert course[-1] < first
        assert int(training._windows.max()) > 255


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=200))
def test_tokens_come_back_as_they_were_kept(tokens: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.xz")
        path.write_bytes(lzma.compress(b"somewhere\n" + np.array(tokens, dtype="<u2").tobytes()))
        corpus = byte_pairs(path)
    assert corpus.tokens.tolist() == tokens
    assert corpus.source == "byte pairs of somewhere"


def test_the_pinned_text_says_what_it_was_made_from() -> None:
    assert len(SHA256) == 64
    assert all(f" {package} " in MADE_FROM for package in PACKAGES)
