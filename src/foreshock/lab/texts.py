"""The texts that the laboratory trains on: bytes that every Python carries, and byte pairs that are made and kept in
files.

Byte pairs are made from what is installed, or from the source files of folders. The same files give the same tokens on
every machine, wherever they are; each run has their hash among its labels. Published runs on byte pairs saw the text
that `MADE_FROM` gives. Machines with other packages train on another text, or are given the file.
"""

import hashlib
import importlib.metadata
import lzma
import os
import platform
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from foreshock.lab.recording.whole_file import whole_file

PACKAGES: Final = ("torch", "transformers", "sympy", "numpy", "matplotlib", "networkx")
"""Beside the standard library; the larger ones of the development environment."""
MADE_FROM: Final = (
    "Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0, sympy 1.14.0, numpy 2.3.5, matplotlib 3.11.2, networkx 3.6.1"
)
SHA256: Final = "1cf3760fbc00f6fe9ae38df275fcc14be92e6afcb38bc6e0fb09c09d23d8b764"
"""Of the tokens, little-endian uint16, that MADE_FROM gives."""
VOCABULARY: Final = 8192
CHARACTERS: Final = 150_000_000
"""Of the text of packages, at most; three to four of them make a token."""
FOLDER_VOCABULARY: Final = 50_257
"""As many as GPT-2's has."""
BYTE_PAIRS: Final = "byte-pairs.xz"
FOLDERS: Final = "folders.tokens"
_WRITTEN: Final = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
_SOURCE: Final = (*_WRITTEN, ".c", ".cc", ".cpp", ".cu", ".inl", ".pyx", ".pxd", ".js", ".go", ".rs", ".java", ".pl")
_LENGTHS: Final = range(400, 400_001)
"""Characters of a file: shorter ones say little, longer ones are tables."""
_TRAINING_SHARE: Final = 8
"""One file in this many trains the byte pairs."""
_FILES_AT_ONCE: Final = 4096
"""Encoded together: all cores wait for the longest file of each batch."""
_LEFT_OUT: Final = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens in a fixed order, and their SHA-256."""

    tokens: Tensor
    """uint8, int16 or int32 [N]"""
    sha256: str
    source: str
    """what it is, in words"""

    def windows(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """`size` windows of `length` tokens and the one that follows, drawn uniformly: [size, length + 1]."""
        starts = torch.randint(len(self.tokens) - length, (size,), generator=generator)
        return self.tokens[starts[:, None] + torch.arange(length + 1)]


def standard_library(root: Path | None = None) -> Corpus:
    """Every module of the standard library (or of `root`) but its tests, as bytes, by their relative paths.

    Raises FileNotFoundError where there is too little source to train on.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        (path.relative_to(root) for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)),
        key=lambda path: path.as_posix(),
    )
    text = b"\n".join((root / path).read_bytes() for path in paths)
    if len(text) < 2**20:
        raise FileNotFoundError(
            f"{root} holds {len(text)} bytes of Python source; the laboratory needs at least 1 MiB. "
            "Use a Python whose standard library is on disk as .py files"
        )
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    source = f"{len(paths)} modules of the standard library of Python {platform.python_version()}"
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), source)


def text_file(name: str) -> Path:
    """Where a text is: in FORESHOCK_TEXTS, or under the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FORESHOCK_TEXTS") or Path(cache, "foreshock", "texts"), name)


def byte_pairs() -> Corpus:
    """The text of packages, tokens below VOCABULARY. Raises FileNotFoundError where none was made."""
    command = "foreshock lab corpus byte-pairs`, which takes two minutes and needs the packages of foreshock[dev]"
    return _read(text_file(BYTE_PAIRS), command, np.int16)  # below 2^15, and torch indexes int16


def folder_text() -> Corpus:
    """The text of folders, tokens below FOLDER_VOCABULARY. Raises FileNotFoundError where none was made."""
    command = "foreshock lab corpus folders --folder DIR --characters N`, which takes minutes"
    return _read(text_file(FOLDERS), command, np.int32)


def _read(path: Path, command: str, dtype: type[np.integer[Any]]) -> Corpus:
    """A text that was made: a line that says of what, and the tokens."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no text at {path}; make it with `{command}") from None
    head, _, data = (lzma.decompress(kept) if path.suffix == ".xz" else kept).partition(b"\n")
    tokens = torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(dtype))
    return Corpus(tokens, hashlib.sha256(data).hexdigest(), f"byte pairs of {head.decode()}")


def make_byte_pairs(packages: Sequence[str] = PACKAGES, characters: int = CHARACTERS) -> Corpus:
    """Make the text of the standard library and of installed packages, at most so long, and keep it in its file.

    Raises FileNotFoundError for a package that is not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    named = {
        f"python/{path.relative_to(root).as_posix()}": path
        for path in root.rglob("*")
        if path.suffix in _WRITTEN and not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    }
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            needed = f"the text is made from {', '.join(packages)}: install foreshock[dev]"
            raise FileNotFoundError(f"{package} is not installed; {needed}") from None
        for file in importlib.metadata.files(package) or ():
            if file.suffix in _WRITTEN:
                named[f"{package}/{file.as_posix()}"] = Path(str(file.locate()))
    _keep(BYTE_PAIRS, ", ".join(versions), VOCABULARY, list(_texts_of(named, characters)))
    return byte_pairs()


def make_folder_text(folders: Sequence[Path], characters: int) -> Corpus:
    """Make the text of the source files below `folders`, at most `characters` long, and keep it in its file.

    Raises FileNotFoundError for a folder that is not there, ValueError where there are too few files.
    """
    named: dict[tuple[int, str], Path] = {}
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; give --folder one that is there")
        for path in folder.rglob("*"):
            if path.suffix in _SOURCE and path.is_file():
                named[number, path.relative_to(folder).as_posix()] = path
    texts = list(_texts_of(named, characters))
    if len(texts) < 2:
        raise ValueError(
            f"{len(texts)} files of source of a usual length were found within {characters} characters; name folders "
            f"with files that end with {', '.join(_SOURCE)}, and allow more --characters"
        )
    head = f"{len(texts):,} files with {sum(map(len, texts)):,} characters"
    _keep(FOLDERS, head, FOLDER_VOCABULARY, texts)
    return folder_text()


def _texts_of(named: Mapping[Any, Path], most: int) -> Iterator[str]:
    """The text of each file of a usual length, the same content once, until there are `most` characters.

    The order is shuffled by a fixed seed, by names that do not know where the files lie.
    """
    paths = [named[name] for name in sorted(named)]
    random.Random(0).shuffle(paths)  # noqa: S311
    seen: set[bytes] = set()
    characters = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) not in _LENGTHS or digest in seen:
            continue
        seen.add(digest)
        characters += len(text)
        if characters > most:
            return
        yield text


def _keep(name: str, head: str, vocabulary: int, texts: Sequence[str]) -> None:
    """Write `head` and the tokens of the texts, little-endian uint16, by byte pairs that some of them give."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::_TRAINING_SHARE], trainer)
    batches = (texts[start : start + _FILES_AT_ONCE] for start in range(0, len(texts), _FILES_AT_ONCE))
    tokens = [np.asarray(one.ids, dtype="<u2") for batch in batches for one in tokenizer.encode_batch_fast(batch)]
    data = head.encode() + b"\n" + np.concatenate(tokens).tobytes()
    with whole_file(text_file(name)) as part:
        part.write_bytes(lzma.compress(data, preset=6) if name.endswith(".xz") else data)
