"""The laboratory's text: the same every time, and targets that follow."""

from pathlib import Path

import pytest
import torch

from foreshock.lab.texts.corpus import Corpus, standard_library


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def test_the_corpus_is_the_same_text_every_time(corpus: Corpus) -> None:
    again = standard_library()
    assert corpus.sha256 == again.sha256
    assert torch.equal(corpus.tokens, again.tokens)
    assert len(corpus.tokens) > 2**20


def test_a_python_without_its_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds 0 bytes of Python source"):
        standard_library(tmp_path)
