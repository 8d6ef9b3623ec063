"""Text as people train on it: byte pairs of the documentation and source of installed packages, kept in a file.

The text is a property of what is installed: the same packages give the same bytes on every machine, and the hash says
so (`MADE_FROM`, `SHA256`). Runs of the published set saw that text. Machines with other packages train on another text,
whose hash stands in the labels of each of its runs, or are given the file.
"""

import hashlib
import importlib.metadata
import lzma
import os
import platform
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from foreshock.lab.recording.whole_file import whole_file
from foreshock.lab.texts.corpus import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY: Final = 8192
CHARACTERS: Final = 150_000_000
"""Of text, at most; three to four of them make a token."""
PACKAGES: Final = ("torch", "transformers", "sympy", "numpy", "matplotlib", "networkx")
"""Beside the standard library; the larger ones of the development environment."""
MADE_FROM: Final = (
    "Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0, sympy 1.14.0, numpy 2.3.5, matplotlib 3.11.2, networkx 3.6.1"
)
SHA256: Final = "1cf3760fbc00f6fe9ae38df275fcc14be92e6afcb38bc6e0fb09c09d23d8b764"
"""Of the tokens, little-endian uint16, that MADE_FROM gives."""
SUFFIXES: Final = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
_LENGTHS: Final = range(400, 400_001)
"""Characters of a file: shorter ones say little, longer ones are tables."""
_TRAINING_SHARE: Final = 8
"""One file in this many trains the byte pairs."""
_FILES_AT_ONCE: Final = 512


def texts_folder() -> Path:
    """Where texts lie: FORESHOCK_TEXTS, or under the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FORESHOCK_TEXTS") or Path(cache, "foreshock", "texts"))


def byte_pairs_file() -> Path:
    """Where the text lies: byte-pairs.xz in the folder of texts."""
    return texts_folder() / "byte-pairs.xz"


def byte_pairs(path: Path | None = None) -> Corpus:
    """The text of `path` (`byte_pairs_file`), tokens below VOCABULARY. Raises FileNotFoundError where none was made."""
    path = path or byte_pairs_file()
    try:
        made_from, _, data = lzma.decompress(path.read_bytes()).partition(b"\n")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no text at {path}; make it with `foreshock lab corpus byte-pairs`, which takes two minutes and "
            "needs the packages of foreshock[dev]"
        ) from None
    tokens = np.frombuffer(data, dtype="<u2").astype(np.int16)  # below 2^15, and torch indexes int16
    source = f"byte pairs of {made_from.decode()}"
    return Corpus(torch.from_numpy(tokens), hashlib.sha256(data).hexdigest(), source)


def installed() -> str:
    """What the text of this machine would be made from, as MADE_FROM says it. Raises FileNotFoundError for a gap."""
    try:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"{error.name} is not installed; the text is made from {', '.join(PACKAGES)}: install foreshock[dev]"
        ) from None
    return ", ".join([f"Python {platform.python_version()}", *versions])


def make_byte_pairs(path: Path | None = None) -> Corpus:
    """Make the text from what is installed and keep it at `path` (`byte_pairs_file`).

    Files are taken in an order that a fixed seed shuffles, the same content once, until CHARACTERS are reached.
    """
    path = path or byte_pairs_file()
    made_from = installed()
    texts = list(texts_of(_files(), CHARACTERS))
    data = encoded(tokenizer_of(texts, VOCABULARY), texts).tobytes()
    with whole_file(path) as part:
        part.write_bytes(lzma.compress(made_from.encode() + b"\n" + data, preset=6))
    return byte_pairs(path)


def _files() -> list[Path]:
    """Every text file of the packages and of the standard library, by names that do not know where they lie."""
    root = Path(sysconfig.get_paths()["stdlib"])
    named = {
        f"python/{path.relative_to(root).as_posix()}": path
        for path in root.rglob("*")
        if path.suffix in SUFFIXES and not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    }
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or ():
            if file.suffix in SUFFIXES:
                named[f"{package}/{file.as_posix()}"] = Path(str(file.locate()))
    paths = [named[name] for name in sorted(named)]
    random.Random(0).shuffle(paths)  # noqa: S311
    return paths


def texts_of(paths: Iterable[Path], most: int) -> Iterator[str]:
    """The text of each file of a usual length, the same content once, until there are `most` characters."""
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


def tokenizer_of(texts: Sequence[str], vocabulary: int) -> "Tokenizer":
    """Byte pairs as some of the texts have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::_TRAINING_SHARE], trainer)
    return tokenizer


def encoded(tokenizer: "Tokenizer", texts: Sequence[str]) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    """The tokens of all texts, one after another, little-endian."""
    parts = [
        np.asarray(encoding.ids, dtype="<u2")
        for start in range(0, len(texts), _FILES_AT_ONCE)
        for encoding in tokenizer.encode_batch(texts[start : start + _FILES_AT_ONCE])
    ]
    return np.concatenate(parts)
