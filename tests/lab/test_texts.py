"""Training texts of the lab: reproducible from the same files, and read back unchanged."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.typed import foreshock

from foreshock.lab.texts import VOCABULARIES, installed, make_text, read_text, standard_library, text_file
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import CONTROL, UNTREATED

FILES = 250


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORESHOCK_TEXTS", str(tmp_path / "texts"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Source files of 600 characters each, and three that are skipped: a duplicate, a short file and an image."""
    generator = random.Random(1)
    folder = tmp_path / "packages"
    for number in range(FILES):
        path = folder / f"part{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"name_{generator.randrange(1000):03} = {number:03}\n" for _ in range(40))[:600])
    shutil.copy(folder / "part0" / "module0.py", folder / "copy.py")
    (folder / "short.py").write_text("x = 1\n")
    (folder / "picture.png").write_text("y" * 600)
    return folder


def test_text_has_each_file_of_usual_length_once_and_does_not_depend_on_paths(folder: Path, tmp_path: Path) -> None:
    corpus = make_text("folders", [folder], 10**9)
    assert corpus.source == f"byte pairs of {FILES} files with {600 * FILES:,} characters"
    assert int(corpus.tokens.max()) < VOCABULARIES["folders"]
    read = read_text("folders")
    assert torch.equal(read.tokens, corpus.tokens)
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / "deep")
    assert make_text("folders", [elsewhere], 10**9).sha256 == read.sha256 == corpus.sha256
    (elsewhere / "part1" / "module1.py").write_text("z = 1\n" * 100)
    assert make_text("folders", [elsewhere], 10**9).sha256 != corpus.sha256


def test_text_is_limited_to_the_given_characters_and_joins_several_folders(folder: Path) -> None:
    whole, some = (len(make_text("folders", [folder], characters).tokens) for characters in (10**9, 60_000))
    assert 0.2 * whole < some < 0.5 * whole
    other = folder.parent / "other"
    other.mkdir()
    (other / "notes.md").write_text("A word of its own. " * 40)
    assert f"of {FILES + 1} files" in make_text("folders", [folder, other], 10**9).source


def test_missing_text_or_folder_is_reported_with_advice(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it with `foreshock lab corpus folders --folder DIR"):
        read_text("folders")
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder; give --folder one that is there"):
        make_text("folders", [folder, tmp_path / "nowhere"], 10**9)
    with pytest.raises(ValueError, match="1 files of source of a usual length were found within 700 characters"):
        make_text("folders", [folder], 700)


def test_corpus_command_prints_the_source_and_hash_of_the_text(folder: Path) -> None:
    done = foreshock("lab", "corpus", "folders", "--folder", str(folder), "--characters", "1000000")
    assert done.exit_code == 0, done.output + done.stderr
    assert f"{FILES} files with 150,000 characters:" in done.output
    corpus = read_text("folders")
    assert f"SHA-256 {corpus.sha256}\nIt is at {text_file('folders')}\n" in done.output
    assert foreshock("lab", "corpus", "folders").output == done.output
    refused = foreshock("lab", "corpus", "byte-pairs", "--folder", str(folder))
    assert refused.exit_code == 1
    assert "--folder is for the text of folders" in refused.stderr


# Bytes, and byte pairs of installed packages


def test_text_of_the_standard_library_is_reproducible() -> None:
    corpus, again = standard_library(), standard_library()
    assert corpus.sha256 == again.sha256
    assert torch.equal(corpus.tokens, again.tokens)
    assert len(corpus.tokens) > 2**20


@pytest.mark.full
def test_byte_pair_text_is_reproducible_and_recipes_train_on_it() -> None:
    with pytest.raises(FileNotFoundError, match="make it with `foreshock lab corpus byte-pairs`"):
        read_text("byte-pairs")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        installed(("rich", "no_such_package"))
    first_text, again = (make_text("byte-pairs", installed(("typer", "rich")), 300_000) for _ in range(2))
    assert again.sha256 == first_text.sha256
    assert torch.equal(first_text.tokens, read_text("byte-pairs").tokens)
    assert 50_000 < len(first_text.tokens) < 300_000
    assert 256 < int(first_text.tokens.max()) < VOCABULARIES["byte-pairs"]
    recipe = find_recipe("kb256")
    tiny = replace(recipe, model=replace(recipe.model, layers=1, heads=2, width=16, context=32), batch=2)
    for variant in (UNTREATED, CONTROL):
        training = Training(tiny, variant, 1)
        with training.agent:
            first = float(training.advance())
            course = [float(training.advance()) for _ in range(40)]
        assert first == pytest.approx(np.log(VOCABULARIES["byte-pairs"]), rel=0.05)
        assert course[-1] < first
